"""What a caller is told when serving refuses something."""


class Rejected(Exception):
    """A submission that cannot be served: the HTTP status, OpenAI's three fields of an error, and a line if any.

    `message` is meant for a person; `code` and `param` for a program. `line` counts from 1 in a batch file.
    `further` holds other problems of the same submission.
    """

    def __init__(
        self, *, http_status: int, code: str, message: str, param: str | None = None, line: int | None = None
    ) -> None:
        self.http_status = http_status
        self.code = code
        self.param = param
        self.message = message
        self.line = line
        self.further: tuple[Rejected, ...] = ()
        super().__init__(message if line is None else f"line {line}: {message}")

    def as_batch_error(self) -> dict[str, str | int | None]:
        """The object that OpenAI lists under a failed batch's `errors.data`."""
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}

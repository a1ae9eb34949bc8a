"""The lines of a batch file: read as a stream, parsed with care, checked one by one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from django.utils.translation import gettext as _

from penstock.accounts.models import Team
from penstock.registry.models import ModelRelease, Task
from penstock.registry.policy import PolicyError, resolve
from penstock.serving import blobs
from penstock.serving.admission import TASK_KEY, Admitted, admit
from penstock.serving.models import Batch
from penstock.serving.prompts import PromptTokenizer, tokenizer_of
from penstock.serving.rejection import Rejected

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_CUSTOM_ID_CHARACTERS = 255
MAX_INTEGER_DIGITS = 1000
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LINE_KEYS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(slots=True)
class Resolver:
    """Policy's answers, asked once for each model and task that a file names."""

    answers: dict[tuple[str, str], tuple[Task, ModelRelease] | PolicyError] = field(default_factory=dict)

    def __call__(self, *, team: Team, model: str, task_name: str = "") -> tuple[Task, ModelRelease]:
        key = (model, task_name)
        if key not in self.answers:
            try:
                self.answers[key] = resolve(team=team, model=model, task_name=task_name)
            except PolicyError as error:
                self.answers[key] = error
        answer = self.answers[key]
        if isinstance(answer, PolicyError):
            raise PolicyError(answer.code, answer.param, answer.message)
        return answer


class Tokenizers:
    """Each release's tokenizer, found once a file."""

    def __init__(self) -> None:
        self._known: dict[int, PromptTokenizer] = {}

    def __call__(self, release: ModelRelease) -> PromptTokenizer:
        if release.pk not in self._known:
            self._known[release.pk] = tokenizer_of(release)
        return self._known[release.pk]


def check_line(
    raw: bytes,
    *,
    batch: Batch,
    number: int,
    seen: dict[str, int],
    resolver: Resolver,
    tokenizers: Tokenizers,
) -> tuple[str, Admitted]:
    """The line's `custom_id`, and its body admitted. Raises Rejected for the first thing that is wrong."""
    line = _parse(raw)
    custom_id = line.get("custom_id")
    if "custom_id" not in line or custom_id is None:
        raise bad_line("missing_required_parameter", "custom_id", _("custom_id is missing; it is required."))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        raise bad_line(
            "invalid_custom_id",
            "custom_id",
            _("custom_id must be a text of 1 to %(most)d characters.") % {"most": MAX_CUSTOM_ID_CHARACTERS},
        )
    if "\x00" in custom_id or any("\ud800" <= character <= "\udfff" for character in custom_id):
        raise bad_line("invalid_custom_id", "custom_id", _("custom_id holds something that is not a character."))
    if custom_id in seen:
        raise bad_line(
            "duplicate_custom_id",
            "custom_id",
            _("custom_id '%(id)s' was used on line %(line)d already; each must be unique in the file.")
            % {"id": custom_id, "line": seen[custom_id]},
        )
    seen[custom_id] = number
    if line.get("method") != "POST":
        code = "invalid_method" if "method" in line else "missing_required_parameter"
        raise bad_line(code, "method", _("method must be 'POST'."))
    if line.get("url") != batch.endpoint:
        code = "invalid_url" if "url" in line else "missing_required_parameter"
        raise bad_line(
            code, "url", _("url must be the batch's endpoint, '%(endpoint)s'.") % {"endpoint": batch.endpoint}
        )
    if "body" not in line:
        raise bad_line("missing_required_parameter", "body", _("body is missing; it is required."))
    for name in line.keys() - LINE_KEYS:
        raise bad_line("unknown_parameter", name, _("A line has no field of this name: %(name)s.") % {"name": name})
    body = line["body"]
    if isinstance(body, dict) and body.get("stream"):
        raise bad_line("unsupported_parameter", "body.stream", _("A batch cannot stream; leave `stream` out."))
    try:
        admitted = admit(
            team=batch.team,
            api_key=batch.api_key,
            body=body,
            endpoint=batch.endpoint,
            tokenizer=tokenizers,
            task_name=batch.metadata.get(TASK_KEY, ""),
            resolver=resolver,
        )
    except Rejected as problem:
        for one in (problem, *problem.further):
            one.param = f"body.{one.param}" if one.param else "body"
        raise
    return custom_id, admitted


def numbered_lines(sha256: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, blank ones left out; of a line that is too long, one byte more than is allowed."""
    with blobs.open_blob(sha256) as stream:
        number = 0
        while raw := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = raw
            while len(raw) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
                rest = stream.readline(MAX_LINE_BYTES)
            if number == 1:
                raw = raw.removeprefix(BYTE_ORDER_MARK)  # the mark that some editors put first
            if raw.strip():
                yield number, raw


def _parse(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_LINE_BYTES:
        raise bad_line("line_too_long", None, _("A line may have %(most)d bytes.") % {"most": MAX_LINE_BYTES})
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_line(
            "invalid_encoding", None, _("The line is not UTF-8: byte %(at)d cannot be read.") % {"at": error.start + 1}
        ) from error
    try:
        line = read_json(text)
    except json.JSONDecodeError as error:
        raise bad_line(
            "invalid_json_line",
            None,
            _("The line is not valid JSON: %(problem)s at character %(at)d.")
            % {"problem": error.msg, "at": error.pos + 1},
        ) from error
    except (ValueError, RecursionError) as error:
        raise bad_line("invalid_json_line", None, _("The line is not valid JSON: %(why)s.") % {"why": error}) from error
    if not isinstance(line, dict):
        raise bad_line("invalid_json_line", None, _("The line must be a JSON object."))
    return line


def read_json(text: str) -> Any:
    """The value of a line. Raises ValueError, also for NaN and for a name that stands twice in one object, and
    RecursionError."""
    return json.loads(text, parse_constant=_refuse_constant, parse_int=_integer, object_pairs_hook=_object)


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        message = _("a whole number of %(count)d digits is too long; at most %(most)d are read")
        raise ValueError(message % {"count": len(digits), "most": MAX_INTEGER_DIGITS})
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(_("%(name)s is not a JSON number") % {"name": name})


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are unique: of two values under one name, which one counts would be a guess."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _value in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(_("the name '%(name)s' stands twice in one object") % {"name": twice})
    return result


def bad_line(code: str, param: str | None, message: str) -> Rejected:
    return Rejected(http_status=400, code=code, param=param, message=message)

"""The ASGI application, behind a bound on what a client may send."""

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from django.core.asgi import get_asgi_application

from penstock.config import config

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Any], Awaitable[None]]

FORM_OVERHEAD_BYTES = 1024 * 1024
UPLOAD_PATHS = ("/v1/files", "/new/batch/", "/new/pilot/")


class BodyTooLarge(Exception):
    """A request body past its bound."""


class BoundedBody:
    """Ends a request whose body is too large before any of it is kept.

    Django spools a body to disk before a view, and so any permission check, sees it. Uploads may be as large as a batch
    file (`PENSTOCK_MAX_FILE_BYTES`); everything else is bounded by `other_bytes`.
    """

    def __init__(self, application: Application, *, upload_bytes: int, other_bytes: int) -> None:
        self.application = application
        self.upload_bytes = upload_bytes + FORM_OVERHEAD_BYTES
        self.other_bytes = other_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        limit = self.upload_bytes if scope["path"].startswith(UPLOAD_PATHS) else self.other_bytes
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            await self.refuse(send, limit)
            return
        received, answered = 0, False

        async def bounded() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise BodyTooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self.application(scope, bounded, watched)
        except BodyTooLarge:
            if not answered:
                await self.refuse(send, limit)

    async def refuse(self, send: Send, limit: int) -> None:
        error = {
            "message": f"The request body is larger than the {limit} bytes that are taken here.",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_too_large",
        }
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})


application = BoundedBody(
    get_asgi_application(), upload_bytes=config().max_file_bytes, other_bytes=config().max_body_bytes
)

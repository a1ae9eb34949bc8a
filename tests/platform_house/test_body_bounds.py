import asyncio
import json
from typing import Any

from penstock.asgi import BoundedBody


def answer_to(chunks: list[bytes], path: str = "/v1/chat/completions", headers: Any = ()) -> tuple[int, bytes, int]:
    """Status, body, and how many bytes reached the application."""
    sent: list[dict[str, Any]] = []
    reached = 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal reached
        more = True
        while more:
            message = await receive()
            reached += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})

    waiting = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    bounded = BoundedBody(application, upload_bytes=10_000_000, other_bytes=100)
    asyncio.run(bounded({"type": "http", "path": path, "headers": list(headers)}, receive, send))
    return sent[0]["status"], sent[-1]["body"], reached


def test_a_body_within_its_bound_passes() -> None:
    assert answer_to([b"x" * 60, b"x" * 40]) == (200, b"fine", 100)


def test_a_body_past_its_bound_is_refused_with_the_bound_named() -> None:
    status, body, reached = answer_to([b"x" * 60, b"x" * 41])
    assert status == 413
    assert "100 bytes" in json.loads(body)["error"]["message"]
    assert reached == 60


def test_a_declared_length_past_the_bound_is_refused_unread() -> None:
    assert answer_to([b"x"], headers=[(b"content-length", b"101")])[2] == 0


def test_uploads_may_be_as_large_as_a_batch_file() -> None:
    assert answer_to([b"x" * 5000], path="/v1/files")[0] == 200

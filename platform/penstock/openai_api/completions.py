"""/v1/chat/completions and /v1/completions: single requests, streamed or whole; and /v1/embeddings, always whole.

Everything about a request is checked, and the engine host has begun to answer, before a stream is opened: what is
wrong comes as an HTTP error. A client that hangs up cancels its request.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.http import HttpResponseBase, JsonResponse, StreamingHttpResponse

from inference.json_lines import json_text
from penstock.openai_api.door import Call
from penstock.openai_api.errors import ApiError, envelope
from penstock.serving import live
from penstock.serving.bodies import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS
from penstock.serving.models import Request
from penstock.serving.shapes import (
    chat_logprobs,
    completion_body,
    completion_id,
    finish_reason_of,
    legacy_logprobs,
    system_fingerprint,
)

DONE = b"data: [DONE]\n\n"
Events = AsyncGenerator[live.LiveEvent, None]


async def chat(call: Call) -> HttpResponseBase:
    return await _answer(call, CHAT_COMPLETIONS)


async def complete(call: Call) -> HttpResponseBase:
    return await _answer(call, COMPLETIONS)


async def embed(call: Call) -> HttpResponseBase:
    return await _answer(call, EMBEDDINGS)


async def _answer(call: Call, endpoint: str) -> HttpResponseBase:
    body = call.body()
    request = await sync_to_async(live.submit)(
        user=call.user, team=call.team, api_key=call.key, body=body, endpoint=endpoint
    )
    events = cast(Events, live.run(request=request))
    try:
        first = await anext(events)
        if isinstance(first, live.Finished):
            _raise_failure(first.request)
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            chunks = _stream(Chunks(request, usage=usage), first, events)
            response = StreamingHttpResponse(chunks, content_type="text/event-stream; charset=utf-8")
            response["X-Accel-Buffering"] = "no"  # a proxy must not hold tokens back
            response["Cache-Control"] = "no-cache"
            return response
        finished = first
        while not isinstance(finished, live.Finished):
            finished = await anext(events)
    except BaseException:  # a client that hung up among them: what still runs is cancelled
        await events.aclose()
        raise
    _raise_failure(finished.request)
    return JsonResponse(completion_body(finished.request))


def _raise_failure(request: Request) -> None:
    """Raises ApiError for a request that did not succeed, as the engine host told it."""
    if request.status != Request.Status.SUCCEEDED:
        raise ApiError(request.http_status or 500, request.error_code or None, request.error_message)


async def _stream(chunks: "Chunks", first: live.LiveEvent, events: Events) -> AsyncIterator[bytes]:
    """Server-sent events. Closing this closes `events`, which cancels the request."""
    try:
        for opening in chunks.openings():
            yield opening
        event = first
        while isinstance(event, live.TextDelta):
            if event.text or event.logprobs:
                yield chunks.delta(event)
            event = await anext(events)
        request = event.request
        if request.status == Request.Status.SUCCEEDED:
            for closing in chunks.closings(request):
                yield closing
            if chunks.usage:
                yield chunks.totals(request)
        else:
            yield _event(envelope(request.http_status or 500, request.error_code or None, request.error_message))
        yield DONE
    finally:
        await events.aclose()


class Chunks:
    """The chunks of one answer: the same id and time in each."""

    def __init__(self, request: Request, *, usage: bool) -> None:
        self.chat = request.endpoint == CHAT_COMPLETIONS
        self.usage = usage
        self.outputs: int = request.body.get("n") or 1
        self.top_logprobs = request.body.get("logprobs")
        self.head = {
            "id": completion_id(request),
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": int(request.created_at.timestamp()),
            "model": request.body["model"],
            "system_fingerprint": system_fingerprint(request),
        }
        self.told = [0] * self.outputs  # characters of each output's tokens so far

    def openings(self) -> list[bytes]:
        if not self.chat:
            return []
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._choice(index, delta, "", None) for index in range(self.outputs)]

    def delta(self, news: live.TextDelta) -> bytes:
        if self.chat or news.logprobs is None:
            logprobs = chat_logprobs(news.logprobs)
        else:
            logprobs = legacy_logprobs(news.logprobs, self.told[news.index], self.top_logprobs or 0)
            self.told[news.index] += sum(len(item["token"]) for item in news.logprobs)
        return self._choice(news.index, {"content": news.text}, news.text, None, logprobs)

    def closings(self, request: Request) -> list[bytes]:
        return [self._choice(index, {}, "", finish_reason_of(request, index)) for index in range(self.outputs)]

    def totals(self, request: Request) -> bytes:
        return _event({**self.head, "choices": [], "usage": completion_body(request)["usage"]})

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        text: str,
        finish_reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        said = {"delta": delta} if self.chat else {"text": text}
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**self.head, "choices": [choice], **({"usage": None} if self.usage else {})})


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json_text(value)}\n\n".encode()

"""From the engine's completion to the result of a request."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _
from pydantic import TypeAdapter

from inference.request import Completion, TokenLogprob, TopLogprob
from penstock.serving.completion import Result
from penstock.serving.expiry import EXPIRED_CODE, expired_message
from penstock.serving.models import Request
from penstock.serving.vectors import Vectors

LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of a request's texts; or it was cancelled, or failed for a reason. Seconds as in `Result`."""

    request_id: str
    prompt_tokens: int
    queued_seconds: float
    duration_seconds: float
    compute_seconds: float
    vectors: Vectors | None = None
    cancelled: bool = False
    error: str = ""


EMBEDDED = TypeAdapter(Embedded)


def result_of(
    request_id: str,
    completion: Completion,
    *,
    finished_at: datetime,
    cancelled_as: Request.Status | None = None,
) -> Result:
    """What the engine's completion means for the request that it answers."""
    status, http_status, code, message = Request.Status.SUCCEEDED, 200, "", ""
    if completion.finish_reason == "error":
        status, http_status, code = Request.Status.FAILED, 500, "engine_error"
        message = _("The engine could not complete this request: %(why)s") % {"why": completion.error}
    elif completion.finish_reason == "cancelled":
        status = cancelled_as or Request.Status.CANCELLED
        code, message = _why_it_ended(status)
    return Result(
        request_id=request_id,
        status=status,
        finished_at=finished_at,
        started_at=_started_at(completion, finished_at),
        output_text=storable(completion.text),
        finish_reason=completion.finish_reason,
        http_status=http_status if status in (Request.Status.SUCCEEDED, Request.Status.FAILED) else None,
        error_code=code,
        error_message=message,
        prompt_tokens=completion.prompt_tokens if completion.compute_seconds else 0,
        output_tokens=completion.output_tokens,
        cached_prompt_tokens=completion.cached_prompt_tokens,
        choices=_choices(completion),
        queued_seconds=completion.queued_seconds,
        ttft_seconds=completion.ttft_seconds,
        duration_seconds=completion.duration_seconds,
        compute_seconds=completion.compute_seconds,
    )


def embedded_result(embedded: Embedded, *, finished_at: datetime, cancelled_as: Request.Status | None = None) -> Result:
    """What the embedding of a request's texts means for it."""
    http_status: int | None
    status, http_status, code, message = Request.Status.SUCCEEDED, 200, "", ""
    if embedded.cancelled:
        status, http_status = cancelled_as or Request.Status.CANCELLED, None
        code, message = _why_it_ended(status)
    elif embedded.vectors is None:
        status, http_status, code = Request.Status.FAILED, 500, "engine_error"
        message = _("The engine could not complete this request: %(why)s") % {"why": embedded.error}
    return Result(
        request_id=embedded.request_id,
        status=status,
        finished_at=finished_at,
        started_at=finished_at - timedelta(seconds=embedded.duration_seconds - embedded.queued_seconds),
        http_status=http_status,
        error_code=code,
        error_message=message,
        prompt_tokens=embedded.prompt_tokens if embedded.compute_seconds else 0,
        queued_seconds=embedded.queued_seconds,
        duration_seconds=embedded.duration_seconds,
        compute_seconds=embedded.compute_seconds,
        vectors=embedded.vectors,
    )


def storable(text: str) -> str:
    """PostgreSQL's text takes no U+0000; a byte-level model can make one."""
    return text.replace("\x00", "\ufffd")


def _choices(completion: Completion) -> list[dict[str, Any]] | None:
    """As `Request.choices` keeps them; None for one output without log-probabilities."""
    if len(completion.choices) <= 1 and completion.logprobs is None:
        return None
    return [
        {
            "finish_reason": choice.finish_reason,
            "logprobs": None if choice.logprobs is None else [logprob_item(one) for one in choice.logprobs],
            **({"text": storable(choice.text)} if choice.index else {}),
        }
        for choice in completion.choices
    ]


def logprob_item(token: TokenLogprob) -> dict[str, Any]:
    """A token as OpenAI's chat tells it."""
    return {**_told(token), "top_logprobs": [_told(one) for one in token.top]}


def _told(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    # JSON has no infinity; OpenAI writes this for what is very unlikely.
    return {
        "token": storable(token.text),
        "logprob": max(token.logprob, LEAST_LOGPROB),
        "bytes": list(token.bytes),
    }


def never_ran(request: Request, status: Request.Status) -> Result:
    """Of a request that the end of its batch, `cancelled` or `expired`, came before."""
    code, message = _why_it_ended(status)
    return Result(
        request_id=request.pk, status=status, finished_at=timezone.now(), error_code=code, error_message=message
    )


def _why_it_ended(status: Request.Status) -> tuple[str, str]:
    if status == Request.Status.EXPIRED:
        return EXPIRED_CODE, expired_message()
    return "cancelled", _("The request was cancelled while it ran.")


def failed(request: Request, code: str, message: str, *, http_status: int) -> Result:
    return Result(
        request_id=request.pk,
        status=Request.Status.FAILED,
        finished_at=timezone.now(),
        http_status=http_status,
        error_code=code,
        error_message=message,
    )


def _started_at(completion: Completion, finished_at: datetime) -> datetime | None:
    """When the engine first computed for the request; None if it never did."""
    if not completion.compute_seconds:
        return None
    return finished_at - timedelta(seconds=completion.duration_seconds - completion.queued_seconds)

"""From the engine's completion to the result of a request."""

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _

from inference.request import Completion, TokenLogprob, TopLogprob
from penstock.serving.completion import Result
from penstock.serving.expiry import EXPIRED_CODE, expired_message
from penstock.serving.models import Request

LEAST_LOGPROB = -9999.0


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
        if status == Request.Status.EXPIRED:
            code, message = EXPIRED_CODE, expired_message()
        else:
            code, message = "cancelled", _("The request was cancelled while it ran.")
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

"""OpenAI's shapes of a finished request: the body of an answer, and the line of a batch's output or error file."""

from typing import Any

from penstock.serving.bodies import CHAT_COMPLETIONS, EMBEDDINGS
from penstock.serving.models import Request
from penstock.serving.vectors import embedding_body

INTERNAL_ERROR = "server_error"
INVALID_REQUEST = "invalid_request_error"


def completion_body(request: Request) -> dict[str, Any]:
    """The `chat.completion` (or `text_completion`) object of a request that succeeded, or its list of embeddings.

    The release is loaded, and for the last the `embedding`.
    """
    if request.endpoint == EMBEDDINGS:
        return embedding_body(request)
    chat = request.endpoint == CHAT_COMPLETIONS
    prompt_tokens, output_tokens = request.prompt_tokens or 0, request.output_tokens or 0
    return {
        "id": completion_id(request),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(request.created_at.timestamp()),
        "model": request.body["model"],
        "choices": [_choice(request, index, text) for index, text in enumerate(request.output_texts)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": request.cached_prompt_tokens or 0},
        },
        "system_fingerprint": system_fingerprint(request),
    }


def _choice(request: Request, index: int, text: str) -> dict[str, Any]:
    items = logprobs_of(request, index)
    if request.endpoint != CHAT_COMPLETIONS:
        logprobs = None if items is None else legacy_logprobs(items, 0, request.body["logprobs"])
        said: dict[str, Any] = {"text": text, "logprobs": logprobs}
    else:
        message = {"role": "assistant", "content": text, "refusal": None}
        said = {"message": message, "logprobs": chat_logprobs(items)}
    return {"index": index, **said, "finish_reason": finish_reason_of(request, index)}


def finish_reason_of(request: Request, index: int) -> str:
    """Of one output; the request's own is the first one's."""
    return str(request.choices[index]["finish_reason"]) if request.choices else request.finish_reason


def logprobs_of(request: Request, index: int) -> list[dict[str, Any]] | None:
    """The tokens of one output with their log-probabilities, where asked for."""
    return request.choices[index]["logprobs"] if request.choices else None


def chat_logprobs(items: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if items is None else {"content": items, "refusal": None}


def legacy_logprobs(items: list[dict[str, Any]], start: int, most: int) -> dict[str, Any]:
    """The parallel lists of (legacy) completions. `start`: characters of the output before the first token; `most`: of
    the likeliest tokens that were asked for, to which the token itself comes where it is none of them."""
    offsets = []
    for item in items:
        offsets.append(start)
        start += len(item["token"])
    return {
        "tokens": [item["token"] for item in items],
        "token_logprobs": [item["logprob"] for item in items],
        "top_logprobs": [
            {one["token"]: one["logprob"] for one in (item, *reversed(item["top_logprobs"]))} for item in items
        ]
        if most
        else None,
        "text_offset": offsets,
    }


def completion_id(request: Request) -> str:
    """A single request's own identifier; for a batch's request one made from its."""
    prefix = "chatcmpl" if request.endpoint == CHAT_COMPLETIONS else "cmpl"
    if request.batch_id is None:
        return request.pk
    return f"{prefix}-{request.pk.removeprefix('batch_req_')}"


def system_fingerprint(request: Request) -> str:
    """Names the weights: the same fingerprint with the same seed gives the same output."""
    return f"fp_{request.model_release.digest[:12]}"


def error_body(request: Request) -> dict[str, Any]:
    """OpenAI's error envelope for a request that failed."""
    http_status = request.http_status or 500
    return {
        "error": {
            "message": request.error_message,
            "type": INVALID_REQUEST if http_status < 500 else INTERNAL_ERROR,
            "param": None,
            "code": request.error_code or None,
        }
    }


def batch_line(request: Request) -> dict[str, Any]:
    """A line of the output file for a request that succeeded, of the error file for any other.

    A failure that has an HTTP status keeps a `response`; `error` is for what never was one: expiry and cancelling.
    """
    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    if request.status == Request.Status.SUCCEEDED:
        response = _response(request, 200, completion_body(request))
    elif request.status == Request.Status.FAILED:
        response = _response(request, request.http_status or 500, error_body(request))
    else:
        error = {"code": request.error_code, "message": request.error_message}
    return {"id": request.pk, "custom_id": request.custom_id, "response": response, "error": error}


def _response(request: Request, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status_code, "request_id": request.pk, "body": body}

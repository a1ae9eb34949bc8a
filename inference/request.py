"""What goes into the engine and what comes out. Free of torch, so that every process may import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from inference.errors import InvalidRequest
from inference.parameters import Constraint, SamplingParams

__all__ = [
    "Choice",
    "Completion",
    "Constraint",
    "FinishReason",
    "GenerationRequest",
    "InvalidRequest",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprob",
    "TopLogprob",
]

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt. `priority`: a lower number is more urgent; equals run in order of arrival.

    Raises InvalidRequest, naming the field, for values of a wrong kind. The engine looks at the tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise InvalidRequest("request_id", f"must be a text, not {self.request_id!r}")
        if not isinstance(self.prompt_token_ids, tuple):
            raise InvalidRequest("prompt", f"must be a tuple of token ids, not {type(self.prompt_token_ids).__name__}")
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest("sampling", f"must be SamplingParams, not {type(self.sampling).__name__}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest("priority", f"must be a whole number, not {self.priority!r}")


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at a place. `text` and `bytes` as in TokenLogprob."""

    token_id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the output and its log-probability.

    logprob: natural logarithm of its share in the softmax of the model's own logits, before penalties, bias,
    constraint, temperature and cut-offs (as OpenAI and vLLM's default have it). text: the token's own text, U+FFFD for
    the part of a character; bytes: the same exactly, 0 to 255 each. top: the likeliest tokens at its place, the
    likeliest first; the token itself is among them only where it is one of these.
    """

    token_id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one running request: `token_ids` just made, and the `text` that became certain with them.

    Text is held back while a character is incomplete, or while it could be the start of a stop string. The texts of
    all events of a request's sample `index`, one after the other, are that choice's text. `logprobs`, where they were
    asked for, are those of `token_ids`. With best_of above n there are no events, since only the end tells which
    samples are returned.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample of a request.

    index: 0 to n - 1, by number of sample, or by rank where best_of chose. logprobs: where asked for.
    cumulative_logprob: the sum of its tokens' log-probabilities, where logprobs or best_of above n asked for them.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of one request.

    `choices` are its n samples; `token_ids`, `text`, `finish_reason` and `logprobs` are the first one's. `token_ids`
    include the end token where the model made one; `text` does not. `output_tokens` counts what was generated over all
    samples, those that best_of dropped too. `queued_seconds` runs from submission to the first step that held the
    request, `ttft_seconds` to its first token, `duration_seconds` to its end. `compute_seconds` is its share of the
    engine's busy time: each step's wall time, split over the step's rows by the tokens that each brought; over all
    requests the shares add up to the busy time. `cached_prompt_tokens` of the prompt_tokens were found in
    the cache, left there by other requests that begin alike.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None
    prompt_tokens: int
    output_tokens: int
    queued_seconds: float
    ttft_seconds: float | None
    duration_seconds: float
    compute_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    choices: tuple[Choice, ...] = ()
    cached_prompt_tokens: int = 0

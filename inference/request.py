"""What goes into the engine and what comes out. Free of torch, so that every process may import it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from inference.errors import InvalidRequest

__all__ = ["Completion", "FinishReason", "GenerationRequest", "InvalidRequest", "SamplingParams", "TokenEvent"]

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `temperature` 0 is greedy. With a temperature, `seed` makes the draw repeatable whatever else is in the batch.
    `stop` strings end the output and are not part of it. `ignore_eos` and `min_tokens` keep the model from ending.
    Raises InvalidRequest, naming the field.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"must be a whole number of at least 1, not {self.max_tokens!r}")
        if not math.isfinite(self.temperature) or not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest("temperature", f"must be from 0 to 100, not {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("top_p", f"must be above 0 and at most 1, not {self.top_p!r}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidRequest("seed", f"must fit in 64 bits, not {self.seed!r}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest("stop", "must be a tuple of strings that are not empty")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"must be from 0 to max_tokens ({self.max_tokens}), not {self.min_tokens!r}"
            )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt. `priority`: a lower number is more urgent; equals run in order of arrival."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one running request: `token_ids` just made, and the `text` that became certain with them.

    Text is held back while a character is incomplete, or while it could be the start of a stop string. The texts of
    all events of a request, one after the other, are its completion's text.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of one request.

    `token_ids` include the end token where the model made one; `text` does not. `queued_seconds` runs from submission
    to the first step that held the request, `ttft_seconds` to its first token, `duration_seconds` to its end.
    `compute_seconds` is its share of the engine's busy time: each step's wall time, split over the step's rows by the
    tokens that each brought; over all requests the shares add up to the busy time.
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

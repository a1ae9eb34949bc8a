"""The state of one request on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inference.request import Completion, FinishReason, GenerationRequest, TokenEvent
from inference.stopping import StopMatcher
from inference.tokenizer import Detokenizer, Tokenizer


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens so far, and where they lie in the cache.

    tokens: prompt and output. computed: how many of them are in the cache; when it is one short of all, the sequence
    decodes, otherwise it is in prefill. most_computed: the most that computed ever was, which falls back to 0 when the
    sequence has to give up its pages. cached_prompt_tokens: of the prompt, found in the cache at the first attempt.
    rotation_offset: added to positions where the rotary tables are read, for a sequence whose length asks for others
    (longrope); such sequences share no pages with others.
    """

    request: GenerationRequest
    arrival: int
    max_tokens: int
    on_token: Callable[[TokenEvent], None] | None
    on_finish: Callable[[Completion], None]
    tokens: list[int]
    prompt_tokens: int
    detokenizer: Detokenizer | None
    stopper: StopMatcher
    eos_token_ids: frozenset[int]
    computed: int = 0
    rotation_offset: int = 0
    pages: list[int] = field(default_factory=list)
    most_computed: int = 0
    cached_prompt_tokens: int = 0
    generator: Any = None
    text: list[str] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    compute_seconds: float = 0.0
    cancelled: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by urgency, then arrival."""
        return self.request.priority, self.arrival

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def accept(self, token: int) -> FinishReason | None:
        """Add a chosen token, tell the listener, and say whether the sequence has ended by it."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.tokens.append(token)
        sampling = self.request.sampling
        ended: FinishReason | None = None
        if token in self.eos_token_ids and not sampling.ignore_eos:
            ended = "stop"
        fresh = self.detokenizer.feed(token) if self.detokenizer is not None else ""
        # Text before min_tokens cannot stop the output; what comes later is watched.
        certain, stopped = self.stopper.feed(fresh) if self.output_tokens >= sampling.min_tokens else (fresh, False)
        if stopped:
            self.detokenizer = None
            ended = "stop"
        elif ended is None and self.output_tokens >= self.max_tokens:
            ended = "length"
        if ended and not stopped:
            certain += self._rest()
        self._tell(certain, (token,))
        return ended

    def _rest(self) -> str:
        """What was held back, once it is clear that no more tokens come."""
        tail = self.detokenizer.finish() if self.detokenizer is not None else ""
        self.detokenizer = None
        certain, stopped = self.stopper.feed(tail)
        return certain if stopped else certain + self.stopper.finish()

    def _tell(self, text: str, token_ids: tuple[int, ...]) -> None:
        if text:
            self.text.append(text)
        if self.on_token is not None and (text or token_ids):
            self.on_token(TokenEvent(self.request.request_id, text, token_ids))

    def completion(self, reason: FinishReason, error: str | None = None) -> Completion:
        """The outcome, as of now."""
        if reason in ("cancelled", "error"):
            self._tell(self._rest(), ())
        now = time.perf_counter()
        started = now if self.started_at is None else self.started_at
        first = self.first_token_at
        return Completion(
            request_id=self.request.request_id,
            token_ids=tuple(self.tokens[self.prompt_tokens :]),
            text="".join(self.text),
            finish_reason=reason,
            error=error,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            output_tokens=self.output_tokens,
            queued_seconds=started - self.submitted_at,
            ttft_seconds=None if first is None else first - self.submitted_at,
            duration_seconds=now - self.submitted_at,
            compute_seconds=self.compute_seconds,
        )


def new_sequence(
    request: GenerationRequest,
    arrival: int,
    max_tokens: int,
    tokenizer: Tokenizer | None,
    on_token: Callable[[TokenEvent], None] | None,
    on_finish: Callable[[Completion], None],
) -> Sequence:
    return Sequence(
        request=request,
        arrival=arrival,
        max_tokens=max_tokens,
        on_token=on_token,
        on_finish=on_finish,
        tokens=list(request.prompt_token_ids),
        prompt_tokens=len(request.prompt_token_ids),
        detokenizer=Detokenizer(tokenizer) if tokenizer is not None else None,
        stopper=StopMatcher(request.sampling.stop),
        eos_token_ids=tokenizer.eos_token_ids if tokenizer is not None else frozenset(),
    )

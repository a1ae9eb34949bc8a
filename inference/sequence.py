"""The state of one sample of a request on its way through the engine."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference.errors import ConstraintFailed
from inference.parameters import SamplingParams
from inference.request import FinishReason, GenerationRequest, TokenEvent, TokenLogprob, TopLogprob
from inference.stopping import StopMatcher
from inference.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from inference.constrain import ConstraintState
    from inference.group import RequestGroup


@dataclass(frozen=True, slots=True)
class Logprob:
    """A chosen token's log-probability, and the likeliest tokens with theirs, the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request, its tokens so far, and where they lie in the cache.

    tokens: prompt and output. computed: how many of them are in the cache; when it is one short of all, the sequence
    decodes, otherwise it is in prefill. most_computed: the most that computed ever was, which falls back to 0 when the
    sequence has to give up its pages. cached_prompt_tokens: of the prompt, found in the cache at the first attempt.
    rotation_offset: added to positions where the rotary tables are read, for a sequence whose length asks for others
    (longrope); such sequences share no pages with others. forced: tokens that the constraint wants next, where they are
    chosen one a step. ended: how it ended, None until it has; failure: what went wrong then.
    """

    group: RequestGroup
    index: int
    arrival: int
    max_tokens: int
    tokens: list[int]
    prompt_tokens: int
    tokenizer: Tokenizer | None
    detokenizer: Detokenizer | None
    stopper: StopMatcher
    eos_token_ids: frozenset[int]
    constraint: ConstraintState | None = None
    computed: int = 0
    rotation_offset: int = 0
    pages: list[int] = field(default_factory=list)
    most_computed: int = 0
    cached_prompt_tokens: int = 0
    generator: Any = None
    forced: deque[int] = field(default_factory=deque)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    compute_seconds: float = 0.0
    ended: FinishReason | None = None
    failure: str | None = None

    @property
    def request(self) -> GenerationRequest:
        return self.group.request

    @property
    def sampling(self) -> SamplingParams:
        return self.group.request.sampling

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by urgency, then arrival."""
        return self.request.priority, self.arrival

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def accept(self, token: int, logprob: Logprob | None = None) -> FinishReason | None:
        """Add a chosen token, tell the listener, and say whether the sequence has ended by it.

        What a constraint forces after it is added too, unless each token's logits are wanted: then the forced tokens
        are chosen one a step out of `forced`, and are the same. "error" where the constraint's limits were reached;
        `failure` then says how.
        """
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        before = len(self.tokens)
        certain, ended = self._take(token)
        entry = self._note(token, logprob) if logprob is not None else None
        if self.constraint is not None and ended != "stop":
            try:
                more, ended = self._follow(self.constraint, token, ended)
                certain += more
            except ConstraintFailed as error:
                self.failure = str(error)
                ended = "error"
        if ended is not None and ended != "error":
            certain += self._rest()
        self._tell(certain, tuple(self.tokens[before:]), (entry,) if entry is not None else None)
        return ended

    def _take(self, token: int) -> tuple[str, FinishReason | None]:
        """Append a token: (the text that became certain, whether the sequence ends here)."""
        self.tokens.append(token)
        sampling = self.sampling
        if token in self.eos_token_ids and (not sampling.ignore_eos or self.constraint is not None):
            return "", "stop"
        if token in sampling.stop_token_ids:
            return "", "stop"
        fresh = self.detokenizer.feed(token) if self.detokenizer is not None else ""
        # Text before min_tokens cannot stop the output; what comes later is watched.
        certain, stopped = self.stopper.feed(fresh) if self.output_tokens >= sampling.min_tokens else (fresh, False)
        if stopped:
            self.detokenizer = None
            return certain, "stop"
        return certain, "length" if self.output_tokens >= self.max_tokens else None

    def _follow(
        self, constraint: ConstraintState, token: int, ended: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Bring the constraint up to the token just taken, and take or line up what it forces next."""
        constraint.advance(token)
        certain = ""
        while not constraint.is_complete:
            if ended is not None:
                return certain, ended
            if not self.forced:
                self.forced.extend(constraint.forced_tokens())
            if not self.forced or self.sampling.needs_logprobs:
                return certain, None
            while self.forced and ended is None:
                token = self.forced.popleft()
                text, ended = self._take(token)
                certain += text
                if ended != "stop":
                    constraint.advance(token)
        return certain, "stop"

    def _note(self, token: int, logprob: Logprob) -> TokenLogprob | None:
        self.cumulative_logprob += logprob.logprob
        if self.sampling.logprobs is None:
            return None
        top = tuple(TopLogprob(other, *self._shown(other), value) for other, value in logprob.top)
        entry = TokenLogprob(token, *self._shown(token), logprob.logprob, top)
        self.logprobs.append(entry)
        return entry

    def _shown(self, token: int) -> tuple[str, tuple[int, ...]]:
        return self.tokenizer.shown(token) if self.tokenizer is not None else ("", ())

    def _rest(self) -> str:
        """What was held back, once it is clear that no more tokens come."""
        tail = self.detokenizer.finish() if self.detokenizer is not None else ""
        self.detokenizer = None
        certain, stopped = self.stopper.feed(tail)
        return certain if stopped else certain + self.stopper.finish()

    def _tell(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None = None) -> None:
        if text:
            self.text.append(text)
        on_token = self.group.on_token
        if on_token is not None and (text or token_ids):
            on_token(TokenEvent(self.request.request_id, text, token_ids, self.index, logprobs))

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Note how it ended, and tell the text that was held back."""
        if reason in ("cancelled", "error"):
            self._tell(self._rest(), ())
        self.ended = reason
        if error is not None:
            self.failure = error

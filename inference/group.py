"""A request as the samples that it makes, and the one completion that they add up to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference.parameters import SamplingParams
from inference.request import Choice, Completion, FinishReason, GenerationRequest, TokenEvent
from inference.sequence import Sequence
from inference.stopping import StopMatcher
from inference.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from inference.constrain import ConstraintState


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The n (or best_of) sequences of one request.

    refused: why it cannot run, known before it is queued. cancelled: before it was taken in.
    """

    request: GenerationRequest
    on_token: Callable[[TokenEvent], None] | None
    on_finish: Callable[[Completion], None]
    refused: str | None = None
    cancelled: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)

    @property
    def has_ended(self) -> bool:
        return not self.running

    @property
    def running(self) -> list[Sequence]:
        """Those that have not ended."""
        return [sequence for sequence in self.sequences if sequence.ended is None]

    def completion(self) -> Completion:
        """The outcome, once every sequence has ended."""
        sequences, sampling = self.sequences, self.request.sampling
        failed = next((sequence for sequence in sequences if sequence.ended == "error"), None)
        choices = self._choices()
        reason: FinishReason = choices[0].finish_reason
        if failed is not None:
            reason = "error"
        elif any(sequence.ended == "cancelled" for sequence in sequences):
            reason = "cancelled"
        now = time.perf_counter()
        started = [sequence.started_at for sequence in sequences if sequence.started_at is not None]
        first = [sequence.first_token_at for sequence in sequences if sequence.first_token_at is not None]
        return Completion(
            request_id=self.request.request_id,
            token_ids=choices[0].token_ids,
            text=choices[0].text,
            finish_reason=reason,
            error=failed.failure if failed is not None else None,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_prompt_tokens=sequences[0].cached_prompt_tokens,
            output_tokens=sum(sequence.output_tokens for sequence in sequences),
            queued_seconds=min(started, default=now) - self.submitted_at,
            ttft_seconds=min(first) - self.submitted_at if first else None,
            duration_seconds=now - self.submitted_at,
            compute_seconds=sum(sequence.compute_seconds for sequence in sequences),
            logprobs=choices[0].logprobs if sampling.logprobs is not None else None,
            choices=choices,
        )

    def _choices(self) -> tuple[Choice, ...]:
        """The samples to return: all in order, or the n with the highest mean log-probability, the best first."""
        sampling, chosen = self.request.sampling, self.sequences
        if sampling.samples > sampling.n:
            # The sort is stable: of equals the earlier sample counts.
            chosen = sorted(chosen, key=_mean_logprob, reverse=True)[: sampling.n]
        return tuple(_choice(index, sequence) for index, sequence in enumerate(chosen))


def _mean_logprob(sequence: Sequence) -> float:
    count = sequence.output_tokens
    return sequence.cumulative_logprob / count if count else float("-inf")


def _choice(index: int, sequence: Sequence) -> Choice:
    sampling = sequence.sampling
    return Choice(
        index=index,
        token_ids=tuple(sequence.tokens[sequence.prompt_tokens :]),
        text="".join(sequence.text),
        finish_reason=sequence.ended or "error",
        logprobs=tuple(sequence.logprobs) if sampling.logprobs is not None else None,
        cumulative_logprob=sequence.cumulative_logprob if sampling.needs_logprobs else None,
    )


def new_group(
    request: GenerationRequest,
    arrivals: Iterator[int],
    max_tokens: int,
    tokenizer: Tokenizer | None,
    constraint: ConstraintState | None,
    on_token: Callable[[TokenEvent], None] | None,
    on_finish: Callable[[Completion], None],
    *,
    rotation_offset: int = 0,
    refused: str | None = None,
) -> RequestGroup:
    """A request's samples, each with a state of its own; of one that is refused, without tokens.

    constraint: compiled, not begun. rotation_offset: of its sequences.
    """
    sampling = request.sampling
    # However long it is, it costs no memory.
    prompt = request.prompt_token_ids if refused is None else ()
    group = RequestGroup(request, on_token if sampling.samples == sampling.n else None, on_finish, refused)
    for index in range(sampling.samples):
        sequence = Sequence(
            group=group,
            index=index,
            arrival=next(arrivals),
            max_tokens=max_tokens,
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            rotation_offset=rotation_offset,
            tokenizer=tokenizer,
            detokenizer=Detokenizer(tokenizer) if tokenizer is not None else None,
            stopper=StopMatcher(sampling.stop),
            eos_token_ids=tokenizer.eos_token_ids if tokenizer is not None else frozenset(),
            constraint=constraint.copy() if constraint is not None else None,
        )
        if constraint is not None:
            sequence.forced.extend(constraint.beginning)
        group.sequences.append(sequence)
    return group


def lone_sequence(tokens: Several[int]) -> Sequence:
    """A sequence of given tokens that no engine runs, as scoring and embedding compute them."""
    request = GenerationRequest("", tuple(tokens), SamplingParams(max_tokens=1))
    (sequence,) = new_group(request, itertools.count(), 1, None, None, None, lambda completion: None).sequences
    return sequence

"""From logits to tokens, each row by its own request's parameters and its own random generator.

A row's choice, in this order (that of vLLM's V1 sampler; transformers' logits processors compute the same parts):

1. log-probabilities, where wanted, of the model's own logits
2. min_tokens bans the end and stop tokens; logit_bias is added
3. penalties: repetition, then frequency, then presence
4. the constraint bans what may not come next; with temperature 0 the highest logit is taken
5. temperature divides; min_p, then top_k, then top_p cut off; one uniform number picks among the rest

Every row is computed alone, in float64 from the row's float32 logits where it is drawn, in operations whose order
depends on nothing but its length. So what a request gets never depends on who else is in the batch.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from inference.errors import BROKEN, ConstraintFailed
from inference.kernels.base import Likeliest
from inference.parameters import SamplingParams
from inference.sequence import Logprob, Sequence

logger = logging.getLogger(__name__)

FloatRow = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

_LEAST_PENALTY = 1e-30  # well within float32
_ALL_BANNED = "stop_token_ids: none but these and the end tokens are left to choose, and min_tokens bans them"


class Chosen(NamedTuple):
    """A row's next token, and its log-probability where that is wanted; or None, and what went wrong."""

    token: int | None
    logprob: Logprob | None = None
    error: str | None = None

    @property
    def broken(self) -> bool:
        """Whether it was the model that went wrong, and not the request."""
        return self.error == BROKEN


def choose_tokens(logits: torch.Tensor, scales: torch.Tensor | None, sequences: Rows[Sequence]) -> list[Chosen]:
    """The next token of each sequence.

    logits: float32 [L, V], one row a sequence, overwritten; scales: float32 [L], a positive factor a row still to be
    applied, or None.
    """
    greedy = [sequence.sampling.is_plainly_greedy for sequence in sequences]
    values: FloatRow = logits.numpy()
    for row, sequence in enumerate(sequences):
        if greedy[row] and sequence.output_tokens < sequence.sampling.min_tokens:
            values[row, _enders(sequence, values.shape[1])] = -np.inf
    tokens = greedy_tokens(logits, scales)
    if all(greedy) and None not in tokens:
        return [Chosen(token) for token in tokens]
    factors = None if scales is None else scales.numpy()
    chosen: list[Chosen] = []
    for row, sequence in enumerate(sequences):
        token = tokens[row]
        if token is None:
            banned = sequence.output_tokens < sequence.sampling.min_tokens and bool((values[row] == -np.inf).all())
            chosen.append(Chosen(None, None, _ALL_BANNED if banned else BROKEN))
        elif greedy[row]:
            chosen.append(Chosen(token))
        else:
            scaled = values[row] if factors is None else values[row] * factors[row]
            chosen.append(_choose(scaled, token, sequence))
    return chosen


def takes_likeliest(sequence: Sequence) -> bool:
    """Whether its next token is that of the highest logit, and nothing else of the logits is wanted."""
    return sequence.sampling.is_plainly_greedy and sequence.output_tokens >= sequence.sampling.min_tokens


def chosen_of(likeliest: Likeliest) -> list[Chosen]:
    """What `choose_tokens` gives where every sequence takes the likeliest token."""
    tops: FloatRow = likeliest.tops.numpy()
    if likeliest.scales is not None:
        tops = tops * likeliest.scales.numpy()
    return [
        Chosen(token) if good else Chosen(None, None, BROKEN)
        for token, good in zip(likeliest.tokens.tolist(), np.isfinite(tops).tolist(), strict=True)
    ]


def greedy_tokens(logits: torch.Tensor, scales: torch.Tensor | None) -> list[int | None]:
    """The token with the highest logit of each row, the lowest id of equals; None where a row has none that is finite.

    logits: float32 [L, V]. scales: float32 [L] or None; a positive factor does not move the maximum, and is NaN where
    a quantized row was made of NaN.
    """
    values: FloatRow = logits.numpy()
    best = values.argmax(axis=1)  # [L]; NaN counts as the highest. Ten times as fast as PyTorch's
    top = values[np.arange(len(values)), best]
    if scales is not None:
        top = top * scales.numpy()
    return [token if good else None for token, good in zip(best.tolist(), np.isfinite(top).tolist(), strict=True)]


def _choose(logits: FloatRow, likeliest: int, sequence: Sequence) -> Chosen:
    """The next token by float32 [V], the model's own logits, which are left as they are."""
    sampling = sequence.sampling
    try:
        if sequence.forced:
            token = sequence.forced.popleft()
        elif _is_settled(likeliest, sequence):
            token = likeliest
        else:
            adjusted = _restrict(_adjust(logits, sequence), sequence)
            best = int(adjusted.argmax())
            if adjusted[best] == -np.inf:
                return Chosen(None, None, _ALL_BANNED)
            token = best if sampling.temperature == 0 else _draw(adjusted, sequence)
    except ConstraintFailed as error:
        return Chosen(None, None, str(error))
    except Exception as error:
        # What a request asks for is its own: the others of the step get their tokens.
        logger.exception("the choice of a token for request %s", sequence.request.request_id)
        return Chosen(None, None, f"no token could be chosen: {type(error).__name__}: {error}")
    return Chosen(token, _logprob(logits, token, sampling.logprobs or 0) if sampling.needs_logprobs else None)


def _logprob(logits: FloatRow, token: int, top: int) -> Logprob:
    """The log-softmax of float32 [V] in float64: at the token, and the `top` highest, of equals the lower id first."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= math.log(float(np.add.reduce(np.exp(exact))))
    if top == 0:
        return Logprob(float(exact[token]))
    top = min(top, len(exact))
    high = np.flatnonzero(exact >= np.partition(exact, -top)[-top])
    ranked = sorted(zip((-exact[high]).tolist(), high.tolist(), strict=True))[:top]
    return Logprob(float(exact[token]), tuple((other, -value) for value, other in ranked))


def _is_settled(likeliest: int, sequence: Sequence) -> bool:
    """Whether the highest logit is the answer, seen without a mask of all tokens, which costs more than this look."""
    sampling, constraint = sequence.sampling, sequence.constraint
    if sampling.temperature != 0 or sampling.changes_logits:
        return False
    if likeliest in sequence.eos_token_ids or likeliest in sampling.stop_token_ids:
        return False
    return constraint is None or constraint.allows(likeliest)


def _enders(sequence: Sequence, vocabulary: int) -> list[int]:
    """The tokens that end a sequence, as far as the model has them."""
    return [token for token in (*sequence.eos_token_ids, *sequence.sampling.stop_token_ids) if token < vocabulary]


def _adjust(logits: FloatRow, sequence: Sequence) -> FloatRow:
    """A copy of float32 [V] with bans, bias and penalties applied."""
    sampling, adjusted = sequence.sampling, logits.copy()
    if sequence.constraint is None and sequence.output_tokens < sampling.min_tokens:
        adjusted[_enders(sequence, len(adjusted))] = -np.inf
    for token, bias in sampling.logit_bias:
        adjusted[token] += bias
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.array(sequence.tokens, dtype=np.int64))
        # Neither 0 nor infinity may come of a penalty that is next to nothing: they would cancel out to NaN.
        values, penalty = adjusted[seen], max(sampling.repetition_penalty, _LEAST_PENALTY)
        with np.errstate(over="ignore"):
            raised = np.minimum(values / penalty, np.finfo(np.float32).max)
        adjusted[seen] = np.where(values > 0, raised, values * penalty)
    if sampling.frequency_penalty != 0 or sampling.presence_penalty != 0:
        output = np.array(sequence.tokens[sequence.prompt_tokens :], dtype=np.int64)
        made, times = np.unique(output, return_counts=True)
        adjusted[made] -= sampling.frequency_penalty * times.astype(np.float32)
        adjusted[made] -= sampling.presence_penalty
    return adjusted


def _restrict(adjusted: FloatRow, sequence: Sequence) -> FloatRow:
    """Ban what the constraint does not allow next. Raises ConstraintFailed where nothing is allowed."""
    if sequence.constraint is None:
        return adjusted
    allowed = sequence.constraint.allowed()
    sampling = sequence.sampling
    if sampling.ignore_eos or sequence.output_tokens < sampling.min_tokens:
        going_on = allowed.copy()
        going_on[_enders(sequence, len(allowed))] = False
        if going_on.any():
            allowed = going_on
    return np.where(allowed, adjusted, np.float32(-np.inf))


def _draw(logits: FloatRow, sequence: Sequence) -> int:
    """Draw a token of float32 [V], by one uniform number of the request's own generator."""
    sampling = sequence.sampling
    if sequence.generator is None:
        sequence.generator = _generator(sampling, sequence.index)
    uniform = float(torch.rand((), generator=sequence.generator, dtype=torch.float64))
    mass, tokens = kept_mass(logits, sampling)
    place = _pick(mass, uniform)
    return place if tokens is None else int(tokens[place])


def kept_mass(logits: FloatRow, sampling: SamplingParams) -> tuple[npt.NDArray[np.float64], Tokens | None]:
    """What the tokens' chances are proportional to, and which tokens these are; None: all, in order.

    logits: float32 [V], some of them -inf. Of equals at a border all are kept, as transformers and vLLM do for top_k.
    """
    scaled: npt.NDArray[np.float64] = logits.astype(np.float64)  # [V]
    scaled -= scaled.max()  # before dividing: by next to nothing it would make infinities, which cancel out
    with np.errstate(over="ignore"):
        scaled /= sampling.temperature
    least = -np.inf
    if sampling.min_p > 0:
        least = math.log(sampling.min_p)  # p >= min_p * p_max, in logarithms
    if 0 < sampling.top_k < len(scaled):
        # What min_p cut off is below its border, whether it counts among the k or not.
        least = max(least, np.partition(scaled, -sampling.top_k)[-sampling.top_k])
    tokens: Tokens | None = None
    if least > -np.inf:
        tokens = np.flatnonzero(scaled >= least)
        scaled = scaled[tokens]
    mass = np.exp(scaled, out=scaled)
    if sampling.top_p < 1.0:
        # The smallest set of the likeliest tokens whose mass reaches top_p. Sorting numbers alone is fast.
        falling = np.sort(mass)[::-1].copy()
        reached = _running_sums(falling)
        last = int(np.searchsorted(reached, sampling.top_p * reached[-1]))
        kept = np.flatnonzero(mass >= falling[min(last, len(falling) - 1)])
        mass, tokens = mass[kept], kept if tokens is None else tokens[kept]
    return mass, tokens


def _pick(mass: npt.NDArray[np.float64], uniform: float) -> int:
    """The index whose share of the summed mass the uniform number in [0, 1) falls into."""
    reached = _running_sums(mass)
    index = int(np.searchsorted(reached, uniform * reached[-1], side="right"))
    # The product may round up to the total itself: then it is the last one that has any share.
    return index if index < len(mass) else int(np.flatnonzero(mass)[-1])


def _running_sums(mass: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """One after the other from the first, as PyTorch does it four times as fast as numpy."""
    sums: npt.NDArray[np.float64] = torch.from_numpy(mass).cumsum(0).numpy()
    return sums


def _generator(sampling: SamplingParams, index: int) -> torch.Generator:
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed_of_sample(sampling.seed, index))
    return generator


def seed_of_sample(seed: int, index: int) -> int:
    """The seed of a request's sample: its own for the first, and for the others 64 bits of a hash of both."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "little")

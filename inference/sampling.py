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
import math
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from inference.errors import ConstraintFailed
from inference.parameters import SamplingParams
from inference.sequence import Logprob, Sequence

_TOP_CANDIDATES = 256
_BROKEN = "the model produced NaN or infinity for this request; its weights may be damaged"


class Chosen(NamedTuple):
    """A row's next token, and its log-probability where that is wanted; or None, and what went wrong."""

    token: int | None
    logprob: Logprob | None = None
    error: str | None = None


def choose_tokens(logits: torch.Tensor, scales: torch.Tensor | None, sequences: Rows[Sequence]) -> list[Chosen]:
    """The next token of each sequence.

    logits: float32 [L, V], one row a sequence, overwritten; scales: float32 [L], a positive factor a row still to be
    applied, or None.
    """
    greedy = [sequence.sampling.is_plainly_greedy for sequence in sequences]
    for row, sequence in enumerate(sequences):
        if greedy[row] and sequence.output_tokens < sequence.sampling.min_tokens:
            logits[row, _enders(sequence, logits.shape[1])] = float("-inf")
    tokens = greedy_tokens(logits, scales)
    if all(greedy):
        return [Chosen(token, None, None if token is not None else _BROKEN) for token in tokens]
    chosen: list[Chosen] = []
    for row, sequence in enumerate(sequences):
        token = tokens[row]
        if token is None:
            chosen.append(Chosen(None, None, _BROKEN))
        elif greedy[row]:
            chosen.append(Chosen(token))
        else:
            scaled = logits[row] if scales is None else logits[row] * scales[row]
            chosen.append(_choose(scaled, token, sequence))
    return chosen


def greedy_tokens(logits: torch.Tensor, scales: torch.Tensor | None) -> list[int | None]:
    """The token with the highest logit of each row, the lowest id of equals; None where a row has none that is finite.

    logits: float32 [L, V]. scales: float32 [L] or None; a positive factor does not move the maximum, and is NaN where
    a quantized row was made of NaN.
    """
    top, best = torch.max(logits, dim=1)  # [L]
    if scales is not None:
        top = top * scales
    return [token if good else None for token, good in zip(best.tolist(), top.isfinite().tolist(), strict=True)]


def _choose(logits: torch.Tensor, likeliest: int, sequence: Sequence) -> Chosen:
    """The next token by float32 [V], the model's own logits, which are left as they are."""
    sampling = sequence.sampling
    raw = _log_softmax(logits, sampling.logprobs or 0) if sampling.needs_logprobs else None
    try:
        if sequence.forced:
            token = sequence.forced.popleft()
        elif _is_settled(likeliest, sequence):
            token = likeliest
        else:
            adjusted = _restrict(_adjust(logits, sequence), sequence)
            token = int(adjusted.argmax()) if sampling.temperature == 0 else _draw(adjusted, sequence)
    except ConstraintFailed as error:
        return Chosen(None, None, str(error))
    if raw is None:
        return Chosen(token)
    logprobs, top = raw
    return Chosen(token, Logprob(float(logprobs[token]), top))


def _log_softmax(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, tuple[tuple[int, float], ...]]:
    """float64 [V], and the `top` likeliest of them."""
    logprobs = torch.log_softmax(logits.double(), dim=0)
    if top == 0:
        return logprobs, ()
    values, tokens = logprobs.topk(min(top, logprobs.numel()))
    return logprobs, tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def _is_settled(likeliest: int, sequence: Sequence) -> bool:
    """Whether the highest logit is the answer, seen without a mask of all tokens, which costs more than this look."""
    sampling, constraint = sequence.sampling, sequence.constraint
    if (
        sampling.temperature != 0
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
        or sampling.logit_bias
    ):
        return False
    if likeliest in sequence.eos_token_ids or likeliest in sampling.stop_token_ids:
        return False
    return constraint is None or constraint.allows(likeliest)


def _enders(sequence: Sequence, vocabulary: int) -> list[int]:
    """The tokens that end a sequence, as far as the model has them."""
    return [token for token in (*sequence.eos_token_ids, *sequence.sampling.stop_token_ids) if token < vocabulary]


def _adjust(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """A copy of float32 [V] with bans, bias and penalties applied."""
    sampling, adjusted = sequence.sampling, logits.clone()
    if sequence.constraint is None and sequence.output_tokens < sampling.min_tokens:
        adjusted[_enders(sequence, len(adjusted))] = float("-inf")
    for token, bias in sampling.logit_bias:
        adjusted[token] += bias
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array(sequence.tokens, dtype=np.int64)))
        values = adjusted[seen]
        penalty = sampling.repetition_penalty
        adjusted[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty != 0 or sampling.presence_penalty != 0:
        output = np.array(sequence.tokens[sequence.prompt_tokens :], dtype=np.int64)
        made, times = (torch.from_numpy(part) for part in np.unique(output, return_counts=True))
        adjusted[made] -= sampling.frequency_penalty * times.float()
        adjusted[made] -= sampling.presence_penalty
    return adjusted


def _restrict(adjusted: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Ban what the constraint does not allow next. Raises ConstraintFailed where nothing is allowed."""
    if sequence.constraint is None:
        return adjusted
    allowed = sequence.constraint.allowed()
    sampling = sequence.sampling
    if sampling.ignore_eos or sequence.output_tokens < sampling.min_tokens:
        going_on: npt.NDArray[np.bool_] = allowed.copy()
        going_on[_enders(sequence, len(allowed))] = False
        if going_on.any():
            allowed = going_on
    return adjusted.masked_fill_(torch.from_numpy(~allowed), float("-inf"))


def _draw(logits: torch.Tensor, sequence: Sequence) -> int:
    """Draw a token of float32 [V], by one uniform number of the request's own generator."""
    sampling = sequence.sampling
    if sequence.generator is None:
        sequence.generator = _generator(sampling, sequence.index)
    uniform = torch.rand((), generator=sequence.generator, dtype=torch.float64)
    mass, tokens = kept_mass(logits, sampling)
    place = _pick(mass, uniform)
    return place if tokens is None else int(tokens[place])


def kept_mass(logits: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The probabilities that a token is drawn by, not summing to 1, and their tokens; None: of all in order.

    logits: float32 [V], some of them -inf. What is cut off is left out or has probability 0.
    """
    scaled = logits.double() / sampling.temperature  # [V]
    if sampling.min_p > 0:
        # p < min_p * p_max, in logarithms.
        scaled[scaled < scaled.max() + math.log(sampling.min_p)] = float("-inf")
    if 0 < sampling.top_k < len(scaled):
        # Of equals at the border all are kept, as transformers and vLLM do.
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = float("-inf")
    probabilities = torch.softmax(scaled, dim=0)
    if sampling.top_p >= 1.0:
        return probabilities, None
    size = probabilities.numel()
    mass, tokens = probabilities.topk(min(_TOP_CANDIDATES, size))
    if float(mass.sum()) < sampling.top_p and mass.numel() < size:
        mass, tokens = probabilities.sort(descending=True, stable=True)
    # The smallest set of the likeliest tokens whose mass reaches top_p.
    kept = int(torch.searchsorted(mass.cumsum(0), torch.tensor(sampling.top_p, dtype=torch.float64))) + 1
    return mass[:kept], tokens[:kept]


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> int:
    """The index whose share of the summed weights the uniform number in [0, 1) falls into."""
    total = weights.cumsum(0)
    index = int(torch.searchsorted(total, uniform * total[-1], right=True))
    # The product may round up to the total itself: then it is the last one that has any share.
    return index if index < weights.numel() else int(weights.nonzero()[-1])


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

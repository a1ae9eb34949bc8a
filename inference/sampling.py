"""From logits to tokens, each row by its own request's parameters and its own random generator."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from inference.request import SamplingParams
from inference.sequence import Sequence

_TOP_CANDIDATES = 256


def choose_tokens(logits: torch.Tensor, scales: torch.Tensor | None, sequences: Rows[Sequence]) -> list[int | None]:
    """The next token of each sequence; None where its logits hold NaN.

    logits: float32 [L, V], one row a sequence; scales: float32 [L], a positive factor a row still to be applied, or
    None. Which row a request has, and what the others hold, changes nothing in its choice.
    """
    for row, sequence in enumerate(sequences):
        if sequence.output_tokens < sequence.request.sampling.min_tokens:
            logits[row, list(sequence.eos_token_ids)] = float("-inf")
    top, best = torch.max(logits, dim=1)  # [L]; a positive factor does not move the maximum
    # NaN among the activations of an int8 row shows in its scale alone.
    bad = (top if scales is None else top * scales).isnan().tolist()
    chosen: list[int | None] = [None if nan else token for nan, token in zip(bad, best.tolist(), strict=True)]
    for row, sequence in enumerate(sequences):
        if sequence.request.sampling.temperature > 0 and not bad[row]:
            scaled = logits[row] if scales is None else logits[row] * scales[row]
            chosen[row] = _draw(scaled, sequence)
    return chosen


def _draw(logits: torch.Tensor, sequence: Sequence) -> int:
    """Draw a token of float32 [V] by temperature and top-p, by one uniform number of the request's own generator."""
    sampling = sequence.request.sampling
    if sequence.generator is None:
        sequence.generator = _generator(sampling)
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=0)  # [V]
    uniform = torch.rand((), generator=sequence.generator, dtype=torch.float64)
    if sampling.top_p >= 1.0:
        return _pick(probabilities, uniform)
    size = probabilities.numel()
    mass, tokens = probabilities.topk(min(_TOP_CANDIDATES, size))
    if float(mass.sum()) < sampling.top_p and mass.numel() < size:
        mass, tokens = probabilities.sort(descending=True, stable=True)
    # Nucleus (arXiv 1904.09751): the smallest set of the likeliest tokens whose mass reaches top_p.
    kept = int(torch.searchsorted(mass.cumsum(0), torch.tensor(sampling.top_p, dtype=torch.float64))) + 1
    return int(tokens[_pick(mass[:kept], uniform)])


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> int:
    """The index whose share of the summed weights the uniform number in [0, 1) falls into."""
    total = weights.cumsum(0)
    index = int(torch.searchsorted(total, uniform * total[-1], right=True))
    return min(index, weights.numel() - 1)


def _generator(sampling: SamplingParams) -> torch.Generator:
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator

"""How much arithmetic and memory traffic a step asks for, by formula.

Of a step: M rows (tokens), L of them whose logits are wanted; of each sequence: n rows in the step and a context of c
tokens after it. Of the model: P weights that a row meets in all layers' matrices (of a mixture of experts, those of
the experts used), a head of V x H, D elements a head.

    operations = 2 P M  +  2 V H L  +  4 heads D * (pairs, summed over layers)
    pairs      = sum over sequences of n c - n (n - 1) / 2     (a row sees itself and what is before it; in a layer
                 with a sliding window of w, at most w of these)
    bytes      = weight bytes of the layers, + those of the head where L > 0, + key-value bytes a token and layer
                 * (tokens read, c a sequence and layer, in a window w + n - 1 at most; and M written a layer)

Counted as in Kaplan et al., "Scaling Laws for Neural Language Models" (arXiv 2001.08361, table 1): a multiplication
and an addition are two operations; norms, rotary embedding, softmax and sampling are left out. The bytes are the least
that must move (Williams et al., "Roofline", CACM 52(4), 2009): each weight and each cached token once a step, while
activations stay in the processor's caches. Of a mixture's experts, M rows read at most M * used of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from inference.model.config import DecoderConfig


class Matrix(NamedTuple):
    """A matrix that each row is multiplied by, `times` over the whole model."""

    inputs: int
    outputs: int
    times: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """What was computed in one step.

    pairs: of a row and a token that it attends to; context_tokens: read from the cache; both summed over the layers.
    """

    rows: int
    logit_rows: int
    pairs: int
    context_tokens: int

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]], logit_rows: int, windows: Iterable[tuple[int, int]]) -> StepShape:
        """lengths: for each sequence (rows in the step, context tokens after it); windows: see `layer_windows`."""
        sequences = list(lengths)
        pairs = context = 0
        for window, layers in windows:
            for count, length in sequences:
                pairs += layers * _pairs(count, length, window)
                context += layers * (min(length, window + count - 1) if window else length)
        return cls(sum(count for count, _ in sequences), logit_rows, pairs, context)


def _pairs(count: int, length: int, window: int) -> int:
    if not window or length <= window:
        return count * length - count * (count - 1) // 2
    # The first `whole` rows still see everything before them, the rest the window.
    whole = max(0, window - (length - count))
    return whole * window - whole * (whole - 1) // 2 + (count - whole) * window


def layer_windows(config: DecoderConfig) -> tuple[tuple[int, int], ...]:
    """(tokens that a row sees, 0 being all; layers where it is so)."""
    return tuple(Counter(config.windows or (0,) * config.layers).items())


def model_matrices(config: DecoderConfig) -> tuple[Matrix, ...]:
    """The layers' matrices, fused as the decoder fuses them: q-k-v, o, gate-up, down; a mixture's experts as used."""
    times: Counter[tuple[int, int]] = Counter()
    for index in range(config.layers):
        times[config.hidden_size, config.query_size + 2 * config.kv_size] += 1
        times[config.query_size, config.hidden_size] += 1
        experts = config.layer(index).experts
        width, used = (config.intermediate_size, 1) if experts is None else (experts.size, experts.used)
        times[config.hidden_size, 2 * width] += used
        times[width, config.hidden_size] += used
    return tuple(Matrix(*shape, count) for shape, count in times.items())


@dataclass(frozen=True, slots=True)
class WorkFormula:
    """A model's constants in the formulas above, the bytes taken from what is really in memory.

    layer_weights, head_weights: weights that a row meets; layer_bytes, head_bytes: all of theirs in memory;
    expert_share: of the layers' bytes that are experts', experts_a_row: the share of the experts that one row uses;
    pair_operations: 4 heads D; token_layer_bytes: keys and values of one token in one layer.
    """

    layer_weights: int
    head_weights: int
    layer_bytes: int
    head_bytes: int
    expert_share: float
    experts_a_row: float
    pair_operations: int
    token_layer_bytes: float
    layers: int
    windows: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, config: DecoderConfig, *, layer_bytes: int, head_bytes: int, token_cache_bytes: float) -> WorkFormula:
        """token_cache_bytes: keys and values of one token in all layers."""
        matrices = model_matrices(config)
        mixtures = [experts for n in range(config.layers) if (experts := config.layer(n).experts) is not None]
        in_experts = sum(3 * config.hidden_size * experts.size * experts.count for experts in mixtures)
        met_experts = sum(3 * config.hidden_size * experts.size * experts.used for experts in mixtures)
        met = sum(matrix.inputs * matrix.outputs * matrix.times for matrix in matrices)
        return cls(
            layer_weights=met,
            head_weights=config.hidden_size * config.vocab_size,
            layer_bytes=layer_bytes,
            head_bytes=head_bytes,
            expert_share=in_experts / (met - met_experts + in_experts),
            experts_a_row=met_experts / in_experts if mixtures else 1.0,
            pair_operations=4 * config.query_size,
            token_layer_bytes=token_cache_bytes / config.layers,
            layers=config.layers,
            windows=layer_windows(config),
        )

    def shape(self, lengths: Iterable[tuple[int, int]], logit_rows: int) -> StepShape:
        return StepShape.of(lengths, logit_rows, self.windows)

    def matrix_operations(self, shape: StepShape) -> int:
        return 2 * (self.layer_weights * shape.rows + self.head_weights * shape.logit_rows)

    def attention_operations(self, shape: StepShape) -> int:
        return self.pair_operations * shape.pairs

    def operations(self, shape: StepShape) -> int:
        return self.matrix_operations(shape) + self.attention_operations(shape)

    def weight_bytes(self, shape: StepShape) -> float:
        experts_read = min(1.0, self.experts_a_row * shape.rows)
        layers = self.layer_bytes * (1.0 - self.expert_share * (1.0 - experts_read))
        return layers + (self.head_bytes if shape.logit_rows else 0)

    def cache_bytes(self, shape: StepShape) -> float:
        return self.token_layer_bytes * (shape.context_tokens + shape.rows * self.layers)

    def bytes(self, shape: StepShape) -> float:
        return self.weight_bytes(shape) + self.cache_bytes(shape)

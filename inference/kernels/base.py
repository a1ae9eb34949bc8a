"""The interface of the kernels, and the shapes that pass through it."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig

Compute = Literal["fp32", "bf16", "int8"]


class Rows(NamedTuple):
    """Activations on their way into a matrix product.

    values: [M, K] in the computing type; int8 values * scales[row] are the row after `quant.rotation`
    scales: float32 [M], or None
    """

    values: torch.Tensor
    scales: torch.Tensor | None


class KeyValueCache:
    """One tensor a layer: [pages, kv_heads, 2, head_dim * PAGE_TOKENS], keys first, then values.

    Within a page, keys lie [head_dim, PAGE_TOKENS], so that scores of neighbouring tokens form vectors, and values
    [PAGE_TOKENS, head_dim]. Zeroed memory is lent by the operating system only when a page is first written.
    """

    def __init__(self, config: DecoderConfig, pages: int, page_tokens: int, dtype: torch.dtype) -> None:
        shape = (pages, config.kv_heads, 2, config.head_dim * page_tokens)
        self.layers = [_lazy_zeros(shape, dtype) for _ in range(config.layers)]

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before anyone else gets them."""
        for layer in self.layers:
            layer[pages] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros by NumPy, which asks the system for zeroed memory; torch.zeros would write, and so occupy, all of it."""
    kind = np.float32 if dtype == torch.float32 else np.int16
    return torch.from_numpy(np.zeros(shape, dtype=kind)).view(dtype)


class Kernels(Protocol):
    """Everything on [M, ...] rows, M differing every step.

    `y` is what a linear layer returned, float32, still to be multiplied by `scales` (float32 [M] or None).
    """

    name: str

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> Rows:
        """RMS norm of float32 [M, H]."""
        ...

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None, weight: torch.Tensor) -> Rows:
        """x += y * scales in place, then the RMS norm of x."""
        ...

    def add(self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None) -> None:
        """x += y * scales in place."""
        ...

    def rotate_and_store(
        self, y: torch.Tensor, scales: torch.Tensor | None, batch: StepBatch, layer: torch.Tensor
    ) -> torch.Tensor:
        """Query, key and value of [M, (heads + 2 kv_heads) * head_dim]: rotate, write k and v into the layer's cache.

        Returns the queries, float32 [M, heads * head_dim], already divided by sqrt(head_dim).
        """
        ...

    def attend(self, q: torch.Tensor, batch: StepBatch, layer: torch.Tensor) -> Rows:
        """Causal attention of each row over its own sequence's cache, [M, heads * head_dim]."""
        ...

    def silu_mul(self, y: torch.Tensor, scales: torch.Tensor | None) -> Rows:
        """silu(gate) * up of [M, 2 * I], gate first: [M, I]."""
        ...

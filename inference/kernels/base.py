"""The interface of the kernels, and the shapes that pass through it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from inference.cache.pages import PAGE_TOKENS
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig
from inference.quant.groupwise import GroupwiseTensor
from inference.quant.rotated import RotatedTensor

Compute = Literal["fp32", "bf16", "int8"]
CacheKind = Literal["fp32", "bf16", "int8", "int4"]


class Rows(NamedTuple):
    """Activations on their way into a matrix product.

    values: [M, K] in the computing type; int8 values * scales[row] are the row after `quant.rotation`; uint8 values are
    the same plus 128, [M, K filled up with 128 to an odd multiple of 64]
    scales: float32 [M], or None
    """

    values: torch.Tensor
    scales: torch.Tensor | None


def joined(parts: list[Rows]) -> Rows:
    """Rows that follow one another, as one."""
    if len(parts) == 1:
        return parts[0]
    scales = [part.scales for part in parts if part.scales is not None]
    return Rows(torch.cat([part.values for part in parts]), torch.cat(scales) if scales else None)


class LayerCache(NamedTuple):
    """Keys and values of one layer.

    pages: "fp32" and "bf16": [pages, kv_heads, 2, head_dim * PAGE_TOKENS], keys first, then values. Within a page, keys
    lie [head_dim, PAGE_TOKENS], so that scores of neighbouring tokens form vectors, and values [PAGE_TOKENS, head_dim].
    "int8" and "int4": uint8 [pages, kv_heads, page_head_bytes], laid out by the compiled kernels (native/cache.h).
    There may be gaps between pages.
    """

    pages: torch.Tensor
    kind: CacheKind

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return self.pages.stride(0) * self.pages.itemsize


class Part(NamedTuple):
    """Sequences that follow one another in a step, and where their keys and values lie in one layer.

    rows: theirs among the step's. batch: of these rows alone, with slots and page_table into `layer`; neither its
    token_ids nor its logit_rows mean anything.
    """

    rows: slice
    batch: StepBatch
    layer: LayerCache


class Between(NamedTuple):
    """What runs between two layers of a step.

    call: may itself run a step of other sequences. due: other than 0 where it has something to do; any thread sets it,
    and kernels that compute several layers in one go look at it before each.
    """

    call: Callable[[], None]
    due: ctypes.c_int32


class StepPages(Protocol):
    """A step's way through the cache."""

    def parts(self, index: int) -> Iterator[Part]:
        """All rows of a layer, in order: each part is to be written and read before the next is asked for.

        The layers of a step come in order. Raises CacheLost.
        """
        ...


class PagesInMemory:
    """One part a layer."""

    def __init__(self, layers: list[LayerCache], batch: StepBatch) -> None:
        self.layers = layers
        self._batch = batch

    def parts(self, index: int) -> Iterator[Part]:
        yield Part(slice(None), self._batch, self.layers[index])


def page_head_bytes(kind: CacheKind, head_dim: int) -> int:
    """Bytes of one page of one key-value head: PAGE_TOKENS keys and values; quantized, a float32 scale for each."""
    bits = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}[kind]
    scales = 2 * PAGE_TOKENS * 4 if kind in ("int8", "int4") else 0
    return 2 * head_dim * PAGE_TOKENS * bits // 8 + scales


class CacheTraffic(NamedTuple):
    """Pages between a cache and a disk, so far, and the seconds in which computing waited for them."""

    bytes_read: int = 0
    bytes_written: int = 0
    waited_seconds: float = 0.0


class KeyValueCache:
    """The pages of every layer. Zeroed memory is lent by the operating system only when a page is first written."""

    def __init__(self, config: DecoderConfig, pages: int, kind: CacheKind, device: torch.device | None = None) -> None:
        """device: by default the processor."""
        self.kind = kind
        self.page_bytes = config.layers * config.kv_heads * page_head_bytes(kind, config.head_dim)
        self.layers = [LayerCache(lazy_pages(config, pages, kind, device), kind) for _ in range(config.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes once every page has been written."""
        return sum(layer.pages.nbytes for layer in self.layers)

    @property
    def sequence_pages(self) -> int:
        """The most pages that one sequence can use."""
        return len(self.layers[0].pages)

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepPages]:
        """The pages of a step, layer by layer. Begins to fetch, and at the end lets go, of what lies elsewhere."""
        yield PagesInMemory(self.layers, batch)

    @property
    def traffic(self) -> CacheTraffic:
        """With a disk; none where everything lies in memory."""
        return CacheTraffic()

    @property
    def nests(self) -> bool:
        """Whether a step may be computed within another."""
        return True

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before anyone else gets them."""
        for layer in self.layers:
            layer.pages[pages] = 0

    def copy(self, source: int, target: int) -> None:
        """Write one page's content over another's."""
        for layer in self.layers:
            layer.pages[target] = layer.pages[source]


def lazy_pages(config: DecoderConfig, pages: int, kind: CacheKind, device: torch.device | None = None) -> torch.Tensor:
    """A layer's pages, all zeros.

    By NumPy, which asks the system for zeroed memory; torch.zeros would write, and so occupy, all of it.
    """
    shape = (pages, config.kv_heads * page_head_bytes(kind, config.head_dim))
    if device is not None and device.type != "cpu":
        return pages_over(torch.zeros(shape, dtype=torch.uint8, device=device), config, kind)
    memory = torch.from_numpy(np.zeros(shape, dtype=np.uint8)) if pages else torch.empty(shape, dtype=torch.uint8)
    return pages_over(memory, config, kind)


def pages_over(rows: torch.Tensor, config: DecoderConfig, kind: CacheKind) -> torch.Tensor:
    """Rows of memory, uint8 [pages, bytes of a page], as a layer's pages."""
    if kind in ("int8", "int4"):
        return rows.view(len(rows), config.kv_heads, page_head_bytes(kind, config.head_dim))
    values = rows.view(torch.float32 if kind == "fp32" else torch.bfloat16)
    return values.view(len(rows), config.kv_heads, 2, config.head_dim * PAGE_TOKENS)


class Linear(Protocol):
    """Rows [M, K] -> float32 [M, N]. Where the rows carry scales, the result is still to be multiplied by them.

    form: names what `arrays` holds; `Kernels.bound` makes the product of such arrays again.
    """

    nbytes: int

    @property
    def form(self) -> str: ...

    def __call__(self, rows: Rows) -> torch.Tensor: ...

    def arrays(self) -> dict[str, torch.Tensor]:
        """All that the product reads, in the form it computes with: contiguous, and named."""
        ...

    def over(self, arrays: Mapping[str, torch.Tensor]) -> Linear:
        """The product with other arrays of the same names and types, which it reads where they lie."""
        ...


class Likeliest(NamedTuple):
    """The highest output of each row of a product, the lowest of equals.

    tokens: int64 [M], which output; tops: float32 [M], its value; scales: float32 [M], a factor still to be applied
    """

    tokens: torch.Tensor
    tops: torch.Tensor
    scales: torch.Tensor | None


@runtime_checkable
class PickingLinear(Linear, Protocol):
    """A product that finds each row's highest output without writing them all."""

    def highest(self, rows: Rows) -> Likeliest: ...


class Kernels(Protocol):
    """Everything on [M, ...] rows, M differing every step.

    `y` is what a linear layer returned, float32, still to be multiplied by `scales` (float32 [M] or None).
    """

    name: str
    compute: Compute
    device: torch.device
    """Where their tensors lie, a step's batch and the cache among them."""
    rows_at_once: int | None
    """Rows whose activations stay in the caches on the way through a gated network, where a row's bits do not depend on
    how many go together; None: all of them."""
    cache_kinds: tuple[CacheKind, ...]
    """The caches that `attend` reads; the first is the one to use where nobody asks for another."""

    def linear(self, name: str, weight: torch.Tensor | RotatedTensor | GroupwiseTensor) -> Linear:
        """The product with [N, K], float32 or 4-bit, in this arithmetic; QuantizationError, with `name`, on NaN.

        weight: group-wise only where these kernels take it.
        """
        ...

    def takes(self, weight: GroupwiseTensor) -> bool:
        """Whether such weights are multiplied as they are stored; otherwise they are to be given as float32."""
        ...

    def linear_nbytes(self, outputs: int, inputs: int, *, rotated_group: int = 0, int4_group: int = 0) -> int:
        """What such a product will hold in memory. rotated_group, int4_group: weights that share a factor in the 4-bit
        form, rotated or group-wise; 0 for any other form."""
        ...

    def bound(self, form: str, arrays: Mapping[str, torch.Tensor]) -> Linear:
        """The product over the `Linear.arrays` of one of that form; ValueError where these kernels have not got it."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> Rows:
        """RMS norm of float32 [M, H]; without a weight, x as it is."""
        ...

    def norm_exact(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of float32 [M, H] in float32, whatever the products compute in."""
        ...

    def add_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        scales: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        post: torch.Tensor | None = None,
    ) -> Rows:
        """`add`, then `norm`."""
        ...

    def add(
        self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None, *, post: torch.Tensor | None = None
    ) -> None:
        """x += y * scales in place; with `post`, the RMS norm of y * scales by that weight is what is added."""
        ...

    def rotate_and_store(
        self,
        y: torch.Tensor,
        scales: torch.Tensor | None,
        batch: StepBatch,
        layer: LayerCache,
        *,
        rope: int = 0,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Query, key and value of [M, (heads + 2 kv_heads) * head_dim]: rotate, write k and v into the layer's cache.

        rope: which rotary table, or NO_ROTATION. q_norm, k_norm: weights of an RMS norm before rotation, of each head
        where they are [head_dim], of the whole width where they are longer.
        Returns the queries for `attend`, already multiplied by the config's query_scale, in the kernels' own form.
        """
        ...

    def attend(self, q: torch.Tensor, batch: StepBatch, layer: LayerCache, *, window: int = 0) -> Rows:
        """Causal attention of each row over its own sequence's cache, [M, heads * head_dim].

        window: tokens that a row sees, itself among them; 0: all.
        """
        ...

    def silu_mul(self, y: torch.Tensor, scales: torch.Tensor | None) -> Rows:
        """silu(gate) * up of [M, 2 * I], gate first: [M, I]; another function where the config's activation says so."""
        ...

    def route(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [M, H] times float32 [E, H] transposed, [M, E]: each row on its own, so that its bits are its own."""
        ...

    def soft_cap(self, y: torch.Tensor, scales: torch.Tensor | None, cap: float) -> torch.Tensor:
        """cap * tanh(y * scales / cap), float32 [M, N]."""
        ...

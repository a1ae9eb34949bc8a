"""The kernels in plain PyTorch: the fallback without a compiler, the reference for those with one, all of a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from inference.cache.pages import PAGE_TOKENS, pages_for
from inference.device.products import Int4Linear, WholeLinear, bound_product, fits_int4, int4_nbytes
from inference.kernels.base import CacheKind, Compute, LayerCache, Linear, Rows
from inference.model.batch import StepBatch
from inference.model.config import NO_ROTATION, DecoderConfig
from inference.model.linear import bound_linear, linear_nbytes, make_linear
from inference.model.rotary import RotaryTable, rotary_tables
from inference.quant.groupwise import GroupwiseTensor
from inference.quant.rotated import RotatedTensor
from inference.quant.rotation import rotate_blocks


def quantize_rows(x: torch.Tensor) -> Rows:
    """float32 [M, K] -> int8, block-rotated, by each row's own largest magnitude."""
    x = rotate_blocks(x)
    largest = x.abs().amax(dim=1)
    scales = (largest / 127.0).clamp_min(1e-30)
    return Rows((x * (1.0 / scales)[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Segments of a step that attend together. rows: int64 [n * count], theirs; table: int64 [n, pages]."""

    count: int
    rows: torch.Tensor
    table: torch.Tensor


class ReferenceKernels:
    """Without a device: the reference on the processor. With one, which may be the processor too: the products that
    PyTorch ships for quantized weights (`device.products`), and few, large pieces of attention, where a row's bits may
    depend on the rows beside it.
    """

    name = "torch"

    def __init__(self, config: DecoderConfig, compute: Compute, device: torch.device | None = None) -> None:
        self._config = config
        self.compute = compute
        self.device = device or torch.device("cpu")
        if device is not None:
            self.name = f"torch on {device.type}"
        self.rows_at_once: int | None = None
        self.cache_kinds: tuple[CacheKind, ...] = ("fp32", "bf16") if compute == "fp32" else ("bf16", "fp32")
        self._on_device = device is not None
        self._tables = [RotaryTable(*(part.to(self.device) for part in table)) for table in rotary_tables(config)]
        self._grouped: tuple[StepBatch, list[_Alike]] | None = None  # of the batch that was attended to last

    def linear(self, name: str, weight: torch.Tensor | RotatedTensor | GroupwiseTensor) -> Linear:
        if isinstance(weight, GroupwiseTensor):
            return Int4Linear.of(weight, self.device)
        if not self._on_device:
            return make_linear(name, weight, self.compute)
        if self.compute == "int8":
            return WholeLinear.of(name, weight, self.device)
        if isinstance(weight, RotatedTensor) and self._has_int4(*weight.shape, weight.group_size):
            return Int4Linear.of(weight, self.device)
        made = make_linear(name, weight, self.compute)
        return made.over({key: array.to(self.device) for key, array in made.arrays().items()})

    def takes(self, weight: GroupwiseTensor) -> bool:
        return weight.scheme == "int4" and self._has_int4(*weight.shape, weight.group_size)

    def _has_int4(self, rows: int, columns: int, group_size: int) -> bool:
        return self._on_device and self.compute == "bf16" and fits_int4(rows, columns, group_size)

    def linear_nbytes(self, outputs: int, inputs: int, *, rotated_group: int = 0, int4_group: int = 0) -> int:
        group = rotated_group or int4_group
        if group and self._has_int4(outputs, inputs, group):
            return int4_nbytes(outputs, inputs, group)
        return linear_nbytes(outputs, inputs, self.compute)

    def bound(self, form: str, arrays: Mapping[str, torch.Tensor]) -> Linear:
        return (bound_product(form, arrays) if self._on_device else None) or bound_linear(form, arrays)

    def _rows(self, x: torch.Tensor) -> Rows:
        if self.compute == "int8":
            return quantize_rows(x)
        return Rows(x.to(torch.bfloat16) if self.compute == "bf16" else x, None)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> Rows:
        return self._rows(x if weight is None else self.norm_exact(x, weight))

    def norm_exact(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self._config.rms_norm_eps) * weight

    def add_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        scales: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        post: torch.Tensor | None = None,
    ) -> Rows:
        self.add(x, y, scales, post=post)
        return self.norm(x, weight)

    def add(
        self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None, *, post: torch.Tensor | None = None
    ) -> None:
        added = _scaled(y, scales)
        x += added if post is None else self.norm_exact(added, post)

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
        config = self._config
        rows, size = y.shape[0], config.head_dim
        q, k, v = torch.split(_scaled(y, scales), [config.query_size, config.kv_size, config.kv_size], dim=1)
        q, k = self._head_norm(q, q_norm), self._head_norm(k, k_norm)  # [M, heads, D]
        if rope != NO_ROTATION:
            table = self._tables[rope]
            cos, sin = table.cos[batch.rotations], table.sin[batch.rotations]  # [M, rotated / 2]
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        q = q * config.query_scale
        pages, offsets = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
        keys = layer.pages[:, :, 0].view(-1, config.kv_heads, size, PAGE_TOKENS)
        values = layer.pages[:, :, 1].view(-1, config.kv_heads, PAGE_TOKENS, size)
        keys[pages, :, :, offsets] = k.to(layer.pages.dtype)
        values[pages, :, offsets] = v.reshape(rows, -1, size).to(layer.pages.dtype)
        turned: torch.Tensor = q.reshape(rows, -1)
        return turned

    def _head_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """[M, heads * D] -> [M, heads, D], normed by head or in its whole width."""
        size = self._config.head_dim
        if weight is None:
            return x.reshape(len(x), -1, size)
        if len(weight) == size:
            return self.norm_exact(x.reshape(len(x), -1, size), weight)
        return self.norm_exact(x, weight).reshape(len(x), -1, size)

    def attend(self, q: torch.Tensor, batch: StepBatch, layer: LayerCache, *, window: int = 0) -> Rows:
        if self._grouped is None or self._grouped[0] is not batch:
            self._grouped = batch, self._alike(batch)
        out = torch.empty_like(q)
        for alike in self._grouped[1]:
            out[alike.rows] = self._attend_alike(q[alike.rows], alike, batch, layer, window)
        return self._rows(out)

    def _alike(self, batch: StepBatch) -> list[_Alike]:
        """Segments with the same number of rows and of pages go together: shapes of a row never depend on others.

        On a device, where that promises nothing, those with no more than twice the pages of others go with them.
        """
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for segment, (count, context) in enumerate(batch.lengths):
            pages = pages_for(context)
            groups[count, 1 << (pages - 1).bit_length() if self._on_device else pages].append(segment)
        device, host = self.device, batch.host or batch
        made = []
        for (count, pages), segments in groups.items():
            rows = (host.segment_starts.long()[segments][:, None] + torch.arange(count)).reshape(-1)
            table = host.page_table[segments, :pages].long()
            # Where a sequence has no page, its first one stands in, and is masked: it holds nobody else's tokens.
            table = torch.where(table < 0, table[:, :1], table)
            made.append(_Alike(count, rows.to(device), table.to(device)))
        return made

    def _attend_alike(
        self, q: torch.Tensor, alike: _Alike, batch: StepBatch, layer: LayerCache, window: int
    ) -> torch.Tensor:
        config = self._config
        kv_heads, size, group, count = config.kv_heads, config.head_dim, config.group, alike.count
        n, pages = alike.table.shape
        cached = layer.pages[alike.table]  # [n, pages, kv_heads, 2, D * P]
        # Tensor cores are what makes a GPU fast, and they take what the cache holds.
        cached = cached if self.device.type == "cuda" else cached.float()
        keys = cached[:, :, :, 0].reshape(n, pages, kv_heads, size, PAGE_TOKENS)
        keys = keys.permute(0, 2, 1, 4, 3).reshape(n, kv_heads, pages * PAGE_TOKENS, size)
        values = cached[:, :, :, 1].reshape(n, pages, kv_heads, PAGE_TOKENS, size)
        values = values.permute(0, 2, 1, 3, 4).reshape(n, kv_heads, pages * PAGE_TOKENS, size)
        # Query heads that share a key-value head become rows: [n, kv_heads, count * group, D].
        queries = q.reshape(n, count, kv_heads, group, size).permute(0, 2, 1, 3, 4).reshape(n, kv_heads, -1, size)
        queries = queries.to(cached.dtype)
        positions = batch.positions[alike.rows].reshape(n, 1, count, 1)
        places = torch.arange(pages * PAGE_TOKENS, device=self.device)
        allowed = places <= positions  # [n, 1, count, S]
        if window:
            allowed &= places > positions - window
        allowed = allowed.repeat_interleave(group, dim=2)
        out = self._weighted(queries, keys, values, allowed)
        if not bool(torch.isfinite(out).all()):
            # 0 times NaN is NaN: rows would get it from tokens that they do not see, stale ones among them. Those that
            # do see one get it still; the others' bits are as if it were any number.
            broken = ~(torch.isfinite(keys).all(dim=3) & torch.isfinite(values).all(dim=3))  # [n, kv_heads, S]
            sees = (allowed & broken[:, :, None]).any(dim=3, keepdim=True)  # [n, kv_heads, count * group, 1]
            keys, values = (part.masked_fill(broken[..., None], 0.0) for part in (keys, values))
            out = self._weighted(queries, keys, values, allowed).masked_fill_(sees, torch.nan)
        return out.reshape(n, kv_heads, count, group, size).permute(0, 2, 1, 3, 4).reshape(n * count, -1).float()

    def _weighted(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor
    ) -> torch.Tensor:
        """queries [.., rows, D] over keys and values [.., S, D], of which each row sees those allowed [.., rows, S]."""
        cap = self._config.attention_softcap
        if not cap:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, scale=1.0)
        scores = torch.tanh(queries @ keys.transpose(2, 3) / cap) * cap
        return torch.softmax(scores.masked_fill_(~allowed, -torch.inf), dim=3) @ values

    def silu_mul(self, y: torch.Tensor, scales: torch.Tensor | None) -> Rows:
        gate, up = _scaled(y, scales).chunk(2, dim=1)
        if self._config.activation == "silu":
            return self._rows(F.silu(gate) * up)
        return self._rows(F.gelu(gate, approximate="tanh" if self._config.activation == "gelu_tanh" else "none") * up)

    def route(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights.expand(len(rows), -1, -1), rows[:, :, None])[:, :, 0]

    def soft_cap(self, y: torch.Tensor, scales: torch.Tensor | None, cap: float) -> torch.Tensor:
        return torch.tanh(_scaled(y, scales) / cap) * cap


def _scaled(y: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return y if scales is None else y * scales[:, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [M, heads, D]; cos, sin: [M, rotated / 2]. What lies behind the rotated elements stays."""
    half = cos.shape[1]
    first, second, rest = x[:, :, :half], x[:, :, half : 2 * half], x[:, :, 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2)

"""The kernels in plain PyTorch: the fallback without a compiler, and the reference for those with one."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.nn import functional as F  # noqa: N812

from inference.cache.pages import PAGE_TOKENS, pages_for
from inference.kernels.base import Compute, Rows
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig
from inference.model.rotary import rotary_tables
from inference.quant.rotation import rotate_blocks


def quantize_rows(x: torch.Tensor) -> Rows:
    """float32 [M, K] -> int8, block-rotated, by each row's own largest magnitude."""
    x = rotate_blocks(x)
    largest = x.abs().amax(dim=1)
    scales = (largest / 127.0).clamp_min(1e-30)
    return Rows((x * (1.0 / scales)[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales)


class ReferenceKernels:
    name = "torch"

    def __init__(self, config: DecoderConfig, compute: Compute) -> None:
        self._config = config
        self._compute = compute
        self._cos, self._sin = rotary_tables(config)

    def _rows(self, x: torch.Tensor) -> Rows:
        if self._compute == "int8":
            return quantize_rows(x)
        return Rows(x.to(torch.bfloat16) if self._compute == "bf16" else x, None)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> Rows:
        mean_square = x.square().mean(dim=1, keepdim=True)
        return self._rows(x * torch.rsqrt(mean_square + self._config.rms_norm_eps) * weight)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None, weight: torch.Tensor) -> Rows:
        self.add(x, y, scales)
        return self.norm(x, weight)

    def add(self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None) -> None:
        x += _scaled(y, scales)

    def rotate_and_store(
        self, y: torch.Tensor, scales: torch.Tensor | None, batch: StepBatch, layer: torch.Tensor
    ) -> torch.Tensor:
        config = self._config
        rows, size = y.shape[0], config.head_dim
        q, k, v = torch.split(_scaled(y, scales), [config.query_size, config.kv_size, config.kv_size], dim=1)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]  # [M, D / 2]
        q = _rotate(q.reshape(rows, -1, size), cos, sin) * float(size) ** -0.5
        k = _rotate(k.reshape(rows, -1, size), cos, sin)  # [M, kv_heads, D]
        pages, offsets = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
        keys = layer[:, :, 0].view(-1, config.kv_heads, size, PAGE_TOKENS)
        values = layer[:, :, 1].view(-1, config.kv_heads, PAGE_TOKENS, size)
        keys[pages, :, :, offsets] = k.to(layer.dtype)
        values[pages, :, offsets] = v.reshape(rows, -1, size).to(layer.dtype)
        turned: torch.Tensor = q.reshape(rows, -1)
        return turned

    def attend(self, q: torch.Tensor, batch: StepBatch, layer: torch.Tensor) -> Rows:
        """Segments with the same number of rows and of pages go together: shapes of a row never depend on others."""
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for segment, (count, context) in enumerate(batch.lengths):
            alike[count, pages_for(context)].append(segment)
        out = torch.empty_like(q)
        starts = batch.segment_starts.long()
        for (count, pages), segments in alike.items():
            rows = (starts[segments][:, None] + torch.arange(count)).reshape(-1)  # [n * count]
            out[rows] = self._attend_alike(q[rows], rows, segments, pages, batch, layer)
        return self._rows(out)

    def _attend_alike(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        segments: list[int],
        pages: int,
        batch: StepBatch,
        layer: torch.Tensor,
    ) -> torch.Tensor:
        config = self._config
        n, kv_heads, size, group = len(segments), config.kv_heads, config.head_dim, config.group
        count = q.shape[0] // n
        cached = layer[batch.page_table[segments, :pages].long()].float()  # [n, pages, kv_heads, 2, D * P]
        keys = cached[:, :, :, 0].reshape(n, pages, kv_heads, size, PAGE_TOKENS)
        keys = keys.permute(0, 2, 1, 4, 3).reshape(n, kv_heads, pages * PAGE_TOKENS, size)
        values = cached[:, :, :, 1].reshape(n, pages, kv_heads, PAGE_TOKENS, size)
        values = values.permute(0, 2, 1, 3, 4).reshape(n, kv_heads, pages * PAGE_TOKENS, size)
        # Query heads that share a key-value head become rows: [n, kv_heads, count * group, D].
        queries = q.reshape(n, count, kv_heads, group, size).permute(0, 2, 1, 3, 4).reshape(n, kv_heads, -1, size)
        positions = batch.positions[rows].reshape(n, 1, count, 1)
        allowed = torch.arange(pages * PAGE_TOKENS) <= positions  # [n, 1, count, S]
        allowed = allowed.repeat_interleave(group, dim=2)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, scale=1.0)
        return out.reshape(n, kv_heads, count, group, size).permute(0, 2, 1, 3, 4).reshape(n * count, -1)

    def silu_mul(self, y: torch.Tensor, scales: torch.Tensor | None) -> Rows:
        gate, up = _scaled(y, scales).chunk(2, dim=1)
        return self._rows(F.silu(gate) * up)


def _scaled(y: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return y if scales is None else y * scales[:, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [M, heads, D]; cos, sin: [M, D / 2]."""
    first, second = x.chunk(2, dim=2)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)

"""GGUF's quantized blocks, taken over bit by bit into group-wise tensors.

The three simplest types are read here; `superblocks` has the others.

Layouts (ggml-common.h), little-endian, 32 weights to a block; byte j of a 4-bit block holds weight j (low half) and
weight j+16 (high half):
    Q4_0: float16 d, 16 bytes          w = d * (q - 8)
    Q4_1: float16 d, float16 m, 16 bytes   w = d * q + m
    Q8_0: float16 d, 32 x int8         w = d * q
"""

from __future__ import annotations

import numpy as np

from inference.quant.groupwise import Array, GroupwiseTensor, pack_int4
from inference.quant.superblocks import SUPERBLOCKS, take_over_superblocks

BLOCK_WEIGHTS = 32
_SIMPLE_BYTES: dict[str, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
# Types that are taken over, with the bytes of a block of each.
BLOCK_BYTES: dict[str, int] = _SIMPLE_BYTES | {kind: layout.block_bytes for kind, layout in SUPERBLOCKS.items()}


def take_over(kind: str, raw: Array, rows: int, columns: int) -> GroupwiseTensor:
    """Raw blocks, uint8 of whole blocks, those of a row together -> the same weights, group-wise.

    No weight changes. Scales and minima of Q4_0, Q4_1 and Q8_0 stay the float16 they were. Q4_0's implied minimum -8d
    is d with another exponent, so it is exact too (where 8d overflows float16, both go to float32).
    """
    if kind in SUPERBLOCKS:
        return take_over_superblocks(kind, raw, rows, columns)
    blocks = raw.reshape(rows, columns // BLOCK_WEIGHTS, BLOCK_BYTES[kind])
    scales = np.ascontiguousarray(blocks[:, :, 0:2]).view(np.float16)[:, :, 0]
    if kind == "Q8_0":
        values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(rows, columns)
        return GroupwiseTensor("int8", BLOCK_WEIGHTS, values, scales, None)
    start = 2 if kind == "Q4_0" else 4
    nibbles = blocks[:, :, start:]
    levels = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=2).reshape(rows, columns)
    if kind == "Q4_1":
        minima = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0]
    else:
        exact = scales.astype(np.float32) * np.float32(-8.0)
        minima = exact.astype(np.float16) if np.abs(exact).max(initial=0.0) <= 65504.0 else exact
        scales = scales.astype(minima.dtype)
    return GroupwiseTensor("int4", BLOCK_WEIGHTS, pack_int4(levels), scales, minima)

"""GGUF's K-quants and other block types, taken over without a second loss into group-wise tensors.

The gguf library knows how the bits of each type lie; this module only asks it three questions a block, by putting
neutral values into the block's other fields:

    with every scale 1 and every minimum 0, a weight is its level;
    with every level 1 and every minimum 0, it is its group's scale;
    with every level 0, it is its group's minimum.

A scale is float16 times an integer of at most 8 bits, so it is exact in float32, and so is scale * level; the weight
made of them is the very float32 that the library would give. Where all of a tensor's scales and minima fit float16,
they are stored so.

Fields and sizes: ggml-common.h (block_q2_K and its like).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inference.quant.groupwise import Array, GroupwiseTensor, Scheme, pack_int4

Patch = tuple[int, bytes]  # (offset within a block, what to write there)

_ONE = np.float16(1.0).tobytes()
_ZERO = bytes(2)
# Weights looked at together: three float32 copies of them are in memory.
_CHUNK_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True)
class SuperblockType:
    """How to ask for one type's levels, scales and minima. `lowest`: what to take off int4 levels to begin at 0."""

    block_weights: int
    block_bytes: int
    group_size: int
    scheme: Scheme
    levels: tuple[Patch, ...]
    scales: tuple[Patch, ...]
    minima: tuple[Patch, ...] | None = None
    lowest: int = 0


# Eight 6-bit scales of 1 and eight 6-bit minima of 0, as Q4_K and Q5_K pack them.
_SIX_BIT_ONES = b"\x01" * 4 + bytes(4) + b"\x01" * 4

SUPERBLOCKS: dict[str, SuperblockType] = {
    "Q5_0": SuperblockType(32, 22, 32, "int8", ((0, _ONE),), ((2, b"\xff" * 4 + b"\x11" * 16),)),
    "Q5_1": SuperblockType(
        32, 24, 32, "int8", ((0, _ONE + _ZERO),), ((2, _ZERO + bytes(4) + b"\x11" * 16),), ((4, bytes(20)),)
    ),
    "Q2_K": SuperblockType(
        256,
        84,
        16,
        "int4",
        ((0, b"\x01" * 16), (80, _ONE + _ZERO)),
        ((16, b"\x55" * 64), (82, _ZERO)),
        ((16, bytes(64)),),
    ),
    "Q3_K": SuperblockType(
        256,
        110,
        16,
        "int4",
        ((96, b"\x11" * 8 + b"\xaa" * 4 + _ONE),),
        ((0, b"\xff" * 32 + b"\x55" * 64),),
        lowest=-4,
    ),
    "Q4_K": SuperblockType(
        256,
        144,
        32,
        "int4",
        ((0, _ONE + _ZERO + _SIX_BIT_ONES),),
        ((2, _ZERO), (16, b"\x11" * 128)),
        ((16, bytes(128)),),
    ),
    "Q5_K": SuperblockType(
        256,
        176,
        32,
        "int8",
        ((0, _ONE + _ZERO + _SIX_BIT_ONES),),
        ((2, _ZERO), (16, bytes(32) + b"\x11" * 128)),
        ((16, bytes(160)),),
    ),
    "Q6_K": SuperblockType(256, 210, 16, "int8", ((192, b"\x01" * 16 + _ONE),), ((0, b"\x11" * 128 + b"\xaa" * 64),)),
    "IQ4_NL": SuperblockType(32, 18, 32, "int8", ((0, _ONE),), ((2, b"\x88" * 16),)),
    "IQ4_XS": SuperblockType(256, 136, 32, "int8", ((0, _ONE + b"\xaa\xaa" + b"\x11" * 4),), ((8, b"\x88" * 128),)),
}


def take_over_superblocks(kind: str, raw: Array, rows: int, columns: int) -> GroupwiseTensor:
    """Raw blocks, uint8 of rows * columns / block_weights blocks -> the same weights, group-wise."""
    layout = SUPERBLOCKS[kind]
    blocks = raw.reshape(-1, layout.block_bytes)
    step = max(1, _CHUNK_WEIGHTS // layout.block_weights)
    group = layout.group_size
    levels, scales, minima = [], [], []
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        steps = _asked(kind, piece, layout.levels) - np.float32(layout.lowest)
        levels.append(steps.astype(np.uint8 if layout.scheme == "int4" else np.int8))
        scales.append(_asked(kind, piece, layout.scales)[:, ::group])
        if layout.minima is not None:
            minima.append(_asked(kind, piece, layout.minima)[:, ::group])
    shape = (rows, columns // group)
    stored_scales = np.concatenate(scales).reshape(shape)
    stored_minima = np.concatenate(minima).reshape(shape) if minima else None
    if layout.lowest:
        stored_minima = stored_scales * np.float32(layout.lowest)
    values = np.concatenate(levels).reshape(rows, columns)
    if all(part is None or _fits_float16(part) for part in (stored_scales, stored_minima)):
        stored_scales = stored_scales.astype(np.float16)
        stored_minima = None if stored_minima is None else stored_minima.astype(np.float16)
    packed = pack_int4(values) if layout.scheme == "int4" else values
    return GroupwiseTensor(layout.scheme, group, packed, stored_scales, stored_minima)


def dequantize_blocks(kind: str, raw: Array, shape: tuple[int, ...]) -> Array:
    """Any of GGUF's types in float32, by the gguf library."""
    import gguf

    quantized = gguf.GGMLQuantizationType[kind]
    weights: Array = gguf.dequantize(raw.reshape(*shape[:-1], -1), quantized)
    return weights.reshape(shape).astype(np.float32, copy=False)


def _asked(kind: str, blocks: Array, patches: tuple[Patch, ...]) -> Array:
    """float32 [blocks, block_weights]: what the library makes of the blocks with those fields overwritten."""
    patched = blocks.copy()
    for offset, content in patches:
        patched[:, offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)
    return dequantize_blocks(kind, patched, (len(blocks), SUPERBLOCKS[kind].block_weights))


def _fits_float16(values: Array) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))

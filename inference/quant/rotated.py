"""Group-wise 4-bit weights in the form that the products compute with: rotated, and whole numbers but for one scale.

A row of K weights is rotated in blocks of 64 (`quant.rotation`), as the int8 products want it, and then cut into
groups. A rotated weight is scale * level, with one float32 scale a row and int8 levels that 4 bits choose:

    level = (q * step >> 4) + offset,  q in 0..15, step in 0..255 and offset in -128..127 of its group

So the kernels expand 4 bits to the levels that int8 products take by a few whole-number operations, wherever the
weights lie, and the same bits come out. After the rotation a row's weights are much alike in size, which is why one
scale, and a byte for each group's step, lose next to nothing. A group of 32 costs 4.5 bits a weight. Scales within
scales are those of K-quants (llama.cpp); rotating before rounding is QuaRot's (arXiv 2404.00456).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from inference.errors import QuantizationError
from inference.quant.groupwise import Array, pack_int4, unpack_int4

ENCODING = "int4-rotated"
BLOCK = 64
# 15 * 255 >> 4: the widest range of levels that a group reaches.
_SPAN = 239
# A row's largest weight is this level, so that any group's range fits.
_LARGEST = _SPAN // 2
# Shares of a group's range that are tried: clipping a rare extreme can leave finer steps for all others.
_SHARES = (1.0, 0.92, 0.84)
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class RotatedTensor:
    """A quantized matrix of N rows and K columns.

    values: uint8 [N, K/2], the even column in the low half of the byte
    steps: uint8 [N, K/group_size], in sixteenths of a level
    offsets: int8 [N, K/group_size]
    scales: float32 [N], of one level
    """

    group_size: int
    values: Array
    steps: Array
    offsets: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.values.shape
        return rows, width * 2


def fits(columns: int, group_size: int) -> bool:
    """Whether rows of that many weights can be quantized so."""
    return columns % BLOCK == 0 and columns % group_size == 0 and group_size % 32 == 0


def quantize_rotated(name: str, weights: Array, group_size: int = 32) -> RotatedTensor:
    """Quantize float [N, K] to the nearest level that its group reaches.

    Each group's range is the one of a few that leaves the least squared error. Raises QuantizationError, naming the
    tensor, on NaN or infinity, where a row's range overflows float32, and where `fits` says no.
    """
    rows, columns = weights.shape
    if not fits(columns, group_size):
        raise QuantizationError(
            name, f"shape {weights.shape}: want a multiple of {BLOCK} columns, in groups of 32, 64 or 128"
        )

    def part(start: int) -> tuple[Array, Array, Array, Array]:
        own = np.ascontiguousarray(weights[start : start + _ROWS_AT_ONCE], np.float32)
        return _quantize_rows(name, start, own, group_size)

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NumPy lets go of the interpreter
        parts = list(threads.map(part, range(0, rows, _ROWS_AT_ONCE)))
    values, steps, offsets, scales = (np.concatenate(of_rows) for of_rows in zip(*parts, strict=True))
    return RotatedTensor(group_size, values, steps, offsets, scales)


def _quantize_rows(name: str, first_row: int, weights: Array, group_size: int) -> tuple[Array, Array, Array, Array]:
    rotated = rotate(name, first_row, weights)
    rows, columns = rotated.shape
    scales = row_scales(rotated)
    groups = (rotated / scales[:, None]).reshape(rows, -1, group_size)
    steps, offsets = best_factors(groups)
    return pack_int4(nearest(groups, steps, offsets).reshape(rows, columns)), steps, offsets, scales


def rotate(name: str, first_row: int, weights: Array) -> Array:
    """float32 [N, K] -> its columns rotated and divided by the block, summed in an order that no library chooses.

    QuantizationError names the row (counted from `first_row`) that is not finite, or whose sums are not.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rotated = transform(weights) / np.float32(BLOCK)
    if not np.isfinite(rotated).all():
        row = int(np.argwhere(~np.isfinite(rotated))[0][0])
        columns = np.flatnonzero(~np.isfinite(weights[row]))
        if len(columns):
            found = weights[row, columns[0]]
            raise QuantizationError(
                name, f"holds {found} at row {first_row + row}, column {columns[0]}; want finite weights"
            )
        raise QuantizationError(name, f"spans more than float32 holds at row {first_row + row}")
    return rotated


def row_scales(rotated: Array) -> Array:
    """float32 [N]: of one level, for rotated weights [N, K]."""
    scales: Array = np.maximum(np.abs(rotated).max(axis=1) / np.float32(_LARGEST), np.float32(1e-30))
    return scales


def best_factors(groups: Array, importance: Array | float = 1.0) -> tuple[Array, Array]:
    """Steps and offsets [N, G] of the range with the least error sum(importance * (level - weight) ** 2).

    groups: weights as levels not yet whole, float32 [N, G, group_size]. importance: of a column, [G, group_size].
    """
    low, high = groups.min(axis=2), groups.max(axis=2)
    best: tuple[Array, Array] | None = None
    for share in _SHARES:
        middle, half = (low + high) / 2, (high - low) / 2 * np.float32(share)
        steps, offsets = group_factors(middle - half, middle + half)
        levels = levels_of(nearest(groups, steps, offsets), steps[:, :, None], offsets[:, :, None])
        errors = (importance * np.square(levels - groups)).sum(axis=2)
        if best is None:
            best, least = (steps, offsets), errors
            continue
        better = errors < least
        least = np.where(better, errors, least)
        best = np.where(better, steps, best[0]), np.where(better, offsets, best[1])
    assert best is not None
    return best


def group_factors(low: Array, high: Array) -> tuple[Array, Array]:
    """Steps and offsets of groups whose levels, not yet whole, lie between `low` and `high`."""
    steps = np.clip(np.rint((high - low) * np.float32(16 / 15)), 0, 255)
    # Half a level, because the shift rounds down; a constant group has no shift.
    offsets = np.clip(
        np.rint(low + np.where(steps > 0, np.float32(0.47), np.float32(0.0))), -128, 127 - (steps * 15 // 16)
    )
    return steps.astype(np.uint8), offsets.astype(np.int8)


def nearest(groups: Array, steps: Array, offsets: Array) -> Array:
    """The q, uint8 [N, G, group_size], whose level is nearest to float32 [N, G, group_size], the lower of two."""
    width = steps.astype(np.float32)[:, :, None] / np.float32(16.0)
    guess = (groups - offsets[:, :, None] + np.float32(0.47)) / np.where(width > 0, width, np.float32(1.0))
    q = np.clip(np.rint(guess), 0, 15)
    return np.where(width > 0, q, 0.0).astype(np.uint8)


def levels_of(q: Array, steps: Array, offsets: Array) -> Array:
    """int16: the int8 level of each q."""
    product = q.astype(np.int16) * steps.astype(np.int16)
    levels: Array = (product >> 4) + offsets.astype(np.int16)
    return levels


def stacked(tensors: Sequence[RotatedTensor], factor: float = 1.0) -> RotatedTensor | None:
    """The matrices one under the other, their weights times the factor; None where their groups differ."""
    first = tensors[0]
    if any(one.group_size != first.group_size or one.shape[1] != first.shape[1] for one in tensors):
        return None
    values, steps, offsets, scales = (
        np.concatenate([getattr(one, part) for one in tensors]) for part in ("values", "steps", "offsets", "scales")
    )
    return RotatedTensor(first.group_size, values, steps, offsets, scales * np.float32(factor))


def tensor_levels(tensor: RotatedTensor) -> Array:
    """int8 [N, K]: what the products compute with."""
    rows, columns = tensor.shape
    q = unpack_int4(tensor.values).reshape(rows, -1, tensor.group_size)
    return levels_of(q, tensor.steps[:, :, None], tensor.offsets[:, :, None]).astype(np.int8).reshape(rows, columns)


def dequantize_rotated(tensor: RotatedTensor) -> Array:
    """float32 [N, K], no longer rotated."""
    return transform(tensor_levels(tensor).astype(np.float32) * tensor.scales[:, None])


def transform(x: Array) -> Array:
    """float32 [N, K] -> the Walsh-Hadamard transform of each block, as `rotation.rotate_blocks`, in NumPy."""
    rows, width = x.shape
    step = 1
    while step < BLOCK:
        pairs = x.reshape(rows, width // (2 * step), 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([first + second, first - second], axis=2).reshape(rows, width)
        step *= 2
    return x

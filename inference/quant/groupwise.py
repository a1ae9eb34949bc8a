"""Group-wise asymmetric int4 and int8 weights, in NumPy.

A row of K weights is cut into groups of `group_size`. Each group g has a scale s and, unless the tensor is symmetric, a
minimum m; a weight is s * q + m. int4: q in 0..15, two to a byte (the even one in the low half). int8: q in -128..127.
The scheme is that of FlexGen (arXiv 2303.06865, section 5) with the constant group handled: its scale is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inference.errors import QuantizationError

Scheme = Literal["int4", "int8"]
Array = NDArray[Any]

FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class GroupwiseTensor:
    """A quantized matrix of N rows and K columns.

    values: int4 -> uint8 [N, K/2]; int8 -> int8 [N, K]
    scales: float16 or float32 [N, K/group_size]
    minima: the same shape and type, or None where every minimum is 0
    """

    scheme: Scheme
    group_size: int
    values: Array
    scales: Array
    minima: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.values.shape
        return rows, width * 2 if self.scheme == "int4" else width


def stacked_groups(tensors: Sequence[GroupwiseTensor], factor: float = 1.0) -> GroupwiseTensor | None:
    """The matrices one under the other, their weights times the factor; None where their groups differ."""
    first = tensors[0]
    kinds = {(one.scheme, one.group_size, one.shape[1], one.minima is None) for one in tensors}
    if len(kinds) > 1:
        return None
    values = np.concatenate([one.values for one in tensors])
    scales = np.concatenate([one.scales.astype(np.float32) for one in tensors]) * np.float32(factor)
    minima: Array | None = None
    if first.minima is not None:
        lowest = [one.minima.astype(np.float32) for one in tensors if one.minima is not None]
        minima = np.concatenate(lowest) * np.float32(factor)
    return GroupwiseTensor(first.scheme, first.group_size, values, scales, minima)


def pack_int4(levels: Array) -> Array:
    """Levels 0..15, uint8 [N, K] -> uint8 [N, K/2], the even column in the low half of the byte."""
    packed: Array = levels[:, 0::2] | (levels[:, 1::2] << 4)
    return np.ascontiguousarray(packed)


def unpack_int4(packed: Array) -> Array:
    """The inverse of `pack_int4`: uint8 [N, K/2] -> uint8 [N, K]."""
    levels = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.uint8)
    levels[:, 0::2] = packed & 0x0F
    levels[:, 1::2] = packed >> 4
    return levels


def quantize(name: str, weights: Array, scheme: Scheme, group_size: int = 32) -> GroupwiseTensor:
    """Quantize float [N, K] to the nearest level of each group's range.

    The scale and minimum are rounded to float16 first and the levels are chosen for the rounded ones, so the error is
    at most half a step plus that rounding. Raises QuantizationError, naming the tensor, on NaN or infinity and where K
    is no multiple of the group size.
    """
    groups = checked_groups(name, weights, scheme, group_size)
    rows, columns = weights.shape
    scales, minima = group_ranges(name, groups, scheme)
    offset = 0 if scheme == "int4" else 128
    steps = 15 if scheme == "int4" else 255
    exact_scales = scales.astype(np.float32)[:, :, None]
    exact_minima = minima.astype(np.float32)[:, :, None]
    divisor = np.where(exact_scales > 0, exact_scales, 1.0)
    levels = np.rint((groups - exact_minima) / divisor)
    levels = np.clip(levels, -offset, steps - offset)
    levels = np.where(exact_scales > 0, levels, 0.0).reshape(rows, columns)
    values = pack_int4(levels.astype(np.uint8)) if scheme == "int4" else levels.astype(np.int8)
    return GroupwiseTensor(scheme, group_size, values, scales, minima)


def checked_groups(name: str, weights: Array, scheme: Scheme, group_size: int) -> Array:
    """Float [N, K] as float32 [N, K / group_size, group_size]. Raises QuantizationError as `quantize` does."""
    if weights.ndim != 2 or weights.shape[1] % group_size:
        raise QuantizationError(name, f"shape {weights.shape} does not divide into groups of {group_size} columns")
    if scheme == "int4" and group_size % 2:
        raise QuantizationError(name, f"int4 needs an even group size, not {group_size}")
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    if not np.isfinite(weights).all():
        row, column = np.argwhere(~np.isfinite(weights))[0]
        raise QuantizationError(
            name, f"holds {weights[row, column]} at row {row}, column {column}; want finite weights"
        )
    rows, columns = weights.shape
    groups: Array = weights.reshape(rows, columns // group_size, group_size)
    return groups


def group_ranges(name: str, groups: Array, scheme: Scheme) -> tuple[Array, Array]:
    """Scales and minima of float32 [N, G, group_size]: both [N, G], float16, or float32 where float16 is too narrow.

    A constant group has scale 0, and so has one whose steps are too small for float32: its weights become its minimum.
    Raises QuantizationError where a group's range overflows float32.
    """
    steps, offset = (15, 0) if scheme == "int4" else (255, 128)
    low = groups.min(axis=2)
    with np.errstate(over="ignore"):
        span = groups.max(axis=2) - low
    if not np.isfinite(span).all():
        row, group = np.argwhere(~np.isfinite(span))[0]
        column = group * groups.shape[2]
        raise QuantizationError(
            name, f"spans more than float32 holds at row {row}, columns {column} to {column + groups.shape[2] - 1}"
        )
    # Where float16 cannot hold the range, or would lose small steps to denormals, keep float32.
    small = (span > 0) & (span / steps < 6.2e-5)
    wide = bool(np.abs(groups).max(initial=0.0) > FLOAT16_MAX / 4 or small.any())
    kind = np.float32 if wide else np.float16
    scales = (span / steps).astype(kind)
    # int8 levels are signed: q - 128 shifts the group's minimum to the middle of the range.
    minima = (low + offset * scales.astype(np.float32)).astype(kind)
    return scales, minima


def check_finite(name: str, tensor: GroupwiseTensor) -> None:
    """Raises QuantizationError, naming the first group, where a scale or minimum is NaN or infinite."""
    for label, part in (("scale", tensor.scales), ("minimum", tensor.minima)):
        if part is not None and not np.isfinite(part).all():
            row, group = np.argwhere(~np.isfinite(part))[0]
            first = group * tensor.group_size
            raise QuantizationError(
                name,
                f"has the {label} {part[row, group]} at row {row}, columns {first} to "
                f"{first + tensor.group_size - 1}; want finite weights",
            )


def fitting_group(columns: int, wanted: int) -> int:
    """The largest of wanted, wanted / 2, … 16 that divides a row's columns; else `wanted`, which then fails."""
    group = wanted
    while group > 16 and columns % group:
        group //= 2
    return group if columns % group == 0 else wanted


def dequantize(tensor: GroupwiseTensor) -> Array:
    """float32 [N, K]."""
    rows, columns = tensor.shape
    levels = unpack_int4(tensor.values) if tensor.scheme == "int4" else tensor.values
    groups = levels.reshape(rows, columns // tensor.group_size, tensor.group_size).astype(np.float32)
    groups *= tensor.scales.astype(np.float32)[:, :, None]
    if tensor.minima is not None:
        groups += tensor.minima.astype(np.float32)[:, :, None]
    return groups.reshape(rows, columns)

"""Rounding that makes up for itself: GPTQ (arXiv 2210.17323), on group-wise scales fixed beforehand.

Columns are rounded one after the other; what one loses is added to those still to come, in the proportions that keep
the layer's output on the calibration text nearest to what it was. The columns with the largest inputs go first. Each
group's scale and minimum are chosen before that, by the squared error weighted with the inputs' second moments, so
columns keep their places and the tensor is stored, and computed with, like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky

from inference.errors import QuantizationError
from inference.quant import rotated
from inference.quant.groupwise import (
    Array,
    GroupwiseTensor,
    Scheme,
    checked_groups,
    group_ranges,
    pack_int4,
)
from inference.quant.rotated import RotatedTensor

# Added to the diagonal, as a share of its mean: inputs that always come together would else make it singular.
DAMPING = 0.01
_BLOCK_COLUMNS = 128
# Shares of a group's range that are tried: clipping a rare extreme can leave finer steps for all others.
_SHRINKAGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def quantize_by_moments(
    name: str, weights: Array, moments: Array, scheme: Scheme, group_size: int = 32
) -> GroupwiseTensor:
    """Quantize float [N, K], given the second moments X^T X of the layer's inputs, float [K, K].

    Raises QuantizationError as `groupwise.quantize` does, and where the moments are not finite or of another shape.
    """
    groups = checked_groups(name, weights, scheme, group_size)
    _check_moments(name, moments, weights.shape[1])
    importance = np.diag(moments).astype(np.float32).reshape(-1, group_size)
    scales, minima = _best_ranges(name, groups, importance, scheme)
    lowest, highest = (0, 15) if scheme == "int4" else (-128, 127)
    scale, minimum = scales.astype(np.float32), minima.astype(np.float32)

    def rounded(column: Array, group: int) -> tuple[Array, Array]:
        own = scale[:, group]
        level = np.clip(np.rint((column - minimum[:, group]) / np.where(own > 0, own, 1.0)), lowest, highest)
        level = np.where(own > 0, level, np.float32(0.0))
        return level, level * own + minimum[:, group]

    placed = _round_in_turn(name, groups.reshape(weights.shape), moments, group_size, rounded)
    values = pack_int4(placed.astype(np.uint8)) if scheme == "int4" else placed.astype(np.int8)
    return GroupwiseTensor(scheme, group_size, values, scales, minima)


def quantize_rotated_by_moments(name: str, weights: Array, moments: Array, group_size: int = 32) -> RotatedTensor:
    """The same for rotated 4-bit weights; the moments are those of the inputs before any rotation.

    Raises QuantizationError as `rotated.quantize_rotated` does, and where the moments are not finite or of another
    shape.
    """
    _check_moments(name, moments, weights.shape[1])
    # Inputs are rotated as the weights are: their moments on both sides.
    turned = rotated.transform(rotated.transform(moments.astype(np.float64)).T).T
    scales = rotated.row_scales(own := rotated.rotate(name, 0, np.ascontiguousarray(weights, np.float32)))
    levels = own / scales[:, None]
    groups = levels.reshape(len(levels), -1, group_size)
    importance = np.diag(turned).astype(np.float32).reshape(-1, group_size)
    steps, offsets = rotated.best_factors(groups, importance / importance.mean())

    def rounded(column: Array, group: int) -> tuple[Array, Array]:
        step, offset = steps[:, group : group + 1], offsets[:, group : group + 1]
        q = rotated.nearest(column[:, None, None], step, offset)[:, 0, 0]
        return q.astype(np.float32), rotated.levels_of(q, step[:, 0], offset[:, 0]).astype(np.float32)

    placed = _round_in_turn(name, levels, turned, group_size, rounded)
    return RotatedTensor(group_size, pack_int4(placed.astype(np.uint8)), steps, offsets, scales)


def _check_moments(name: str, moments: Array, columns: int) -> None:
    if moments.shape != (columns, columns) or not np.isfinite(moments).all():
        raise QuantizationError(name, f"needs finite moments of shape {(columns, columns)}, not {moments.shape}")


def _round_in_turn(
    name: str,
    weights: Array,
    moments: Array,
    group_size: int,
    rounded: Callable[[Array, int], tuple[Array, Array]],
) -> Array:
    """The level of each of float32 [N, K], column by column, what one loses added to those still to come.

    rounded: (a column's weights [N], its group) -> (levels, the weights that they stand for).
    """
    rows, columns = weights.shape
    order = np.argsort(-np.diag(moments), kind="stable")
    factor = _inverse_factor(name, moments[np.ix_(order, order)])
    # From here a row of an array is a column of the matrix, so that what is worked on lies together.
    left = np.ascontiguousarray(weights.T[order])  # what is still to be rounded
    levels = np.empty((columns, rows), dtype=np.float32)
    for start in range(0, columns, _BLOCK_COLUMNS):
        stop = min(start + _BLOCK_COLUMNS, columns)
        errors = np.empty((stop - start, rows), dtype=np.float32)
        for column in range(start, stop):
            level, value = rounded(left[column], int(order[column]) // group_size)
            error = (left[column] - value) / factor[column, column]
            left[column:stop] -= factor[column, column:stop, None] * error
            levels[column], errors[column - start] = level, error
        left[stop:] -= factor[start:stop, stop:].T @ errors
    placed = np.empty((rows, columns), dtype=np.float32)
    placed[:, order] = levels.T
    return placed


def _inverse_factor(name: str, moments: Array) -> Array:
    """The upper Cholesky factor of the damped moments' inverse, float32 [K, K]."""
    damped = moments.astype(np.float64)
    diagonal = np.diag_indices_from(damped)
    # An input that is always 0 constrains nothing; without this it would make the matrix singular.
    damped[diagonal] = np.where(damped[diagonal] > 0, damped[diagonal], 1.0)
    damped[diagonal] += DAMPING * damped[diagonal].mean()
    try:
        lower = cholesky(damped, lower=True)
        inverse = cho_solve((lower, True), np.eye(len(damped)))
        factor: Array = cholesky(inverse, lower=False)
    except LinAlgError as error:
        raise QuantizationError(name, f"has moments that are not positive definite: {error}") from None
    return factor.astype(np.float32)


def _best_ranges(name: str, groups: Array, importance: Array, scheme: Scheme) -> tuple[Array, Array]:
    """Scales and minima [N, G] of the shrinkage with the least error sum(importance * (weight - rounded) ** 2)."""
    lowest, highest = (0, 15) if scheme == "int4" else (-128, 127)
    middle = (groups.max(axis=2, keepdims=True) + groups.min(axis=2, keepdims=True)) / 2
    best_error: Array | None = None
    for share in _SHRINKAGES:
        shrunk = middle + (groups - middle) * np.float32(share)
        scales, minima = group_ranges(name, shrunk, scheme)
        scale, minimum = scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]
        levels = np.clip(np.rint((groups - minimum) / np.where(scale > 0, scale, 1.0)), lowest, highest)
        levels = np.where(scale > 0, levels, 0.0)
        error = (importance * (groups - (levels * scale + minimum)) ** 2).sum(axis=2)
        if best_error is None:
            best_error, best_scales, best_minima = error, scales, minima
        else:
            better = error < best_error
            best_error = np.where(better, error, best_error)
            # float16 beside float32 gives float32: one type for the whole tensor.
            best_scales = np.where(better, scales, best_scales)
            best_minima = np.where(better, minima, best_minima)
    return best_scales, best_minima

"""Matrix products of quantized weights by the kernels that PyTorch ships: int4 times bfloat16, int8 times int8.

int4: a weight is (q - 8) * scale + zero with q in 0..15; scale and zero of each group are bfloat16, as the kernels want
them. The layouts are those of `torch._convert_weight_to_int4pack` and its sibling for processors (tinygemm's).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from inference.kernels.base import Linear, Rows
from inference.model.linear import channel_levels
from inference.quant.groupwise import Array, GroupwiseTensor, unpack_int4
from inference.quant.rotated import RotatedTensor, levels_of, tensor_levels
from inference.quant.rotation import rotate_blocks

GROUPS = (32, 64, 128, 256)
_MIDDLE = 8
# Rows of a tile: 8 on CUDA, 16 for processors; columns: 16 times the inner tiles, of which there are 2, 4 or 8.
_TILE_ROWS = 16
_INNER_TILES = (8, 4, 2)
# cuBLAS multiplies whole numbers by tiles only, and no fewer rows than this.
_LEAST_ROWS, _EVEN = 32, 8


def fits_int4(rows: int, columns: int, group_size: int) -> bool:
    """Whether PyTorch's int4 kernels multiply by a matrix of that shape and of groups of that size."""
    whole = rows % _TILE_ROWS == 0 and columns % (16 * _INNER_TILES[-1]) == 0
    return whole and group_size in GROUPS and columns % group_size == 0


def int4_nbytes(rows: int, columns: int, group_size: int) -> int:
    """What such a product holds."""
    return rows * columns // 2 + rows * (columns // group_size) * 4


class Int4Linear:
    """packed: the levels in the device's own layout. factors: bfloat16 [K / group, N, 2], scale and zero of each group.

    rotated: the weights are those of rows rotated in blocks of 64 (`quant.rotation`).
    """

    def __init__(self, packed: torch.Tensor, factors: torch.Tensor, *, rotated: bool) -> None:
        self._packed = packed
        self._factors = factors
        self._rotated = rotated
        self.form = ROTATED_FORM if rotated else PLAIN_FORM
        self.nbytes = packed.nbytes + factors.nbytes
        # Processors: uint8 [N, K / 2]; CUDA: int32 [N / 8, K / (16 * tiles), 32, tiles / 2].
        columns = packed.shape[1] * (2 if packed.ndim == 2 else 32 * packed.shape[-1])
        self._group = columns // len(factors)
        on_cuda = packed.device.type == "cuda"
        self._multiply = torch._weight_int4pack_mm if on_cuda else torch._weight_int4pack_mm_for_cpu

    @classmethod
    def of(cls, weight: GroupwiseTensor | RotatedTensor, device: torch.device) -> Int4Linear:
        """Of a matrix that `fits_int4`. Its levels are kept as they are; scales and zeros are rounded to bfloat16.

        A rotated tensor's whole-number levels, (q * step >> 4) + offset, become the straight line nearest to them: on
        average 0.3 levels off, of the 16 or so that lie between two values of q.
        """
        if isinstance(weight, RotatedTensor):
            slopes, starts = _lines()
            rows = weight.scales[:, None]
            scales = slopes[weight.steps] * rows
            lowest = (starts[weight.steps] + weight.offsets.astype(np.float32)) * rows
        else:
            scales = weight.scales.astype(np.float32)
            lowest = np.zeros_like(scales) if weight.minima is None else weight.minima.astype(np.float32)
        factors = np.stack([scales, lowest + _MIDDLE * scales], axis=2).transpose(1, 0, 2)  # [K / group, N, 2]
        return cls(
            _packed(weight.values, device),
            torch.from_numpy(np.ascontiguousarray(factors)).to(device, torch.bfloat16),
            rotated=isinstance(weight, RotatedTensor),
        )

    def __call__(self, rows: Rows) -> torch.Tensor:
        values = rows.values  # bfloat16 [M, K]
        if self._rotated:
            values = rotate_blocks(values.float()).to(torch.bfloat16)
        product: torch.Tensor = self._multiply(values, self._packed, self._group, self._factors)
        return product.float()

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"packed": self._packed, "factors": self._factors}

    def over(self, arrays: Mapping[str, torch.Tensor]) -> Int4Linear:
        return Int4Linear(arrays["packed"], arrays["factors"], rotated=self._rotated)


PLAIN_FORM, ROTATED_FORM = "int4", "int4-rotated"


def _packed(values: Array, device: torch.device) -> torch.Tensor:
    """uint8 [N, K / 2], the even column in the low half -> the device's own order."""
    columns = values.shape[1] * 2
    tiles = next(tiles for tiles in _INNER_TILES if columns % (16 * tiles) == 0)
    if device.type == "cuda":
        # There the even column is the high half.
        swapped = torch.from_numpy(np.ascontiguousarray((values << 4) | (values >> 4)))
        return torch._convert_weight_to_int4pack(swapped.to(device), tiles)
    levels = torch.from_numpy(unpack_int4(values).astype(np.int32))
    return torch._convert_weight_to_int4pack_for_cpu(levels, tiles)


@cache
def _lines() -> tuple[Array, Array]:
    """For each step of a rotated group, the slope and the start of the line nearest to its 16 levels: float32 [256]."""
    q = np.arange(16)
    levels = levels_of(q[None], np.arange(256)[:, None], np.zeros((1, 1), np.int16)).astype(np.float64)  # [256, 16]
    slopes, starts = np.polyfit(q, levels.T, 1)
    return slopes.astype(np.float32), starts.astype(np.float32)


class WholeLinear:
    """int8 rows times int8 weights, block-rotated both, by `torch._int_mm`: whole-number sums, so exact on any device.

    levels: int8 [N, K]; scales: float32 [N], one an output channel.
    """

    form = "int8"

    def __init__(self, levels: torch.Tensor, scales: torch.Tensor) -> None:
        self._levels = levels
        self._scales = scales
        self.nbytes = levels.nbytes

    @classmethod
    def of(cls, name: str, weight: torch.Tensor | RotatedTensor, device: torch.device) -> WholeLinear:
        """weight: float32 [N, K] or 4-bit. QuantizationError, with the name, on NaN or infinity."""
        if isinstance(weight, RotatedTensor):
            levels, scales = torch.from_numpy(tensor_levels(weight)), torch.from_numpy(weight.scales.copy())
        else:
            levels, scales = channel_levels(name, weight)
        return cls(levels.to(device), scales.to(device))

    def __call__(self, rows: Rows) -> torch.Tensor:
        count, missing = len(rows.values), -len(rows.values) % _LEAST_ROWS
        values = torch.nn.functional.pad(rows.values, (0, 0, 0, missing))
        outputs, inputs = self._levels.shape
        if outputs % _EVEN or inputs % _EVEN:  # shapes that no library takes; double precision is as exact, and slow
            sums = (values.double() @ self._levels.double().t()).float()
        else:
            sums = torch._int_mm(values, self._levels.t()).float()
        return sums[:count] * self._scales

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"levels": self._levels, "scales": self._scales}

    def over(self, arrays: Mapping[str, torch.Tensor]) -> WholeLinear:
        return WholeLinear(arrays["levels"], arrays["scales"])


def bound_product(form: str, arrays: Mapping[str, torch.Tensor]) -> Linear | None:
    """The product of `Linear.arrays`; None where the form is none of these."""
    if form in (PLAIN_FORM, ROTATED_FORM):
        return Int4Linear(arrays["packed"], arrays["factors"], rotated=form == ROTATED_FORM)
    return WholeLinear(arrays["levels"], arrays["scales"]) if form == WholeLinear.form else None

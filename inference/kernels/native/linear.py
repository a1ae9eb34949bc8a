"""int8 weights packed for the compiled products, which take uint8 rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from inference.kernels.base import Likeliest, Rows
from inference.model.linear import channel_levels

# Sums of 255 * 127 must fit into 32 bits with a sign.
MOST_INPUTS = 65_536


def padded(width: int) -> int:
    """Bytes of a uint8 row of that width: filled up to an odd number of cache lines (vectors.h tells why)."""
    return ((width + 63) // 64 | 1) * 64


class PackedLinear:
    """Weights int8, block-rotated, one scale an output channel; whole-number sums: the same bits for every M."""

    def __init__(self, library: ctypes.CDLL, name: str, weight: torch.Tensor) -> None:
        """weight: float32 [N, K]; raises QuantizationError on NaN or infinity."""
        levels, self._scales = channel_levels(name, weight)
        self._outputs, inputs = levels.shape
        if inputs > MOST_INPUTS:
            raise ValueError(f"{name} has {inputs} inputs; sums of at most {MOST_INPUTS} are exact")
        self._tiles = (inputs + 63) // 64
        self._library = library
        self._panels = torch.empty((self._outputs + 15) // 16 * self._tiles * 1024, dtype=torch.int8)
        self._corrections = torch.empty(self._outputs, dtype=torch.int32)
        library.penstock_pack(
            levels.contiguous().data_ptr(), self._outputs, inputs, self._panels.data_ptr(), self._corrections.data_ptr()
        )
        self.nbytes = self._panels.nbytes + self._corrections.nbytes + self._scales.nbytes

    def __call__(self, rows: Rows) -> torch.Tensor:
        y = torch.empty((len(rows.values), self._outputs), dtype=torch.float32)
        self._multiply(self._library.penstock_matmul, rows, y)
        return y

    def highest(self, rows: Rows) -> Likeliest:
        top = torch.empty(len(rows.values), dtype=torch.float32)
        at = torch.empty(len(rows.values), dtype=torch.int64)
        self._multiply(self._library.penstock_matmul_best, rows, top, at)
        return Likeliest(at, top, rows.scales)

    def _multiply(self, product: Callable[..., None], rows: Rows, *results: torch.Tensor) -> None:
        values = rows.values.contiguous()
        count, stride = values.shape
        product(
            values.data_ptr(),
            stride,
            count,
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            self._corrections.data_ptr(),
            self._tiles,
            self._outputs,
            *(result.data_ptr() for result in results),
            torch.get_num_threads(),
        )

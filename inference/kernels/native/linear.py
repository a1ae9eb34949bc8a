"""int8 weights packed for the compiled products, which take uint8 rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

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

    form = "packed8"

    def __init__(
        self, library: ctypes.CDLL, panels: torch.Tensor, corrections: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """panels: int8, as `penstock_pack` lays out [N, K] levels; corrections: int32 [N]; scales: float32 [N]."""
        self._library = library
        self._panels, self._corrections, self._scales = panels, corrections, scales
        self._outputs = len(scales)
        self._tiles = len(panels) // ((self._outputs + 15) // 16 * 1024)
        self.nbytes = panels.nbytes + corrections.nbytes + scales.nbytes

    @classmethod
    def of(cls, library: ctypes.CDLL, name: str, weight: torch.Tensor) -> PackedLinear:
        """weight: float32 [N, K]; raises QuantizationError on NaN or infinity."""
        levels, scales = channel_levels(name, weight)
        outputs, inputs = levels.shape
        if inputs > MOST_INPUTS:
            raise ValueError(f"{name} has {inputs} inputs; sums of at most {MOST_INPUTS} are exact")
        panels = torch.empty((outputs + 15) // 16 * ((inputs + 63) // 64) * 1024, dtype=torch.int8)
        corrections = torch.empty(outputs, dtype=torch.int32)
        library.penstock_pack(
            levels.contiguous().data_ptr(), outputs, inputs, panels.data_ptr(), corrections.data_ptr()
        )
        return cls(library, panels, corrections, scales)

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"panels": self._panels, "corrections": self._corrections, "scales": self._scales}

    def over(self, arrays: Mapping[str, torch.Tensor]) -> PackedLinear:
        return PackedLinear(self._library, **arrays)

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

"""int8 and 4-bit weights packed for the compiled products, which take uint8 rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch

from inference.kernels.base import Likeliest, Rows
from inference.kernels.native.calling import pointer, threads
from inference.model.linear import channel_levels
from inference.quant.rotated import RotatedTensor

# Sums of 255 * 127 must fit into 32 bits with a sign.
MOST_INPUTS = 65_536

TILE_BYTES = 1024  # 64 inputs of a panel of 16 outputs
FACTOR_BYTES = 32  # a group's steps and offsets of a panel


def padded(width: int) -> int:
    """Bytes of a uint8 row of that width: filled up to an odd number of cache lines (vectors.h tells why)."""
    return ((width + 63) // 64 | 1) * 64


class PackedProduct:
    """Whole-number sums, one scale an output channel: the same bits for every M."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        group: int,
        tiles: int,
        corrections: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """weights: int8 panels, or nibbles and factors, the others None. tiles: of 64 inputs."""
        self._library = library
        self.weights = weights
        self.group, self.tiles = group, tiles
        self.corrections, self.scales = corrections, scales
        self.outputs = len(scales)
        self.nbytes = sum(one.nbytes for one in (*weights, corrections, scales) if one is not None)

    def __call__(self, rows: Rows) -> torch.Tensor:
        y = torch.empty((len(rows.values), self.outputs), dtype=torch.float32)
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
            *map(pointer, self.weights),
            self.group,
            self.scales.data_ptr(),
            self.corrections.data_ptr(),
            self.tiles,
            self.outputs,
            *(result.data_ptr() for result in results),
            threads(),
        )


class PackedLinear(PackedProduct):
    """Weights int8, block-rotated."""

    form = "packed8"

    def __init__(
        self, library: ctypes.CDLL, panels: torch.Tensor, corrections: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """panels: int8, as `penstock_pack` lays out [N, K] levels; corrections: int32 [N]; scales: float32 [N]."""
        tiles = len(panels) // (_panels(len(scales)) * TILE_BYTES)
        super().__init__(library, (panels, None, None), 0, tiles, corrections, scales)
        self._panels = panels

    @classmethod
    def of(cls, library: ctypes.CDLL, name: str, weight: torch.Tensor) -> PackedLinear:
        """weight: float32 [N, K]; raises QuantizationError on NaN or infinity."""
        levels, scales = channel_levels(name, weight)
        outputs, inputs = levels.shape
        _check_inputs(name, inputs)
        panels = torch.empty(_panels(outputs) * ((inputs + 63) // 64) * TILE_BYTES, dtype=torch.int8)
        corrections = torch.empty(outputs, dtype=torch.int32)
        library.penstock_pack(
            levels.contiguous().data_ptr(), outputs, inputs, panels.data_ptr(), corrections.data_ptr()
        )
        return cls(library, panels, corrections, scales)

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"panels": self._panels, "corrections": self.corrections, "scales": self.scales}

    def over(self, arrays: Mapping[str, torch.Tensor]) -> PackedLinear:
        return PackedLinear(self._library, **arrays)


class NibbleLinear(PackedProduct):
    """Weights of 4 bits (`quant.rotated`), expanded to the levels of int8 in the processor's caches."""

    form = "packed4"

    def __init__(
        self,
        library: ctypes.CDLL,
        nibbles: torch.Tensor,
        factors: torch.Tensor,
        corrections: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """nibbles, factors: uint8, laid out by `penstock_pack_nibbles`; corrections: int32 [N]; scales: float32 [N]."""
        panels = _panels(len(scales))
        tiles = len(nibbles) // (panels * TILE_BYTES // 2)
        groups = len(factors) // (panels * FACTOR_BYTES)
        super().__init__(library, (None, nibbles, factors), tiles * 64 // groups, tiles, corrections, scales)
        self._nibbles, self._factors = nibbles, factors

    @classmethod
    def of(cls, library: ctypes.CDLL, name: str, weight: RotatedTensor) -> NibbleLinear:
        outputs, inputs = weight.shape
        _check_inputs(name, inputs)
        panels = _panels(outputs)
        nibbles = torch.zeros(panels * inputs // 64 * TILE_BYTES // 2, dtype=torch.uint8)
        factors = torch.zeros(panels * inputs // weight.group_size * FACTOR_BYTES, dtype=torch.uint8)
        corrections = torch.empty(outputs, dtype=torch.int32)
        library.penstock_pack_nibbles(
            *(array.ctypes.data for array in (weight.values, weight.steps, weight.offsets)),
            outputs,
            inputs,
            weight.group_size,
            nibbles.data_ptr(),
            factors.data_ptr(),
            corrections.data_ptr(),
        )
        return cls(library, nibbles, factors, corrections, torch.from_numpy(weight.scales.copy()))

    def arrays(self) -> dict[str, torch.Tensor]:
        return {
            "nibbles": self._nibbles,
            "factors": self._factors,
            "corrections": self.corrections,
            "scales": self.scales,
        }

    def over(self, arrays: Mapping[str, torch.Tensor]) -> NibbleLinear:
        return NibbleLinear(self._library, **arrays)


def packed_nbytes(outputs: int, inputs: int, nibble_group: int) -> int:
    """What `nbytes` of such a product will be. nibble_group: of the 4-bit form, 0 for int8."""
    panels, tiles = _panels(outputs), (inputs + 63) // 64
    if not nibble_group:
        return panels * tiles * TILE_BYTES + 8 * outputs
    return panels * tiles * TILE_BYTES // 2 + panels * inputs // nibble_group * FACTOR_BYTES + 8 * outputs


def _panels(outputs: int) -> int:
    return (outputs + 15) // 16


def _check_inputs(name: str, inputs: int) -> None:
    if inputs > MOST_INPUTS:
        raise ValueError(f"{name} has {inputs} inputs; sums of at most {MOST_INPUTS} are exact")

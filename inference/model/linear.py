"""Matrix products: float32 and bfloat16 through PyTorch, int8 through oneDNN."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from inference.errors import QuantizationError
from inference.kernels.base import Compute, Linear, Rows
from inference.quant.rotated import RotatedTensor, dequantize_rotated, tensor_levels
from inference.quant.rotation import rotate_weight

ROWS_AT_ONCE = 4096


class FloatLinear:
    form = "float"

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, rows: Rows) -> torch.Tensor:
        return F.linear(rows.values, self._weight).float()

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"weight": self._weight}

    def over(self, arrays: Mapping[str, torch.Tensor]) -> FloatLinear:
        return FloatLinear(arrays["weight"])


class Int8Linear:
    """Weights int8, block-rotated, one scale an output channel; whole-number sums: the same bits for every M."""

    form = "int8"

    def __init__(self, levels: torch.Tensor, scales: torch.Tensor) -> None:
        """levels: int8 [N, K], copied into an order of oneDNN's own with the first product; scales: float32 [N]."""
        self._levels: torch.Tensor | None = levels
        self._packed: torch.Tensor | None = None
        self._scales = scales
        self.nbytes = levels.nbytes

    @classmethod
    def of(cls, name: str, weight: torch.Tensor) -> Int8Linear:
        """weight: float32 [N, K]; raises QuantizationError on NaN or infinity."""
        return cls(*channel_levels(name, weight))

    def arrays(self) -> dict[str, torch.Tensor]:
        levels = self._levels
        if levels is None:
            assert self._packed is not None
            levels = self._packed.to_dense().t().contiguous()  # its own order would bind a file to one oneDNN
        return {"levels": levels, "scales": self._scales}

    def over(self, arrays: Mapping[str, torch.Tensor]) -> Int8Linear:
        return Int8Linear(arrays["levels"], arrays["scales"])

    def __call__(self, rows: Rows) -> torch.Tensor:
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self._levels, None)
            self._levels = None
        zeros = torch.zeros(len(self._scales), dtype=torch.int32)
        # Without tiles a processor has dot products of unsigned bytes only; for signed ones oneDNN has a plain loop.
        unsigned = rows.values.view(torch.uint8) ^ 128
        if not _saturates():
            return _product(unsigned, 128, self._packed, self._scales, zeros)
        lower = unsigned.clamp(max=127)
        first = _product(lower, 128, self._packed, self._scales, zeros)
        return first + _product(unsigned - lower, 0, self._packed, self._scales, zeros)


def _product(
    values: torch.Tensor, zero_point: int, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        values, 1.0, zero_point, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


@functools.cache
def _saturates() -> bool:
    """Whether two products of bytes are added up in 16 bits here, as on processors without VNNI, and cut off there.

    Bytes of up to 128 times levels of up to 127 are not: 2 * 128 * 127 < 2 ** 15 (oneDNN's guide, "Nuances of int8
    computations").
    """
    levels = torch.full((64, 256), 127, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(levels, None)
    rows = torch.full((8, 256), 255, dtype=torch.uint8)
    product = _product(rows, 128, packed, torch.ones(64), torch.zeros(64, dtype=torch.int32))
    return not bool((product == 127 * 127 * 256).all())


def channel_levels(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, K] -> int8 levels [N, K] of the block-rotated weights, and one scale an output channel, float32 [N].

    QuantizationError on NaN or infinity.
    """
    levels = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    # Some rows at a time: a head may be a large part of what a model takes, and this needs three times its floats.
    for start in range(0, len(weight), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        rotated = rotate_weight(weight[some])
        largest = rotated.abs().amax(dim=1)
        if not bool(torch.isfinite(largest).all()):
            raise QuantizationError(name, "holds NaN or infinity; int8 needs finite weights")
        scales[some] = (largest / 127.0).clamp_min_(1e-30)
        levels[some] = (rotated / scales[some, None]).round_().to(torch.int8)
    return levels, scales


def make_linear(name: str, weight: torch.Tensor | RotatedTensor, compute: Compute) -> Linear:
    """The linear layer of [N, K], float32 or 4-bit, for that arithmetic, by PyTorch and oneDNN."""
    if isinstance(weight, RotatedTensor):
        if compute == "int8":
            return Int8Linear(torch.from_numpy(tensor_levels(weight)), torch.from_numpy(weight.scales.copy()))
        weight = torch.from_numpy(dequantize_rotated(weight))
    if compute == "int8":
        return Int8Linear.of(name, weight)
    return FloatLinear(weight.to(torch.bfloat16) if compute == "bf16" else weight)


def linear_nbytes(outputs: int, inputs: int, compute: Compute) -> int:
    """What `nbytes` of such a layer will be."""
    return outputs * inputs * {"fp32": 4, "bf16": 2, "int8": 1}[compute]


def bound_linear(form: str, arrays: Mapping[str, torch.Tensor]) -> Linear:
    """The linear layer of `Linear.arrays`; ValueError where the form is none of PyTorch's and oneDNN's."""
    if form == FloatLinear.form:
        return FloatLinear(arrays["weight"])
    if form == Int8Linear.form:
        return Int8Linear(arrays["levels"], arrays["scales"])
    raise ValueError(f"matrices of the form {form!r} are not among those of these kernels")


def fastest_compute() -> Compute:
    """int8 where the processor has dot products for it, else bfloat16 where it has those, else float32."""
    onednn: Any = torch.backends.mkldnn
    if onednn.is_available() and torch.cpu._is_vnni_supported():
        return "int8"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"

"""The products that PyTorch ships for quantized weights, against the store's own weights multiplied plainly."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from inference.device.products import Int4Linear, WholeLinear, fits_int4, int4_nbytes
from inference.errors import QuantizationError
from inference.kernels.base import Rows
from inference.kernels.reference import quantize_rows
from inference.model.linear import Int8Linear
from inference.quant.groupwise import dequantize, quantize, stacked_groups
from inference.quant.rotated import dequantize_rotated, quantize_rotated

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * 0.05 + 0.01


def rows_of(count: int, columns: int) -> torch.Tensor:
    return torch.randn((count, columns), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_int4_products_are_those_of_the_stored_levels_scales_and_minima(device: str, group: int, count: int) -> None:
    stored = quantize("w", weights(48, 256), "int4", group)
    linear = Int4Linear.of(stored, torch.device(device))
    x = rows_of(count, 256).to(torch.bfloat16)
    made = linear(Rows(x.to(device), None)).cpu()
    # The levels are the store's; what is rounded to bfloat16 are scale, and the value of the middle level.
    scales = torch.from_numpy(stored.scales.astype(np.float32))
    middle = (torch.from_numpy(stored.minima.astype(np.float32)) + 8 * scales).bfloat16().float()
    low, high = torch.from_numpy(stored.values & 15), torch.from_numpy(stored.values >> 4)
    levels = torch.stack([low, high], dim=2).reshape(48, -1, group).float()
    exact = ((levels - 8) * scales.bfloat16().float()[:, :, None] + middle[:, :, None]).reshape(48, 256)
    torch.testing.assert_close(made, x.float() @ exact.t(), rtol=0.02, atol=0.01)
    torch.testing.assert_close(made, x.float() @ torch.from_numpy(dequantize(stored)).t(), rtol=0.03, atol=0.02)
    assert linear.nbytes == int4_nbytes(48, 256, group)


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_weight_comes_out_of_the_int4_layout_where_it_was_put(device: str) -> None:
    columns = 64
    stored = quantize("w", weights(16, columns, seed=3), "int4", 32)
    linear = Int4Linear.of(stored, torch.device(device))
    found = linear(Rows(torch.eye(columns, dtype=torch.bfloat16, device=device), None)).cpu().t()  # [N, K]
    torch.testing.assert_close(found, torch.from_numpy(dequantize(stored)), rtol=0.01, atol=0.001)


@pytest.mark.parametrize("device", DEVICES)
def test_rotated_weights_on_the_int4_kernels_are_as_near_as_their_own_rounding(device: str) -> None:
    exact = weights(64, 256)
    stored = quantize_rotated("w", exact, 32)
    linear = Int4Linear.of(stored, torch.device(device))
    x = rows_of(16, 256)
    made = linear(Rows(x.to(device, torch.bfloat16), None)).cpu()
    want, plain = x @ torch.from_numpy(exact).t(), x @ torch.from_numpy(dequantize_rotated(stored)).t()
    lost_by_storing, lost_here = (plain - want).norm(), (made - plain).norm()
    assert lost_here < 0.15 * lost_by_storing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (20, 36)])
def test_int8_sums_are_exact_whatever_rows_go_together(device: str, outputs: int, inputs: int) -> None:
    weight = torch.from_numpy(weights(outputs, inputs))
    linear = WholeLinear.of("w", weight, torch.device(device))
    rows = quantize_rows(rows_of(40, inputs))
    moved = Rows(rows.values.to(device), None)
    together = linear(moved).cpu()
    sums = rows.values.double() @ linear.arrays()["levels"].cpu().double().t()
    assert torch.equal(together, sums.float() * linear.arrays()["scales"].cpu())
    assert torch.equal(together, torch.cat([linear(Rows(moved.values[i : i + 1], None)).cpu() for i in range(40)]))


def test_int8_products_are_those_of_the_processors_library() -> None:
    weight = torch.from_numpy(weights(64, 128))
    rows = quantize_rows(rows_of(7, 128))
    ours = WholeLinear.of("w", weight, torch.device("cpu"))(rows)
    torch.testing.assert_close(ours, Int8Linear.of("w", weight)(rows), rtol=1e-6, atol=0)


SUMS = """
import torch
from inference.kernels.base import Rows
from inference.model.linear import Int8Linear

generator = torch.Generator().manual_seed(0)
for count in (1, 2, 7, 64):
    levels = torch.randint(-127, 128, (64, 4096), generator=generator).to(torch.int8)
    values = torch.randint(-127, 128, (count, 4096), generator=generator).to(torch.int8)
    levels[0], values[0] = 127, 127  # the largest sum that there is
    levels[1] = -127
    linear = Int8Linear(levels.clone(), torch.ones(64))
    product = linear(Rows(values, torch.ones(count, 1)))
    exact = values.long() @ levels.long().T
    # Where the sum is made of two, each is rounded to 24 bits; what is cut off is missing by millions.
    torch.testing.assert_close(product.double(), exact.double(), rtol=2e-7, atol=4.0)
"""


@pytest.mark.parametrize("instructions", ["DEFAULT", "AVX512_CORE_VNNI", "AVX512_CORE", "AVX2", "SSE41"])
def test_no_sum_of_bytes_is_cut_off_whatever_the_processor_has_for_them(instructions: str) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    ended = subprocess.run([sys.executable, "-c", SUMS], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    weight = torch.zeros((16, 64))
    weight[3, 5] = torch.nan
    with pytest.raises(QuantizationError, match=r"layers\.0\.q"):
        WholeLinear.of("layers.0.q", weight, torch.device("cpu"))


@pytest.mark.parametrize(
    ("rows", "columns", "group", "fits"),
    [(64, 256, 32, True), (64, 256, 16, False), (24, 256, 32, False), (64, 48, 32, False), (16, 32, 32, True)],
)
def test_shapes_that_the_kernels_do_not_take_are_told(rows: int, columns: int, group: int, fits: bool) -> None:
    assert fits_int4(rows, columns, group) is fits


def test_stacked_matrices_keep_their_weights() -> None:
    parts = [quantize("w", weights(8, 64, seed), "int4", 32) for seed in range(3)]
    whole = stacked_groups(parts, 2.0)
    assert whole is not None
    np.testing.assert_allclose(dequantize(whole), np.concatenate([dequantize(part) for part in parts]) * 2, rtol=1e-6)
    assert stacked_groups([parts[0], quantize("w", weights(8, 64), "int4", 64)]) is None

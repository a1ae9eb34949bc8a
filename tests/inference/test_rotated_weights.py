"""4-bit weights that the kernels expand to int8 levels: the form, its error, and the products that take it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from inference.errors import QuantizationError
from inference.kernels.base import Rows
from inference.kernels.native import KernelsUnavailable, NativeKernels
from inference.kernels.reference import ReferenceKernels
from inference.model.config import DecoderConfig
from inference.quant import groupwise
from inference.quant.gptq import quantize_rotated_by_moments
from inference.quant.groupwise import pack_int4, unpack_int4
from inference.quant.rotated import (
    RotatedTensor,
    dequantize_rotated,
    fits,
    quantize_rotated,
    stacked,
    tensor_levels,
)
from inference.weights.importer import import_model
from inference.weights.store import StoreReader


def random_tensor(rows: int, columns: int, group_size: int, seed: int = 0) -> RotatedTensor:
    """Any bits that the form allows, not only those that a quantization gives."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, 256, (rows, columns // group_size), dtype=np.uint8)
    highest = 127 - steps.astype(np.int64) * 15 // 16
    offsets = rng.integers(-128, highest + 1).astype(np.int8)
    values = pack_int4(rng.integers(0, 16, (rows, columns), dtype=np.uint8))
    return RotatedTensor(group_size, values, steps, offsets, rng.random(rows, dtype=np.float32) + np.float32(0.1))


def native(config: DecoderConfig) -> NativeKernels:
    try:
        kernels = NativeKernels(config, "int8")
    except KernelsUnavailable as error:
        pytest.skip(f"no compiled kernels here: {error}")
    return kernels


@pytest.fixture
def config(tiny_store: Path) -> DecoderConfig:
    return StoreReader(tiny_store).manifest.config


@pytest.mark.parametrize("group_size", [32, 64, 128])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_level_is_the_documented_formula(group_size: int, seed: int) -> None:
    tensor = random_tensor(3, 128, group_size, seed)
    q = unpack_int4(tensor.values)
    expected = [
        [
            int(q[n, k]) * int(tensor.steps[n, k // group_size]) // 16 + int(tensor.offsets[n, k // group_size])
            for k in range(128)
        ]
        for n in range(3)
    ]
    assert tensor_levels(tensor).tolist() == expected
    turned = np.kron(np.eye(2), hadamard(64))  # by scipy: its own inverse but for the block's size
    expected_weights = (np.array(expected) * tensor.scales[:, None]) @ turned
    assert np.allclose(dequantize_rotated(tensor), expected_weights, rtol=1e-4, atol=1e-2)


def test_the_error_is_that_of_plain_groups_and_less_where_there_are_outliers() -> None:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((128, 512)).astype(np.float32)
    outliers = plain.copy()
    outliers[:, ::37] *= 12
    for weights, at_most in ((plain, 1.02), (outliers, 0.75)):
        ours = np.square(dequantize_rotated(quantize_rotated("w", weights)) - weights).mean()
        theirs = np.square(groupwise.dequantize(groupwise.quantize("w", weights, "int4")) - weights).mean()
        assert ours < at_most**2 * theirs


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-20, 20))
def test_no_rotated_weight_moves_further_than_its_groups_clipping_and_rounding(seed: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((4, 128)) * 10.0**exponent).astype(np.float32)
    tensor = quantize_rotated("w", weights)
    rotated = weights.astype(np.float64).reshape(-1, 64) @ hadamard(64) / 64
    found = tensor_levels(tensor) * tensor.scales[:, None].astype(np.float64)
    spans = np.ptp(rotated.reshape(4, -1, 32), axis=2).repeat(32, axis=1)
    assert (np.abs(found - rotated.reshape(4, 128)) <= 0.12 * spans + 1.1 * tensor.scales[:, None]).all()


def test_constant_and_zero_rows_come_back() -> None:
    weights = np.zeros((3, 64), dtype=np.float32)
    weights[1] = 0.5
    weights[2, 0] = 1e-38
    back = dequantize_rotated(quantize_rotated("w", weights))
    assert np.allclose(back, weights, atol=0.02)
    assert (back[0] == 0).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named_by_place(wrong: float) -> None:
    weights = np.ones((300, 64), dtype=np.float32)
    weights[259, 7] = wrong
    with pytest.raises(QuantizationError, match=r"layers\.1\.up.*row 259, column 7"):
        quantize_rotated("layers.1.up", weights)


def test_a_row_beyond_float32_and_one_of_no_whole_blocks_are_named() -> None:
    with pytest.raises(QuantizationError, match=r"w: spans more than float32 holds at row 1"):
        quantize_rotated("w", np.full((2, 64), [[1.0], [3e38]], dtype=np.float32))
    with pytest.raises(QuantizationError, match="want a multiple of 64 columns"):
        quantize_rotated("w", np.ones((2, 96), dtype=np.float32))
    assert fits(192, 64)
    assert not fits(192, 128)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_products_are_those_of_the_levels_in_any_number_of_rows(config: DecoderConfig, group_size: int) -> None:
    # 5 outputs beyond a panel, and rows around every border between ways of computing.
    tensor = random_tensor(53, 384, group_size)
    kernels = native(config)
    product = kernels.linear("w", tensor)
    levels = tensor_levels(tensor).astype(np.int64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((300, 384), generator=generator)
    rows = kernels.norm(x, torch.ones(384))
    whole = product(rows)
    values = rows.values[:, :384].numpy().astype(np.int64) - (128 if rows.values.dtype == torch.uint8 else 0)
    expected = (values @ levels.T).astype(np.float32) * tensor.scales
    assert np.array_equal(whole.numpy(), expected)
    for count in (1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 50, 63, 64, 65, 70, 129, 300):
        some = Rows(rows.values[:count], None if rows.scales is None else rows.scales[:count])
        assert torch.equal(product(some), whole[:count])
    reference = ReferenceKernels(config, "int8").linear("w", tensor)
    assert torch.equal(reference(Rows(torch.from_numpy(values.astype(np.int8)), rows.scales)), whole)


def test_a_product_lies_over_the_memory_it_is_given_and_is_as_large_as_foretold(config: DecoderConfig) -> None:
    kernels = native(config)
    for tensor, group in ((random_tensor(53, 384, 64), 64), (torch.randn((53, 384)), 0)):
        product = kernels.linear("w", tensor)
        assert product.nbytes == kernels.linear_nbytes(53, 384, rotated_group=group)
        copies = {name: array.clone() for name, array in product.arrays().items()}
        rows = kernels.norm(torch.randn((7, 384)), torch.ones(384))
        assert torch.equal(kernels.bound(product.form, copies)(rows), product(rows))
        for array in copies.values():
            array.zero_()
        assert not product.over(copies)(rows).any()


def test_matrices_are_stacked_where_their_groups_agree() -> None:
    first, second = random_tensor(16, 128, 32), random_tensor(8, 128, 32, seed=1)
    both = stacked([first, second], 0.5)
    assert both is not None
    assert np.array_equal(tensor_levels(both), np.concatenate([tensor_levels(first), tensor_levels(second)]))
    assert np.array_equal(both.scales, np.concatenate([first.scales, second.scales]) * np.float32(0.5))
    assert stacked([first, random_tensor(8, 128, 64)]) is None


def test_a_store_keeps_the_tensors_it_was_given(tiny_folder: Path, tmp_path: Path) -> None:
    manifest = import_model(tiny_folder, tmp_path / "store", quantize="int4")
    assert manifest.quantization["scheme"] == "int4-rotated group 32"
    reader = StoreReader(tmp_path / "store")
    original = StoreReader(tmp_path / "wide" if import_model(tiny_folder, tmp_path / "wide") else tmp_path)
    stored = reader.tensor("layers.0.down")
    assert isinstance(stored, RotatedTensor)
    again = quantize_rotated("w", original.float32("layers.0.down"))
    assert np.array_equal(tensor_levels(stored), tensor_levels(again))
    # Another store of it keeps them, at the same precision, without a second loss.
    import_model(tmp_path / "store", tmp_path / "again", quantize="int4")
    assert StoreReader(tmp_path / "again").manifest.tensor("layers.0.down").encoding == "int4-rotated"
    import_model(tmp_path / "store", tmp_path / "bf16", quantize="bf16")
    wide = StoreReader(tmp_path / "bf16").float32("layers.0.down")
    assert np.allclose(wide, dequantize_rotated(stored), rtol=2**-8)


def test_rounding_by_moments_loses_less_of_the_outputs() -> None:
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((128, 128))
    inputs = rng.standard_normal((2000, 128)) @ mixing
    weights = rng.standard_normal((64, 128)).astype(np.float32)
    moments = (inputs.T @ inputs).astype(np.float32)
    outputs = inputs @ weights.T

    def loss(tensor: RotatedTensor) -> float:
        return float(np.square(inputs @ dequantize_rotated(tensor).T - outputs).mean())

    assert loss(quantize_rotated_by_moments("w", weights, moments)) < 0.6 * loss(quantize_rotated("w", weights))

"""Group-wise quantization, and GGUF's blocks taken over without a second loss."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from inference.errors import QuantizationError
from inference.quant.blocks import take_over
from inference.quant.groupwise import dequantize, pack_int4, quantize, unpack_int4
from inference.weights.gguf import GGUFFile
from inference.weights.sources import GGUFSource


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_taken_over_dequantize_to_what_the_gguf_library_says(kind: str) -> None:
    rng = np.random.default_rng(5)
    weights = rng.normal(size=(24, 96)).astype(np.float32)
    weights[3, :32] = 0.0
    weights[4, 32:64] = 1.5
    raw = gguf.quantize(weights, GGMLQuantizationType[kind])
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    taken = take_over(kind, np.ascontiguousarray(raw).reshape(-1), 24, 96)  # type: ignore[arg-type]
    assert taken.scheme == ("int8" if kind == "Q8_0" else "int4")
    assert np.array_equal(dequantize(taken), expected)


def test_every_matrix_of_the_real_file_is_taken_over_exactly(smollm2_gguf: Path) -> None:
    source = GGUFSource(smollm2_gguf)
    library = {tensor.name: tensor for tensor in gguf.GGUFReader(str(smollm2_gguf)).tensors}
    for ours, theirs, shape in [
        ("layers.0.o", "blk.0.attn_output.weight", (576, 576)),
        ("layers.17.down", "blk.17.ffn_down.weight", (576, 1536)),
        ("embedding", "token_embd.weight", (49152, 576)),
    ]:
        tensor = library[theirs]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        weights = source.load(ours, shape)
        assert np.array_equal(dequantize(weights), expected)  # type: ignore[arg-type]


def test_query_rows_come_in_half_rotation_order(smollm2_gguf: Path) -> None:
    source = GGUFSource(smollm2_gguf)
    tensor = GGUFFile(smollm2_gguf).tensor("blk.0.attn_k.weight", (192, 576))
    paired = gguf.dequantize(GGUFFile(smollm2_gguf).raw(tensor).reshape(192, -1), GGMLQuantizationType.Q4_1)
    ours = dequantize(source.load("layers.0.k", (192, 576)))  # type: ignore[arg-type]
    # llama.cpp puts rows i and i + 32 of a head of 64 next to each other.
    for head in range(3):
        for i in range(32):
            assert np.array_equal(ours[64 * head + i], paired[64 * head + 2 * i])
            assert np.array_equal(ours[64 * head + 32 + i], paired[64 * head + 2 * i + 1])


@given(
    scheme=st.sampled_from(["int4", "int8"]),
    group_size=st.sampled_from([32, 64]),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-12, 4),
)
def test_no_weight_moves_further_than_half_a_step(scheme: str, group_size: int, seed: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.normal(size=(3, 128)) * 10.0**exponent).astype(np.float32)
    tensor = quantize("w", weights, scheme, group_size)  # type: ignore[arg-type]
    step = np.repeat(tensor.scales.astype(np.float64), group_size, axis=1)
    reach = np.abs(weights).max()
    # Half a step, and what rounding scale and minimum to float16 (11 bits) may move the ends of the range by.
    assert (np.abs(dequantize(tensor) - weights) <= 0.5 * step + 2 * reach * 2.0**-10).all()


def test_constant_and_zero_groups_come_back_as_they_were() -> None:
    weights = np.zeros((2, 64), dtype=np.float32)
    weights[1, :32] = 0.25
    for scheme in ("int4", "int8"):
        back = dequantize(quantize("w", weights, scheme))
        assert np.isfinite(back).all()
        assert np.array_equal(back, weights)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_rejected_by_name_and_place(wrong: float) -> None:
    weights = np.ones((4, 32), dtype=np.float32)
    weights[2, 7] = wrong
    with pytest.raises(QuantizationError, match=r"layers\.3\.down.*row 2, column 7"):
        quantize("layers.3.down", weights, "int4")


@given(st.integers(0, 2**32 - 1))
def test_packing_int4_is_reversible(seed: int) -> None:
    levels = np.random.default_rng(seed).integers(0, 16, size=(5, 64), dtype=np.uint8)
    assert np.array_equal(unpack_int4(pack_int4(levels)), levels)

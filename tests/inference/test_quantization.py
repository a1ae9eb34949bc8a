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
from inference.quant.blocks import BLOCK_BYTES, take_over
from inference.quant.groupwise import check_finite, dequantize, fitting_group, pack_int4, quantize, unpack_int4
from inference.weights.gguf import TENSOR_TYPES, GGUFFile
from inference.weights.sources import GGUFSource
from inference.weights.store import bfloat16_to_float32


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_taken_over_dequantize_to_what_the_gguf_library_says(kind: str) -> None:
    rng = np.random.default_rng(5)
    weights = rng.normal(size=(24, 96)).astype(np.float32)
    weights[3, :32] = 0.0
    weights[4, 32:64] = 1.5
    raw = gguf.quantize(weights, GGMLQuantizationType[kind])
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    taken = take_over(kind, np.ascontiguousarray(raw).reshape(-1), 24, 96)
    assert taken.scheme == ("int8" if kind == "Q8_0" else "int4")
    assert np.array_equal(dequantize(taken), expected)


# Type, scheme, group size, and where its float16 factors lie within a block (ggml-common.h).
SUPERBLOCK_TYPES = [
    ("Q5_0", "int8", 32, [0]),
    ("Q5_1", "int8", 32, [0, 2]),
    ("Q2_K", "int4", 16, [80, 82]),
    ("Q3_K", "int4", 16, [108]),
    ("Q4_K", "int4", 32, [0, 2]),
    ("Q5_K", "int8", 32, [0, 2]),
    ("Q6_K", "int8", 16, [208]),
    ("IQ4_NL", "int8", 32, [0]),
    ("IQ4_XS", "int8", 32, [0]),
]


def random_blocks(kind: str, rows: int, columns: int, factors: list[int], rng: np.random.Generator) -> np.ndarray:
    """Blocks of random bits in every field, but factors that are finite: uint8 [rows, bytes of a row]."""
    weights, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, size=(rows * columns // weights, size), dtype=np.uint8)
    for at in factors:
        values = (rng.normal(size=len(blocks)) * 10.0 ** rng.integers(-6, 2, size=len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize(("kind", "scheme", "group_size", "factors"), SUPERBLOCK_TYPES)
def test_every_bit_pattern_of_a_superblock_dequantizes_to_what_the_gguf_library_says(
    kind: str, scheme: str, group_size: int, factors: list[int]
) -> None:
    raw = random_blocks(kind, 12, 512, factors, np.random.default_rng(7))
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    taken = take_over(kind, raw.reshape(-1), 12, 512)
    assert (taken.scheme, taken.group_size) == (scheme, group_size)
    assert np.array_equal(dequantize(taken), expected)


def test_a_tensor_of_many_superblocks_is_taken_over_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_K", 6, 512, [0, 2], np.random.default_rng(8))
    whole = take_over("Q4_K", raw.reshape(-1), 6, 512)
    monkeypatch.setattr("inference.quant.superblocks._CHUNK_WEIGHTS", 5 * 256)
    pieces = take_over("Q4_K", raw.reshape(-1), 6, 512)
    assert np.array_equal(dequantize(whole), dequantize(pieces))


def gguf_file_of(path: Path, kind: str, raw: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("w", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [kind.name for kind in GGMLQuantizationType if kind.name in TENSOR_TYPES.values()])
def test_every_type_that_is_read_has_the_size_that_the_gguf_library_says(kind: str, tmp_path: Path) -> None:
    weights, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.zeros((3, 512 // weights * size), dtype=np.uint8)
    if kind in ("F32", "F16", "BF16"):
        raw = np.zeros((3, 512), dtype=np.float32 if kind == "F32" else np.float16)
    file = GGUFFile(gguf_file_of(tmp_path / "one.gguf", kind, raw))
    tensor = file.tensor("w", (3, 512))
    assert tensor.nbytes == raw.nbytes
    if kind not in BLOCK_BYTES:
        assert file.floats(tensor).shape == (3, 512)


def test_types_without_a_group_of_their_own_come_in_bfloat16(tmp_path: Path) -> None:
    weights = np.random.default_rng(9).normal(size=(4, 512)).astype(np.float32)
    raw = gguf.quantize(weights, GGMLQuantizationType.TQ2_0)
    file = GGUFFile(gguf_file_of(tmp_path / "ternary.gguf", "TQ2_0", raw))
    found = bfloat16_to_float32(file.floats(file.tensor("w", (4, 512))))
    expected = gguf.dequantize(raw, GGMLQuantizationType.TQ2_0)
    # bfloat16 has 8 significant bits.
    assert np.abs(found - expected).max() <= np.abs(expected).max() * 2.0**-9
    assert np.count_nonzero(found) == np.count_nonzero(expected) > 0


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
    group_size=st.sampled_from([32, 64, 128]),
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


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_an_outlier_costs_only_its_own_group(scheme: str) -> None:
    weights = np.random.default_rng(3).normal(size=(2, 96)).astype(np.float32)
    calm = dequantize(quantize("w", weights, scheme))  # type: ignore[arg-type]
    weights[0, 40] = 3000.0
    wild = dequantize(quantize("w", weights, scheme))  # type: ignore[arg-type]
    others = np.ones((2, 96), dtype=bool)
    others[0, 32:64] = False
    assert np.array_equal(calm[others], wild[others])
    # The top of the range is kept to half a step of float16 rounding: 11 bits of 15 or 255 steps.
    assert wild[0, 40] == pytest.approx(3000.0, rel=2.0**-9)


@pytest.mark.parametrize("scheme", ["int4", "int8"])
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 6e-8, 6e-5, 6.5e4, 1e30, 1.5e38])
def test_weights_of_any_size_that_float32_holds_come_back(scheme: str, size: float) -> None:
    shape = np.linspace(-1.0, 1.0, 32, dtype=np.float64)
    weights = (shape * size).astype(np.float32).reshape(1, 32)
    tensor = quantize("w", weights, scheme)  # type: ignore[arg-type]
    back = dequantize(tensor).astype(np.float64)
    assert np.isfinite(back).all()
    steps = 15 if scheme == "int4" else 255
    # Half a step, float16's rounding where it is used, and the smallest number of float32 at the other end.
    assert np.abs(back - weights).max() <= size / steps + size * 2.0**-9 + steps * 1.5e-45


def test_a_range_beyond_float32_is_named() -> None:
    weights = np.ones((3, 64), dtype=np.float32)
    weights[1, 33], weights[1, 60] = 3e38, -3e38
    with pytest.raises(QuantizationError, match=r"layers\.0\.q.*row 1, columns 32 to 63"):
        quantize("layers.0.q", weights, "int8")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_taken_over_blocks_that_are_not_finite_are_named(wrong: float) -> None:
    raw = gguf.quantize(np.ones((4, 64), dtype=np.float32), GGMLQuantizationType.Q4_1)
    raw[2, 20:22] = np.array([wrong], dtype=np.float16).view(np.uint8)  # the second block's scale
    with pytest.raises(QuantizationError, match=r"layers\.1\.up.*scale.*row 2, columns 32 to 63"):
        check_finite("layers.1.up", take_over("Q4_1", raw.reshape(-1), 4, 64))


def test_rows_get_the_largest_group_that_divides_them() -> None:
    assert [fitting_group(576, wanted) for wanted in (128, 64, 32)] == [64, 64, 32]
    assert fitting_group(1536, 128) == 128
    assert fitting_group(48, 64) == 16
    assert fitting_group(100, 64) == 64  # which `quantize` then refuses by name
    with pytest.raises(QuantizationError, match="groups of 64"):
        quantize("w", np.ones((1, 100), dtype=np.float32), "int4", 64)


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

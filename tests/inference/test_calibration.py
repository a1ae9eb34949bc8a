"""Rounding by calibration: GPTQ against its definition, and the moments against transformers' own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import CalibrationError, QuantizationError, StoreError
from inference.quant.calibration import Calibration
from inference.quant.gptq import DAMPING, quantize_by_moments
from inference.quant.groupwise import GroupwiseTensor, dequantize, quantize, unpack_int4
from inference.scoring import Scorer
from inference.weights import StoreManifest, import_model, verify_store
from inference.weights.store import StoreReader

TEXT = "The gate at the top of the pipe decides how much water reaches the wheel. 水門開得慢,水輪轉得穩。\n" * 4


def correlated(columns: int, samples: int, seed: int) -> np.ndarray:
    """Inputs [samples, columns] whose columns are mixtures of one another, a few of them far larger than the rest."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(samples, columns)) @ rng.normal(size=(columns, columns)) / columns**0.5
    inputs[:, rng.integers(0, columns, size=max(1, columns // 16))] *= 12.0
    return inputs.astype(np.float32)


def output_error(inputs: np.ndarray, weights: np.ndarray, tensor: GroupwiseTensor) -> float:
    return float(np.square(inputs @ (dequantize(tensor) - weights).T).sum())


def levels_by_definition(weights: np.ndarray, moments: np.ndarray, tensor: GroupwiseTensor) -> np.ndarray:
    """Optimal brain quantization (arXiv 2208.11580, equation 2), column by column, inverting anew for each column."""
    scales = np.repeat(tensor.scales.astype(np.float64), tensor.group_size, axis=1)
    assert tensor.minima is not None
    minima = np.repeat(tensor.minima.astype(np.float64), tensor.group_size, axis=1)
    hessian = moments.astype(np.float64) + DAMPING * np.diag(moments).mean() * np.eye(len(moments))
    order = list(np.argsort(-np.diag(moments), kind="stable"))
    left = weights.astype(np.float64)
    levels = np.zeros(weights.shape)
    while order:
        inverse = np.linalg.inv(hessian[np.ix_(order, order)])
        column = order[0]
        levels[:, column] = np.clip(np.rint((left[:, column] - minima[:, column]) / scales[:, column]), 0, 15)
        error = left[:, column] - (levels[:, column] * scales[:, column] + minima[:, column])
        left[:, order] -= np.outer(error / inverse[0, 0], inverse[0])
        order = order[1:]
    return levels


def test_levels_are_those_of_the_definition() -> None:
    weights = np.random.default_rng(1).normal(size=(6, 160)).astype(np.float32)
    inputs = correlated(160, 400, seed=2)
    moments = inputs.T @ inputs
    tensor = quantize_by_moments("w", weights, moments, "int4", 32)
    expected = levels_by_definition(weights, moments, tensor)
    # float32 sums may turn a level that lies at the border of two; after it the others differ too, so look at rows.
    same = (unpack_int4(tensor.values) == expected).all(axis=1)
    assert same.sum() >= 5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scheme=st.sampled_from(["int4", "int8"]))
def test_the_outputs_change_less_than_by_nearest_rounding(seed: int, scheme: Any) -> None:
    weights = np.random.default_rng(seed).normal(size=(24, 64)).astype(np.float32)
    inputs = correlated(64, 256, seed)
    calibrated = quantize_by_moments("w", weights, inputs.T @ inputs, scheme, 32)
    assert output_error(inputs, weights, calibrated) < output_error(inputs, weights, quantize("w", weights, scheme, 32))


def test_inputs_that_never_come_and_constant_groups_do_no_harm() -> None:
    weights = np.random.default_rng(4).normal(size=(8, 96)).astype(np.float32)
    weights[2, 32:64] = 0.75
    inputs = correlated(96, 200, seed=5)
    inputs[:, 10] = 0.0
    inputs[:, 64:] = inputs[:, :32]  # the same inputs twice
    tensor = quantize_by_moments("w", weights, inputs.T @ inputs, "int4", 32)
    back = dequantize(tensor)
    assert np.isfinite(back).all()
    assert (back[2, 32:64] == 0.75).all()
    nothing = quantize_by_moments("w", weights, np.zeros((96, 96), dtype=np.float32), "int4", 32)
    # An expert that no token reached: what is left is a plain choice of the nearest level.
    assert (
        np.abs(dequantize(nothing) - weights).max()
        <= 1.01 * np.abs(dequantize(quantize("w", weights, "int4")) - weights).max()
    )


def test_moments_that_fit_not_are_refused_by_name() -> None:
    weights = np.ones((2, 32), dtype=np.float32)
    for moments in (np.full((32, 32), np.nan), np.eye(31)):
        with pytest.raises(QuantizationError, match=r"layers\.0\.o.*moments"):
            quantize_by_moments("layers.0.o", weights, moments, "int4", 32)
    weights[1, 3] = np.nan
    with pytest.raises(QuantizationError, match="row 1, column 3"):
        quantize_by_moments("w", weights, np.eye(32), "int4", 32)


@pytest.fixture(scope="module")
def chat_folder(
    smollm2_store: Path, save_chat_model: Callable[[Path, Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("calibration") / "model"
    return folder, save_chat_model(folder, smollm2_store)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.txt"
    file.write_text(TEXT, "utf-8")
    return file


@pytest.mark.parametrize("room", [2**30, 1])
def test_the_moments_are_those_of_the_layers_inputs(
    chat_folder: tuple[Path, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("inference.quant.calibration.MOMENTS_BYTES", room)
    folder, model = chat_folder
    import_model(folder, tmp_path / "store")
    calibration = Calibration(tmp_path / "store", text)
    tokenizer = Scorer.load(tmp_path / "store", compute="fp32").tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[0]
    modules = {
        "q": layer.self_attn.q_proj,
        "o": layer.self_attn.o_proj,
        "up": layer.mlp.up_proj,
        "down": layer.mlp.down_proj,
    }
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0][0]}))
        for name, module in modules.items()
    ]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    for name in ("q", "k", "o", "up", "gate", "down"):
        inputs = seen[{"k": "q", "gate": "up"}.get(name, name)]
        expected = (inputs.T @ inputs).numpy()
        found = calibration.moments(f"layers.0.{name}")
        assert found is not None
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert calibration.moments("embedding") is None
    assert calibration.facts["tokens"] == len(ids)


def test_a_calibrated_import_says_so_and_changes_outputs_less(
    chat_folder: tuple[Path, Any], text: Path, tmp_path: Path
) -> None:
    folder, _ = chat_folder
    kept = tmp_path / "kept"
    import_model(folder, kept)
    plain = import_model(folder, tmp_path / "plain", quantize="int4", group_size=64)
    calibrated = import_model(folder, tmp_path / "calibrated", quantize="int4", group_size=64, calibrate=text)
    verify_store(tmp_path / "calibrated")
    assert calibrated.quantization["calibration"]["method"] == "gptq"
    assert "calibration" not in plain.quantization
    assert calibrated.digest != plain.digest
    moments = Calibration(kept, text)
    exact, nearest, rounded = (StoreReader(tmp_path / name) for name in ("kept", "plain", "calibrated"))
    for name in ("q", "v", "o", "gate", "down"):
        tensor = f"layers.0.{name}"
        hessian = moments.moments(tensor)
        errors = []
        for reader in (rounded, nearest):
            change = reader.float32(tensor) - exact.float32(tensor)
            errors.append(float(np.einsum("nk,kl,nl->", change, hessian, change, optimize=True)))
        assert errors[0] < errors[1], name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibrated", "calibration.txt", "kept", "plain"]


def test_a_text_that_does_not_serve_is_refused_and_leaves_nothing(
    chat_folder: tuple[Path, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    folder, _ = chat_folder
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe")
    for source, calibrate, message in [
        (folder, empty, "0 tokens"),
        (folder, binary, r"binary\.txt.*UTF-8"),
        (folder, tmp_path / "absent.txt", r"absent\.txt"),
        (tiny_folder, empty, "no tokenizer"),
    ]:
        with pytest.raises(CalibrationError, match=message):
            import_model(source, tmp_path / "store", quantize="int4", calibrate=calibrate)
    with pytest.raises(CalibrationError, match="quantize is 'keep'"):
        import_model(folder, tmp_path / "store", calibrate=empty)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary.txt", "empty.txt"]


def test_a_source_that_is_quantized_already_is_not_called_calibrated(
    chat_folder: tuple[Path, Any], text: Path, tmp_path: Path
) -> None:
    folder, _ = chat_folder
    import_model(folder, tmp_path / "four", quantize="int4", group_size=64)
    with pytest.raises(CalibrationError, match="four is quantized already"):
        import_model(tmp_path / "four", tmp_path / "store", quantize="int4", calibrate=text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.txt", "four"]


def test_a_store_is_imported_again_at_another_precision(tiny_folder: Path, tmp_path: Path) -> None:
    import_model(tiny_folder, tmp_path / "wide")
    direct = import_model(tiny_folder, tmp_path / "direct", quantize="int8", group_size=64)
    again = import_model(tmp_path / "wide", tmp_path / "again", quantize="int8", group_size=64)
    assert [file.sha256 for file in again.files] == [file.sha256 for file in direct.files]
    assert again.source_digest == StoreManifest.load(tmp_path / "wide").digest
    # What is quantized already is taken over as it is.
    kept = import_model(tmp_path / "again", tmp_path / "kept")
    assert [file.sha256 for file in kept.files] == [file.sha256 for file in again.files]
    with pytest.raises(StoreError, match="exists already"):
        import_model(tmp_path / "wide", tmp_path / "again", quantize="int8")

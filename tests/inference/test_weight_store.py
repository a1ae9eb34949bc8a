"""The weight store: whole or not at all, and every byte accounted for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inference.errors import ModelFormatError, QuantizationError, StoreError
from inference.weights import StoreManifest, import_model, verify_store
from inference.weights.gguf import GGUFFile
from inference.weights.safetensors_folder import read_header
from inference.weights.store import PAGE_BYTES, StoreReader, bfloat16_to_float32, float32_to_bfloat16


def test_the_manifest_says_what_the_model_is(smollm2_store: Path) -> None:
    manifest = StoreManifest.load(smollm2_store)
    assert manifest.parameters == 134_515_008
    assert manifest.licence == "apache-2.0"
    assert manifest.source_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert manifest.quantization["weights_by_encoding"] == {"int4 group 32": 106_168_320, "int8 group 32": 28_311_552}
    assert (manifest.config.layers, manifest.config.heads, manifest.config.kv_heads) == (30, 9, 3)
    assert len([file for file in manifest.files if file.name.startswith("layer_")]) == 30
    assert all(file.bytes % PAGE_BYTES == 0 for file in manifest.files if file.name.endswith(".bin"))
    assert verify_store(smollm2_store).digest == manifest.digest


def test_the_same_source_gives_the_same_digest(tiny_folder: Path, tmp_path: Path) -> None:
    first = import_model(tiny_folder, tmp_path / "first")
    second = import_model(tiny_folder, tmp_path / "second")
    other = import_model(tiny_folder, tmp_path / "third", quantize="int4")
    assert first.digest == second.digest != other.digest


def test_weights_survive_the_round_trip(tiny_folder: Path, tmp_path: Path) -> None:
    import_model(tiny_folder, tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    from safetensors.numpy import load_file

    theirs = load_file(tiny_folder / "model.safetensors")
    assert np.array_equal(reader.float32("embedding"), theirs["model.embed_tokens.weight"])
    assert np.array_equal(reader.float32("layers.2.q"), theirs["model.layers.2.self_attn.q_proj.weight"])
    assert np.array_equal(reader.float32("head"), theirs["lm_head.weight"])


@pytest.mark.parametrize("where", ["layer_001.bin", "embedding.bin", "head.bin"])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999999])
def test_a_flipped_byte_is_found_and_named(tiny_folder: Path, tmp_path: Path, where: str, place: float) -> None:
    store = tmp_path / "store"
    import_model(tiny_folder, store, quantize="int8")
    data = bytearray((store / where).read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x10
    (store / where).write_bytes(data)
    with pytest.raises(StoreError, match=where):
        verify_store(store)


def test_a_changed_manifest_and_a_short_or_missing_file_are_found(tiny_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    import_model(tiny_folder, store)
    manifest = (store / "manifest.json").read_text("utf-8")
    (store / "manifest.json").write_text(manifest.replace('"max_context": 512', '"max_context": 513'), "utf-8")
    with pytest.raises(StoreError, match=r"manifest\.json.*digest"):
        StoreManifest.load(store)
    (store / "manifest.json").write_text(manifest, "utf-8")
    (store / "layer_000.bin").write_bytes((store / "layer_000.bin").read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"layer_000\.bin.*bytes"):
        verify_store(store)
    with pytest.raises(StoreError, match=r"layer_000\.bin.*bytes"):
        StoreReader(store).float32("layers.0.q")
    (store / "layer_000.bin").unlink()
    with pytest.raises(StoreError, match=r"layer_000\.bin.*missing"):
        verify_store(store)


@pytest.mark.parametrize("share", [0.00000001, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_gguf_is_refused_and_leaves_nothing(smollm2_gguf: Path, tmp_path: Path, share: float) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as source:
        cut.write_bytes(source.read(int(share * smollm2_gguf.stat().st_size)))
    with pytest.raises(ModelFormatError) as caught:
        import_model(cut, tmp_path / "store")
    assert "cut.gguf" in str(caught.value)
    assert "byte" in str(caught.value) or "tensor" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


def test_a_gguf_that_claims_huge_sizes_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    with smollm2_gguf.open("rb") as source:
        head = bytearray(source.read(4096))
    strange = tmp_path / "strange.gguf"
    for offset, message in [(4, "version"), (24, "claims"), (0, "starts with")]:
        data = bytearray(head)
        data[offset : offset + 4] = b"\xff\xff\xff\x7f"
        strange.write_bytes(data)
        with pytest.raises(ModelFormatError, match=message):
            GGUFFile(strange)


def test_malformed_safetensors_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for data, message in [
        (whole[: len(whole) // 2], "truncated"),
        (whole[:4], "too few"),
        ((2**60).to_bytes(8, "little") + whole[8:], "claims a header"),
        (whole[:8] + b"}" + whole[9:], "not JSON"),
    ]:
        weights.write_bytes(data)
        with pytest.raises(ModelFormatError, match=message):
            read_header(weights)
        with pytest.raises(ModelFormatError):
            import_model(folder, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_pickles_are_never_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="pickle"):
        import_model(folder, tmp_path / "store")


def test_nan_weights_are_rejected_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(QuantizationError, match=r"layers\.1\.up"):
        import_model(folder, tmp_path / "store", quantize="int4")
    assert not (tmp_path / "store").exists()


def test_a_full_disk_leaves_nothing_behind(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the operating system's answer is stood in for: a disk that is really full is not to be had in a test.
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="disk is full"):
        import_model(tiny_folder, tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_store_is_never_overwritten(tiny_folder: Path, tmp_path: Path) -> None:
    import_model(tiny_folder, tmp_path / "store")
    with pytest.raises(StoreError, match="exists already"):
        import_model(tiny_folder, tmp_path / "store")
    verify_store(tmp_path / "store")


def test_progress_reaches_the_whole(tiny_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = import_model(tiny_folder, tmp_path / "store", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (manifest.parameters, manifest.parameters)
    assert seen == sorted(seen)


def test_bfloat16_rounds_like_torch() -> None:
    import torch

    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(bfloat16_to_float32(float32_to_bfloat16(values)), expected)


def test_the_web_process_can_use_types_tokenizer_and_manifest_without_torch() -> None:
    code = (
        "import sys, inference, inference.request, inference.tokenizer, inference.weights; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_same_weights_under_another_name_have_the_same_digest(
    tiny_folder: Path, smollm2_gguf: Path, smollm2_store: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "renamed")
    first = import_model(tiny_folder, tmp_path / "first")
    second = import_model(tmp_path / "renamed", tmp_path / "second")
    assert (first.source_name, second.source_name) == ("model", "renamed")
    assert first.digest == second.digest
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(smollm2_gguf, folder / "weights.gguf")
    assert import_model(folder / "weights.gguf", tmp_path / "third").digest == StoreManifest.load(smollm2_store).digest


def test_a_store_of_the_first_format_is_still_read_and_checked(tiny_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    import_model(tiny_folder, store)
    values = json.loads((store / "manifest.json").read_text("utf-8"))
    values.pop("digest")
    values["format_version"] = 1
    # The first version's digest: SHA-256 of the canonical JSON of everything else, the names among it.
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    values["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    (store / "manifest.json").write_text(json.dumps(values), "utf-8")
    assert verify_store(store).digest == values["digest"]
    values["source_name"] = "another"
    (store / "manifest.json").write_text(json.dumps(values), "utf-8")
    with pytest.raises(StoreError, match="digest"):
        StoreManifest.load(store)
    values["format_version"] = 4
    (store / "manifest.json").write_text(json.dumps(values), "utf-8")
    with pytest.raises(StoreError, match="versions 1, 2, 3"):
        StoreManifest.load(store)

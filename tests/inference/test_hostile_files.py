"""Files that lie: whatever a model's or a store's files say, it is read rightly or refused with its name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_gguf_families import write_gguf

from inference import Engine, SamplingParams
from inference.errors import InferenceError, ModelFormatError, StoreError
from inference.model.config import DecoderConfig
from inference.weights import import_model
from inference.weights.gguf import GGUFFile
from inference.weights.gguf_tokenizer import tokenizer_files_from_gguf
from inference.weights.manifest import MANIFEST_NAME, StoreManifest
from inference.weights.store import StoreReader

JUNK: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 7, 64, 2**40, 2**70, 1.5, 1e308, float("inf"), float("nan"), "", "x", "../x", [], {},
    [1], ["a"], {"a": 1}, {"rope_type": "yarn", "factor": 0}, {"rope_type": "llama3"}, {"rope_type": "linear"},
]  # fmt: skip
FAMILIES = [
    "llama",
    "mistral",
    "smollm3",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "gpt2",
]
KEYS = [
    "sliding_window",
    "max_window_layers",
    "use_sliding_window",
    "layer_types",
    "no_rope_layers",
    "no_rope_layer_interval",
    "head_dim",
    "query_pre_attn_scalar",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "attn_logit_softcapping",
    "attention_multiplier",
    "logits_scaling",
    "num_local_experts",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "rope_parameters",
    "rope_scaling",
    "partial_rotary_factor",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_theta",
    "rms_norm_eps",
    "hidden_act",
    "hidden_activation",
    "text_config",
    "tie_word_embeddings",
    "eos_token_id",
    "vocab_size",
    "hidden_size",
    "original_max_position_embeddings",
    "quantization_config",
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything within a JSON value."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*at, key))


def changed(value: Any, place: tuple[Any, ...], junk: Any) -> Any:
    value = deepcopy(value)
    within = value
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = junk
    return value


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES), changes=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(JUNK), max_size=2)
)
def test_any_configuration_is_imported_or_refused(
    family: str, changes: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    folder, store = tmp_path / "folder", tmp_path / "store"
    shutil.rmtree(store, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    if not (folder / "model.safetensors").exists():
        os.link(tiny_folder / "model.safetensors", folder / "model.safetensors")
    config = json.loads((tiny_folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes | {"model_type": family}), "utf-8")
    try:
        import_model(folder, store)
    except (ModelFormatError, StoreError):
        assert not store.exists()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_safetensors_header_is_read_or_refused(data: st.DataObject, tiny_folder: Path, tmp_path: Path) -> None:
    folder, store = tmp_path / "folder", tmp_path / "store"
    shutil.rmtree(store, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    shutil.copy(tiny_folder / "config.json", folder)
    whole = (tiny_folder / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    lying = changed(header, data.draw(st.sampled_from(list(places(header)))), data.draw(st.sampled_from(JUNK)))
    text = json.dumps(lying).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    try:
        import_model(folder, store)
    except ModelFormatError:
        assert not store.exists()


def test_json_nested_without_end_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    deep = b"[" * 200_000
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ModelFormatError, match="header is not JSON"):
        import_model(folder, tmp_path / "store")
    (folder / "config.json").write_bytes(deep)
    with pytest.raises(ModelFormatError, match="not readable as JSON"):
        import_model(folder, tmp_path / "store")


GGUF_KEYS = [
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "expert_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "attention.sliding_window",
    "expert_used_count",
]


@pytest.fixture(scope="module")
def tiny_gguf(tiny_llama: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama(), "llama", gguf.GGMLQuantizationType.F16)
    source_of(path)
    return path


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from([f"llama.{key}" for key in GGUF_KEYS])
    | st.sampled_from(
        [f"tokenizer.ggml.{key}" for key in ("model", "tokens", "merges", "scores", "token_type", "pre")]
    ),
    junk=st.sampled_from([*JUNK, ["\udcff", "a"], [["a"]], "llama"]),
)
def test_any_metadata_of_a_gguf_file_is_imported_or_refused(key: str, junk: Any, tiny_gguf: Path) -> None:
    opened = GGUFFile.__init__

    def lying(file: GGUFFile, path: Path) -> None:
        opened(file, path)
        file.metadata[key] = junk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFFile, "__init__", lying)
        with contextlib.suppress(ModelFormatError):
            source_of(tiny_gguf)


def source_of(path: Path) -> None:
    """All that an import asks of a source before and after its weights."""
    from inference.weights.sources import open_source, reading

    source = open_source(path)
    with reading(path):
        source.plan()
        source.tokenizer_files()


def test_a_vocabulary_with_an_endless_piece_is_refused(make_gguf: Callable[..., Path]) -> None:
    """Every way to cut a piece in two is looked at: time that grows with the square of its length."""
    path = make_gguf(tokens=["<unk>", "<s>", "</s>", "a" * 200_000], scores=[0.0] * 4, types=[2, 3, 3, 1])
    with pytest.raises(ModelFormatError, match="token 3 has 200000 characters"):
        tokenizer_files_from_gguf(GGUFFile(path))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_that_lies_under_its_own_digest_is_refused_or_harmless(
    data: st.DataObject, tiny_store: Path, tmp_path: Path
) -> None:
    """Whoever can write a store can write a digest that fits: what compiled kernels read must be checked besides."""
    store = tmp_path / "store"
    if not store.exists():
        shutil.copytree(tiny_store, store, copy_function=os.link)
    manifest = json.loads((tiny_store / MANIFEST_NAME).read_text("utf-8"))
    heads = [(key,) for key in manifest] + [("config", key) for key in manifest["config"]]
    within = [("tensors", 0, *place) for place in places(manifest["tensors"][0])]
    place = data.draw(st.sampled_from(heads + within))
    lying = changed(manifest, place, data.draw(st.sampled_from([*JUNK, [4], [512, 128], "float64", "int4", "int8"])))
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        lying["digest"] = StoreManifest.from_dict(lying).computed_digest()
    (store / MANIFEST_NAME).unlink(missing_ok=True)
    (store / MANIFEST_NAME).write_text(json.dumps(lying), "utf-8")
    try:
        reader = StoreReader(store)
        for tensor in reader.manifest.tensors:
            assert reader.float32(tensor.name).shape == tensor.shape
        if reader.manifest.config.layers < 10 and not reader.manifest.config.is_foreign:
            engine = Engine.load(store, threads=1, max_batch=1, memory_bytes=400_000_000)
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    except InferenceError:
        pass


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "", "."])
def test_a_store_reads_no_file_outside_of_its_folder(name: str, tiny_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_store, store)
    manifest = json.loads((store / MANIFEST_NAME).read_text("utf-8"))
    manifest["files"].append({"name": name, "bytes": 1, "sha256": ""})
    manifest["digest"] = StoreManifest.from_dict(manifest).computed_digest()
    (store / MANIFEST_NAME).write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(StoreError, match="not in its folder"):
        StoreReader(store)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 1.5),
        ("layers", 2**40),
        ("max_context", 2**62),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0.0),
        ("rope_theta", 10**400),
        ("activation", "relu"),
        ("ropes", (1, 0)),
        ("windows", (-1, 0)),
        ("logit_softcap", -1.0),
        ("residual_scale", float("inf")),
        ("architecture", 5),
    ],
)
def test_a_configuration_that_no_kernel_could_follow_is_refused(field: str, value: Any) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 2}
    fine = {"architecture": "llama", "head_dim": 32, "max_context": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
    DecoderConfig(**(sizes | fine | {"tied_embeddings": True}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field.removesuffix("s")):
        DecoderConfig(**(sizes | fine | {"tied_embeddings": True, field: value}))  # type: ignore[arg-type]

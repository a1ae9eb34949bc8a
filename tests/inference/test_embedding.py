"""Texts as vectors: against transformers' hidden states, alone and together, beside running requests."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference import Engine, SamplingParams
from inference.errors import EmbeddingCancelled, InvalidRequest, ModelFormatError
from inference.request import GenerationRequest
from inference.weights import import_model

PROMPTS = [[(7 * i + 3 * p) % 500 + 3 for i in range(length)] for p, length in enumerate([1, 5, 33, 256, 257, 400])]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_transformers_pooled_hidden_states(
    tiny_llama: Callable[..., Any], tiny_store: Path, pooling: Any
) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=4, memory_bytes=1024**3, compute="fp32")
    vectors = engine.embed(PROMPTS, pooling=pooling, normalize=False)
    normalized = engine.embed(PROMPTS, pooling=pooling)
    model = tiny_llama()
    for prompt, vector, unit in zip(PROMPTS, vectors, normalized, strict=True):
        with torch.inference_mode():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0].double()
        expected = (states.mean(0) if pooling == "mean" else states[-1]).numpy()
        np.testing.assert_allclose(vector, expected, atol=2e-4)
        np.testing.assert_allclose(unit, expected / np.linalg.norm(expected), atol=2e-5)


def test_a_text_gets_the_same_bits_alone_and_among_others_and_beside_requests(engine: Engine) -> None:
    texts = ["Ice is cold.", "水是濕的。", "A much longer text about nothing at all. " * 20, "x"]
    alone = [engine.embed([text])[0] for text in texts]
    done: list[object] = []
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.submit(GenerationRequest("beside", tuple(engine.tokenizer.encode("Hello")), sampling), on_finish=done.append)
    engine.step()
    order = [0, 1, 2, 3, 2, 0]
    random.Random(1).shuffle(order)
    assert engine.embed([texts[i] for i in order]) == [alone[i] for i in order]
    while not done:
        assert engine.step()
    assert engine.stats().cache_pages_used == 0


def test_what_cannot_be_embedded_is_named(tiny_store: Path) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=2, memory_bytes=1024**3)
    for prompt, message in {
        (): r"prompts\[1\]: is empty",
        (5,) * 513: r"prompts\[1\]: has 513 tokens; this model takes at most 512",
        (512,): r"prompts\[1\]: token id 512 is not in the vocabulary of 512",
    }.items():
        with pytest.raises(InvalidRequest, match=message):
            engine.embed([[5], prompt])
    with pytest.raises(InvalidRequest, match="pooling: must be one of mean, last"):
        engine.embed([[5]], pooling="max")  # type: ignore[arg-type]
    assert engine.embed([]) == []


def test_texts_wait_for_the_pages_that_requests_hold(tiny_store: Path) -> None:
    roomy = Engine.load(tiny_store, threads=1, max_batch=2, token_budget=256)
    spare = (roomy.stats().cache_pages_total - 8) * roomy.cache_page_bytes
    engine = Engine.load(
        tiny_store, threads=1, max_batch=2, token_budget=256, memory_bytes=roomy.memory_bytes_at_most - spare
    )
    assert engine.stats().cache_pages_total == 8
    done: list[Any] = []
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit(GenerationRequest("r", tuple([5] * 100), sampling), on_finish=done.append)
    engine.step()
    vectors = engine.embed([[9] * 250, [5] * 30])
    assert vectors == [engine.embed([[9] * 250])[0], engine.embed([[5] * 30])[0]]
    assert done and done[0].error is None
    with pytest.raises(InvalidRequest, match=r"prompts\[0\]: needs 9 cache pages; the engine's memory holds 8"):
        engine.embed([[5] * 257])


def test_each_texts_time_adds_up_to_the_engines(tiny_store: Path) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=4, memory_bytes=1024**3)
    embedded = engine.embeddings(PROMPTS)
    assert [one.vector.tolist() for one in embedded] == engine.embed(PROMPTS)
    engine = Engine.load(tiny_store, threads=1, max_batch=4, memory_bytes=1024**3)
    embedded = engine.embeddings(PROMPTS)
    told = engine.stats()
    assert sum(one.compute_seconds for one in embedded) == pytest.approx(told.busy_seconds)
    assert told.prefill_tokens == sum(map(len, PROMPTS)) and told.output_tokens == 0
    assert engine.report().decode_tokens == 0


def test_running_requests_get_a_step_for_each_of_the_texts(tiny_store: Path) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=4, token_budget=256, memory_bytes=1024**3)
    tokens: list[int] = []
    steps: list[int] = []
    engine.submit(
        GenerationRequest("beside", (5, 6, 7), SamplingParams(max_tokens=40, ignore_eos=True)),
        on_token=lambda event: tokens.append(len(steps)),
        on_finish=lambda completion: None,
    )
    engine.embeddings([[9] * 256] * 10, cancelled=lambda: steps.append(1) is not None)
    assert len(tokens) == 10 and tokens == sorted(set(tokens))  # one between any two


def test_texts_that_nobody_wants_any_more_stop_between_steps_and_give_their_pages_back(tiny_store: Path) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=4, token_budget=256, memory_bytes=1024**3)
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 3

    with pytest.raises(EmbeddingCancelled) as ended:
        engine.embeddings([[9] * 400] * 10, cancelled=cancelled)
    assert ended.value.compute_seconds == pytest.approx(engine.stats().busy_seconds) and engine.stats().steps == 3
    assert engine.stats().cache_pages_used == 0


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 64}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        (None, None),
    ],
)
def test_a_folder_says_how_its_models_texts_become_vectors(
    tiny_folder: Path, tmp_path: Path, told: dict[str, Any] | None, expected: Any
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    if told is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
    assert import_model(folder, tmp_path / "store").pooling == expected
    again = import_model(tmp_path / "store", tmp_path / "again", quantize="bf16")
    assert again.pooling == expected
    engine = Engine.load(tmp_path / "store", threads=1, max_batch=2, memory_bytes=1024**3)
    assert engine.embed(PROMPTS[2:3]) == engine.embed(PROMPTS[2:3], pooling=expected or "mean")


def test_a_folder_whose_vectors_are_made_another_way_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ModelFormatError, match=r"pooling mode.*is pooling_mode_cls_token; mean or last"):
        import_model(folder, tmp_path / "store")

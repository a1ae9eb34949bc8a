"""Models that run in transformers' own code stream their repeated blocks, with the bits that they have in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_foreign_models import MODELS, PROMPTS, SIZES, WIDE, make_model

from inference import Engine, SamplingParams
from inference.errors import MemoryBudgetError
from inference.foreign_loading import fitting_placement
from inference.memory.folders import images_folder
from inference.memory.placement import Placement
from inference.planner.plan import Plan
from inference.planner.workload import Workload
from inference.weights import import_model

ASKED = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)
EVERYTHING = Placement(frozenset(), ring=2, readers=2)
SOME = Placement(frozenset({1}), ring=3, readers=1)
DEEP: dict[str, Any] = {**SIZES, **WIDE, "intermediate_size": 96, "max_position_embeddings": 256} | {
    "num_hidden_layers": 5
}


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_IMAGES", str(tmp_path / "images"))


def store_of(name: str, folder: Path, quantize: Any = "keep") -> Path:
    make_model(name).save_pretrained(folder / "model")
    import_model(folder / "model", folder / "store", quantize=quantize)
    return folder / "store"


def engine_of(store: Path, placement: Placement, compute: Any) -> Engine:
    plan = Plan(
        placement=placement,
        compute=compute,
        cache="fp32",
        cache_pages=40,
        max_batch=4,
        token_budget=64,
        memory_bytes=2**28,
        workload=Workload.uniform(4, 32, 8),
    )
    return Engine.load(store, threads=1, plan=plan)


def told(engine: Engine) -> list[Any]:
    """Several sequences in a batch, a prompt longer than a step among them."""
    return [(one.finish_reason, one.error, one.token_ids, one.logprobs) for one in engine.generate(PROMPTS, ASKED)]


def alike(store: Path, placement: Placement, compute: str, layers: int) -> Engine:
    """Asserts the same bits as in memory; returns the engine that streamed."""
    expected = told(engine_of(store, Placement.resident(layers), compute))
    assert all(reason == "length" for reason, *_ in expected)
    streamed = engine_of(store, placement, compute)
    assert told(streamed) == expected
    assert streamed.stats().streamed_bytes > 0
    return streamed


@pytest.mark.parametrize("name", MODELS)
def test_streamed_blocks_give_the_same_bits(name: str, tmp_path: Path) -> None:
    alike(store_of(name, tmp_path), EVERYTHING, "fp32", 2)


@pytest.mark.parametrize(
    ("quantize", "compute"), [("keep", "bf16"), ("keep", "int8"), ("int8", "int8"), ("int4", "int8"), ("int8", "fp32")]
)
def test_so_do_they_in_every_arithmetic(quantize: str, compute: str, tmp_path: Path) -> None:
    alike(store_of("GPT2", tmp_path, quantize), SOME, compute, 2)


@pytest.mark.parametrize("placement", [EVERYTHING, SOME, Placement(frozenset({0, 2, 4}), ring=2, readers=2)])
def test_buffers_are_filled_again_and_again(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "GPTNeoX", DEEP)
    alike(store_of("GPTNeoX", tmp_path), placement, "int8", 5)


def test_a_block_is_read_once_a_step_whatever_the_number_of_sequences(tmp_path: Path) -> None:
    engine = engine_of(store_of("GPT2", tmp_path), EVERYTHING, "fp32")
    decoder: Any = engine._model.decoder
    before = decoder.stream_stats().steps
    told(engine)
    stats = decoder.stream_stats()
    a_step = sum(path.stat().st_size for path in images_folder().glob("*/*.bin"))
    # What was read ahead for the step after the last is at most as many units as there are buffers.
    assert a_step * stats.steps <= stats.bytes <= a_step * (stats.steps + 1)
    assert stats.steps - before < len(PROMPTS) * ASKED.max_tokens


def test_a_damaged_block_ends_the_requests_and_names_its_file(tmp_path: Path) -> None:
    engine = engine_of(store_of("GPT2", tmp_path), EVERYTHING, "fp32")
    told(engine)
    good = told(engine)  # with what prompts have in common from the cache, as it will be after the damage
    (path,) = images_folder().glob("*/00001.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    told(engine)  # the ring may hold what was read before
    assert all(error is not None and f"{path}: is damaged" in error for _, error, *_ in told(engine))
    path.write_bytes(whole)
    assert told(engine) == good


def test_a_removed_block_ends_the_requests_and_names_its_file(tmp_path: Path) -> None:
    engine = engine_of(store_of("GPT2", tmp_path), EVERYTHING, "fp32")
    (path,) = images_folder().glob("*/00000.bin")
    os.unlink(path)
    told(engine)
    assert all(error is not None and str(path) in error for _, error, *_ in told(engine))


def test_as_many_blocks_stay_in_memory_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "GPTNeoX", DEEP)
    store = store_of("GPTNeoX", tmp_path)
    assert fitting_placement(store, "fp32", 10**8).pinned == frozenset(range(5))
    assert len(fitting_placement(store, "fp32", 1_300_000).pinned) < 5
    with pytest.raises(MemoryBudgetError, match="they need"):
        fitting_placement(store, "fp32", 300_000)

"""A cache of which some layers lie on disk: the same bits, little memory, and no wrong byte whatever the disk does."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from inference import Completion, Engine, SamplingParams
from inference.bench.invariance import InvarianceCheck
from inference.bench.mixes import MOST_BATCH, MOST_BUDGET, MOST_PAGES, random_mix
from inference.bench.tiny import write_tiny_model
from inference.cache.pages import PAGE_TOKENS, PagePool
from inference.cache.spilled import SpilledCache, spilled_disk_bytes, spilled_memory_bytes
from inference.cache.spilled.partition import partition
from inference.errors import CacheLost, StoreError
from inference.group import lone_sequence
from inference.kernels.base import CacheKind
from inference.loading import LoadedModel, load_model
from inference.memory.placement import Placement
from inference.model.batch import build_batch
from inference.planner.plan import Plan
from inference.request import GenerationRequest
from inference.scheduler import Slice
from inference.scoring import Scorer
from inference.weights import import_model

LAYERS = 2  # of the tiny model
BOTH = frozenset(range(LAYERS))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spilled")
    write_tiny_model(folder / "model")
    import_model(folder / "model", folder / "store")
    return folder / "store"


def loaded(store: Path, kind: CacheKind) -> LoadedModel:
    try:
        return load_model(
            store, compute="int8", cache=kind, max_batch=MOST_BATCH, token_budget=MOST_BUDGET, memory_bytes=None
        )
    except ValueError as error:
        pytest.skip(f"no such cache here: {error}")


def spilling(
    model: LoadedModel, folder: Path, layers: frozenset[int] = BOTH, *, pages: int = MOST_PAGES, capacity: int = 16
) -> tuple[LoadedModel, SpilledCache]:
    """The same model with a cache on disk; small buffers, so that steps fall into several parts."""
    cache = SpilledCache(model.manifest.config, pages, model.cache.kind, layers, folder, capacity=capacity)
    return replace(model, cache=cache, pages=PagePool(pages, cache.clear, cache.copy)), cache


def engine_of(model: LoadedModel) -> Engine:
    return Engine(model, threads=1, max_batch=MOST_BATCH, token_budget=MOST_BUDGET)


def prompt_of(length: int, salt: int) -> list[int]:
    return [3 + (salt * 97 + index * 31) % 300 for index in range(length)]


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("kind", get_args(CacheKind))
@pytest.mark.parametrize("layers", [BOTH, frozenset([1])])
def test_outputs_are_the_same_bits_as_from_memory_in_any_mix(
    store: Path, tmp_path: Path, kind: CacheKind, layers: frozenset[int]
) -> None:
    """Mixes of requests that share prefixes, copy parts of pages, are preempted, paused and cancelled."""
    resident = InvarianceCheck(loaded(store, kind))
    model, cache = spilling(resident.model, tmp_path, layers)
    check = InvarianceCheck(model, _alone=resident._alone)
    for number in range(12):
        mix = random_mix(random.Random(f"spilled {number}"), 320)
        resident.run(mix)  # which keeps what each request gives alone, in memory
        check.run(mix)
    assert check.tally.prefix_hit_tokens and check.tally.preemptions and check.tally.cancelled
    assert cache.traffic.bytes_read and cache.traffic.bytes_written
    assert check.tally.steps_within_steps == 0


def test_a_plan_spills_what_it_says_and_streams_weights_besides(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_IMAGES", str(tmp_path))
    resident = loaded(store, "int8")
    plan = Plan(
        placement=Placement(frozenset(), head_pinned=False, embedding_pinned=False, ring=2, readers=1, spilled=BOTH),
        compute="int8",
        cache="int8",
        cache_pages=MOST_PAGES,
        max_batch=MOST_BATCH,
        token_budget=MOST_BUDGET,
        memory_bytes=2**30,
    )
    engine = Engine.load(store, threads=1, plan=plan)
    prompts = [prompt_of(length, length) for length in (300, 45, 64, 33)]
    assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == [
        one.token_ids for one in engine_of(resident).generate(prompts, GREEDY)
    ]
    cache = engine._model.cache
    assert isinstance(cache, SpilledCache) and cache.path.parent == tmp_path and cache.traffic.bytes_read
    stats = engine.stats()
    assert stats.streamed_bytes and stats.cache_bytes_read and stats.cache_bytes_written


def test_layers_that_a_model_has_not_got_cannot_be_spilled(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of 2 layers at least one, and not \[2\]"):
        spilling(loaded(store, "int8"), tmp_path, frozenset([1, 2]))


def test_a_text_has_the_same_logits(store: Path, tmp_path: Path) -> None:
    model = loaded(store, "int8")
    spilled, _ = spilling(model, tmp_path)
    text = prompt_of(300, 1)
    for (_, one), (_, other) in zip(Scorer(model).logits(text), Scorer(spilled).logits(text), strict=True):
        assert torch.equal(one, other)


def test_a_copied_page_holds_what_the_first_does(store: Path, tmp_path: Path) -> None:
    model, _ = spilling(loaded(store, "int8"), tmp_path, frozenset([1]))
    engine = engine_of(model)
    first = prompt_of(70, 1)
    alike = [*first[:52], 7, 8, 9]  # shares a page, and twenty tokens of the next
    one = engine.generate([first], GREEDY)
    again, other = engine.generate([first, alike], GREEDY)
    assert again.token_ids == one[0].token_ids
    fresh = engine_of(loaded(store, "int8"))
    assert other.token_ids == fresh.generate([alike], GREEDY)[0].token_ids
    assert other.cached_prompt_tokens == 52


def test_only_what_a_step_uses_is_in_memory(store: Path, tmp_path: Path) -> None:
    config = loaded(store, "int8").manifest.config
    small, large = (spilled_memory_bytes(config, "int8", LAYERS, pages) for pages in (10_000, 1_000_000))
    assert large - small == 990_000 * LAYERS * 9, "checksums, and nothing else"
    assert spilled_disk_bytes(config, "int8", LAYERS, 1_000_000) > 10 * large
    model = loaded(store, "int8")
    spilled, cache = spilling(model, tmp_path)
    assert engine_of(spilled).memory_bytes_at_most - cache.nbytes == engine_of(model).memory_bytes_at_most - (
        model.cache.nbytes
    )


def test_pages_that_hold_nothing_yet_are_not_read(store: Path, tmp_path: Path) -> None:
    model, cache = spilling(loaded(store, "int8"), tmp_path)
    engine = engine_of(model)
    page = cache.page_bytes
    engine.generate([prompt_of(2 * PAGE_TOKENS, 1)], SamplingParams(max_tokens=1, ignore_eos=True))
    cache._ring.settle()
    assert cache.traffic.bytes_read == 0 and cache.traffic.bytes_written == 2 * page
    engine.generate([prompt_of(2 * PAGE_TOKENS, 2)], SamplingParams(max_tokens=3, ignore_eos=True))
    cache._ring.settle()
    # The second token's page is fresh; for the third token, all three pages are read.
    assert cache.traffic.bytes_read == (2 + 3) * page and cache.traffic.bytes_written == (2 + 2 + 1 + 1) * page


def test_a_step_is_cut_where_pages_no_longer_fit(store: Path) -> None:
    sequences = [lone_sequence(prompt_of(length, length)) for length in (60, 20, 100, 32, 5)]
    page = 0
    for sequence in sequences:
        count = -(-len(sequence.tokens) // PAGE_TOKENS)
        sequence.pages = list(range(page, page + count))
        page += count
    batch = build_batch([Slice(sequence, 0, len(sequence.tokens)) for sequence in sequences])
    plans = partition(batch, 4)
    assert [plan.batch.lengths for plan in plans] == [batch.lengths[:2], batch.lengths[2:3], batch.lengths[3:]]
    assert [plan.rows for plan in plans] == [slice(0, 80), slice(80, 180), slice(180, 217)]
    assert [len(plan.changed) for plan in plans] == [3, 4, 2]
    with pytest.raises(ValueError, match="4 pages does not fit into buffers of 3"):
        partition(batch, 3)


def test_layers_with_a_window_read_only_what_it_shows(tmp_path: Path, tiny_llama: Callable[..., Any]) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(20261201)
    config = MistralConfig(**tiny_llama().config.to_dict() | {"sliding_window": 40})
    MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    model = loaded(tmp_path / "store", "int8")
    spilled, cache = spilling(model, tmp_path, frozenset([0, 1, 2]))
    prompts = [prompt_of(length, length) for length in (300, 45, 100)]
    theirs = engine_of(model).generate(prompts, GREEDY)
    assert [one.token_ids for one in engine_of(spilled).generate(prompts, GREEDY)] == [one.token_ids for one in theirs]
    before = cache.traffic.bytes_read
    engine_of(spilled).generate([prompts[0]], replace(GREEDY, max_tokens=2))
    # The prompt's second piece begins at token 256 and sees from token 217 on: pages 6 and 7. The token after it, at
    # position 300, sees from 261 on: pages 8 and 9.
    assert cache.traffic.bytes_read - before == 4 * cache.page_bytes


def test_a_sequence_that_no_buffer_holds_is_refused(store: Path, tmp_path: Path) -> None:
    model, _ = spilling(loaded(store, "int8"), tmp_path, capacity=3)
    (completion,) = engine_of(model).generate([prompt_of(90, 1)], GREEDY)
    assert completion.finish_reason == "error"
    assert "need 4 cache pages; the engine's memory holds 3" in str(completion.error)


class Running:
    """An engine with a cache on disk, two requests under way in it, and the handle of its file."""

    def __init__(self, model: LoadedModel, cache: SpilledCache) -> None:
        self.cache = cache
        self.engine = engine_of(model)
        self.ended: dict[str, Completion] = {}

    @property
    def handle(self) -> int:
        for handle in os.listdir("/proc/self/fd"):
            # The one that lists is gone by now.
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{handle}") == f"{self.cache.path} (deleted)":
                    return int(handle)
        raise AssertionError("the cache has no file open")

    def submit(self, name: str, prompt: list[int]) -> None:
        self.engine.submit(
            GenerationRequest(name, tuple(prompt), GREEDY),
            on_finish=lambda completion: self.ended.update({completion.request_id: completion}),
        )

    def run(self) -> None:
        while self.engine.step():
            pass

    def flip(self, offset: int) -> None:
        with open(f"/proc/self/fd/{self.handle}", "r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)
            os.fsync(file.fileno())


@pytest.fixture
def running(store: Path, tmp_path: Path) -> Iterator[Running]:
    model, cache = spilling(loaded(store, "int8"), tmp_path)
    running = Running(model, cache)
    running.submit("first", prompt_of(40, 1))
    running.submit("second", prompt_of(40, 2))
    for _ in range(3):
        running.engine.step()
    assert not running.ended
    yield running
    running.run()
    assert running.engine.stats().cache_pages_used == 0


@pytest.fixture(scope="module")
def expected(store: Path) -> list[tuple[int, ...]]:
    engine = engine_of(loaded(store, "int8"))
    return [completion.token_ids for completion in engine.generate([prompt_of(40, 1), prompt_of(40, 2)], GREEDY)]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_flipped_byte_ends_who_holds_its_page_and_nobody_else(
    running: Running, expected: list[tuple[int, ...]], layer: int
) -> None:
    # The first request's first page is page 0; pages are padded to 4096 bytes, layers follow one another.
    stride = spilled_disk_bytes(running.engine.manifest.config, "int8", 1, 1)
    running.flip(layer * MOST_PAGES * stride + 100)
    running.run()
    failed, other = running.ended["first"], running.ended["second"]
    assert failed.finish_reason == "error"
    assert str(running.cache.path) in str(failed.error)
    assert f"page 0 of layer {layer}" in str(failed.error) and "not what was written" in str(failed.error)
    assert other.finish_reason == "length" and other.token_ids == expected[1]
    # Nobody finds the page any more: the same prompt is computed again.
    running.submit("again", prompt_of(40, 1))
    running.run()
    assert running.ended["again"].token_ids == expected[0]


def test_a_full_disk_ends_requests_that_need_what_was_not_written_and_not_the_process(
    running: Running, expected: list[tuple[int, ...]]
) -> None:
    handle = running.handle
    whole = os.dup(handle)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, handle)  # takes no byte from now on, as a full disk
    running.engine.step()
    running.cache._ring.settle()
    os.dup2(whole, handle)
    for other in (whole, full):
        os.close(other)
    running.run()
    for name in ("first", "second"):
        assert running.ended[name].finish_reason == "error"
        assert str(running.cache.path) in str(running.ended[name].error)
    assert "is lost" in str(running.ended["first"].error) or "not what" in str(running.ended["first"].error)
    running.submit("later", prompt_of(40, 1))
    running.run()
    assert running.ended["later"].token_ids == expected[0]


def test_a_page_that_could_not_be_written_is_told_with_the_disks_own_words(store: Path, tmp_path: Path) -> None:
    model, cache = spilling(loaded(store, "int8"), tmp_path)
    running = Running(model, cache)
    os.dup2(os.open("/dev/full", os.O_RDWR), running.handle)
    running.submit("first", prompt_of(40, 1))
    running.run()
    assert "No space left on device" in str(running.ended["first"].error)
    assert running.engine.stats().cache_pages_used == 0


def test_a_disk_that_cannot_be_read_ends_requests_and_not_the_process(
    running: Running, expected: list[tuple[int, ...]]
) -> None:
    running.cache._ring.settle()
    handle = running.handle
    whole, unreadable = os.dup(handle), os.open("/dev/null", os.O_WRONLY)
    os.dup2(unreadable, handle)
    running.run()
    os.dup2(whole, handle)
    for other in (whole, unreadable):
        os.close(other)
    for name in ("first", "second"):
        error = str(running.ended[name].error)
        assert str(running.cache.path) in error and "cannot be read" in error and "of layer 0" in error
    running.submit("later", prompt_of(40, 1))
    running.run()
    assert running.ended["later"].token_ids == expected[0]


def test_a_lost_page_fails_an_embedding_with_the_files_name(running: Running) -> None:
    os.dup2(os.open("/dev/full", os.O_RDWR), running.handle)
    with pytest.raises(CacheLost, match=running.cache.path.name):
        running.engine.embed([prompt_of(400, 3)])


def test_a_disk_without_room_shows_at_once(store: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT CHECKED: a small filesystem can be mounted by root only")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"NOT CHECKED: no filesystem can be mounted here: {mounted.stderr.decode()}")
    try:
        need = spilled_disk_bytes(loaded(store, "int8").manifest.config, "int8", LAYERS, MOST_PAGES)
        with pytest.raises(StoreError, match=rf"{folder}/key-value-cache-.*cannot be given {need} bytes.*are free"):
            spilling(loaded(store, "int8"), folder)
        assert os.listdir(folder) == []
        assert os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize == 64 * 1024, "nothing is kept of it"
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_folder_that_cannot_be_made_is_named(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file/cache: cannot hold the key-value cache: Not a directory"):
        spilling(loaded(store, "int8"), tmp_path / "file" / "cache")


_HOLDING = """
import sys
from pathlib import Path
from inference.bench.tiny import write_tiny_model
from inference.cache.spilled import SpilledCache
from inference.weights.manifest import StoreManifest
config = StoreManifest.load(Path(sys.argv[1])).config
cache = SpilledCache(config, 64, "int8", frozenset([0, 1]), Path(sys.argv[2]))
print("holding", cache.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_file(store: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDING, str(store), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("holding")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.listdir(tmp_path) == []

"""Weights and cache over device, host and disk: the same bits as all on the device, and plans that keep to the room."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import PROMPTS, make_model
from whole_prompts import PAGES, logits_of

from inference import Engine, SamplingParams
from inference.__main__ import main
from inference.device.cache import HostedCache
from inference.device.loading import load_on_device, whole_placement
from inference.device.sizes import tier_bytes
from inference.errors import MemoryBudgetError, SettingError, StoreError
from inference.hardware_command import size
from inference.kernels.base import CacheKind, KeyValueCache
from inference.kernels.reference import ReferenceKernels
from inference.memory.placement import Placement
from inference.model.decoder import Decoder
from inference.model.layers import LayerReader
from inference.plan_command import add_plan, device_plan, print_plan
from inference.planner.device_planning import make_device_plan
from inference.planner.device_rates import DeviceRates
from inference.planner.plan import Plan
from inference.planner.sizes import ModelSizes
from inference.planner.workload import Workload
from inference.weights import StoreManifest, import_model
from inference.weights.store import StoreReader

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = 5
# A step costs 1 ms a layer whatever its rows; 1 GB/s to the device.
RATES = DeviceRates((1, 512), (1e-3, 1e-3), (1e-3, 1e-3), 0.0, 1e9)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of five layers in 4 bits, whose matrices the int4 kernels take."""
    folder = tmp_path_factory.mktemp("tiers")
    model = make_model("llama", num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=256)
    model.save_pretrained(folder / "model")
    import_model(folder / "model", folder / "store", quantize="int4")
    return folder / "store"


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_IMAGES", str(tmp_path / "images"))
    return tmp_path / "images"


def kernels_on(device: str, store: Path, compute: Any) -> ReferenceKernels:
    return ReferenceKernels(StoreManifest.load(store).config, compute, torch.device(device))


def placed(device: str, **changes: Any) -> Placement:
    return replace(Placement(frozenset(range(LAYERS)), device=device), **changes)


SPREADS: dict[str, dict[str, Any]] = {
    "all in the host's memory": {
        "pinned": frozenset(),
        "hosted": frozenset(range(LAYERS)),
        "head_pinned": False,
        "head_hosted": True,
        "device_ring": 2,
    },
    "some of each": {
        "pinned": frozenset({1}),
        "hosted": frozenset({0, 3}),
        "ring": 2,
        "readers": 2,
        "device_ring": 3,
    },
    "all on disk but the head": {
        "pinned": frozenset(),
        "head_pinned": False,
        "head_hosted": True,
        "ring": 3,
        "readers": 1,
        "device_ring": 2,
        "embedding_pinned": False,
    },
    "one copied": {"pinned": frozenset({0, 1, 2, 4}), "hosted": frozenset({3}), "device_ring": 2},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("spread", SPREADS)
def test_weights_on_other_tiers_give_the_same_bits(device: str, compute: Any, spread: str, store: Path) -> None:
    kind: CacheKind = "fp32" if compute == "fp32" else "bf16"
    whole = Decoder.load(store, kernels_on(device, store, compute))
    spread_out = Decoder.load(store, kernels_on(device, store, compute), placed(device, **SPREADS[spread]))
    assert spread_out.stream_stats() is not None and not spread_out.nests
    for _ in range(2):  # the second time, everything has been read ahead across the border of steps
        caches = [KeyValueCache(whole.config, PAGES, kind, torch.device(device)) for _ in range(2)]
        want, found = (
            logits_of(one, PROMPTS, [1, 7, 40], cache) for one, cache in zip((whole, spread_out), caches, strict=True)
        )
        assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    stats = spread_out.stream_stats()
    assert stats is not None and stats.copied_bytes > 0
    assert (stats.bytes > 0) == ("disk" in spread or "each" in spread)
    spread_out.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("capacity", [6, 64])
def test_keys_and_values_in_the_hosts_memory_give_the_same_bits(
    device: str, family: str, capacity: int, tmp_path: Path
) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    decoder = Decoder.load(tmp_path / "store", kernels_on(device, tmp_path / "store", "fp32"))
    there = torch.device(device)
    hosted = HostedCache(decoder.config, PAGES, "fp32", there, frozenset({0, 2}), capacity=capacity)
    want = logits_of(decoder, PROMPTS, [1, 7, 40], KeyValueCache(decoder.config, PAGES, "fp32", there))
    # Parts hold fewer sequences, whose products may then round otherwise; the same cuts of the same step do not.
    found = logits_of(decoder, PROMPTS, [1, 7, 40], hosted)
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        if capacity == PAGES:
            assert torch.equal(a, b)
    assert hosted.layers[0].pages.device.type == "cpu"
    assert hosted.sequence_pages == capacity and not hosted.nests


@pytest.mark.parametrize("device", DEVICES)
def test_a_hosted_page_is_cleared_and_copied(device: str, store: Path) -> None:
    config = StoreManifest.load(store).config
    cache = HostedCache(config, 4, "fp32", torch.device(device), frozenset({1}))
    for layer in cache.layers:
        layer.pages[0] = 3.0
    cache.copy(0, 2)
    cache.clear([0])
    for layer in cache.layers:
        assert not layer.pages[0].any() and bool((layer.pages[2] == 3.0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_the_engine_runs_by_a_plan_over_three_tiers(device: str, store: Path) -> None:
    prompts, sampling = [[5, 7, 9], [3] * 45, [8, 1]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    tokens = []
    for changes in ({}, SPREADS["some of each"] | {"hosted_cache": frozenset({0, 4})}):
        plan = Plan(placed(device, **changes), "bf16", "bf16", 32, 4, 64, 2**30, device_bytes=2**30)
        engine = Engine.load(store, plan=plan, threads=1)
        tokens.append([one.token_ids for one in engine.generate(prompts, sampling)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_damaged_layer_ends_the_step_with_its_file_and_the_next_one_begins_anew(
    device: str, store: Path, images: Path
) -> None:
    changes = SPREADS["all on disk but the head"]
    decoder = Decoder.load(store, kernels_on(device, store, "fp32"), placed(device, **changes))
    cache = KeyValueCache(decoder.config, PAGES, "fp32", torch.device(device))
    want = logits_of(decoder, PROMPTS, 80, cache)
    (index,) = images.glob("*/index.json")
    entry = next(unit for unit in json.loads(index.read_text())["units"] if unit["name"] == "layers.3")
    file = index.parent / entry["file"]
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(StoreError, match=entry["file"]):
        for _ in range(3):  # what was read ahead of the damage is still right
            logits_of(decoder, PROMPTS, 80, cache)
    file.write_bytes(whole)
    again = KeyValueCache(decoder.config, PAGES, "fp32", torch.device(device))
    assert all(torch.equal(a, b) for a, b in zip(want, logits_of(decoder, PROMPTS, 80, again), strict=True))
    decoder.close()
    with pytest.raises(StoreError, match="closed"):
        logits_of(decoder, PROMPTS, 80, again)


def planned(store: Path, device_bytes: int, *, rates: DeviceRates = RATES, **changes: Any) -> tuple[Plan, ModelSizes]:
    kernels = kernels_on("cpu", store, "fp32")
    parts = LayerReader(StoreReader(store), kernels)
    asked: dict[str, Any] = {
        "memory_bytes": 2**30,
        "max_batch": 2,
        "token_budget": 32,
        "workload": Workload.uniform(2, 32, 16),
        "disk_bytes_per_s": 1e8,
    }
    plan = make_device_plan(parts, cache="fp32", device_bytes=device_bytes, rates=rates, **(asked | changes))
    return plan, ModelSizes.of(parts)


def bytes_of(plan: Plan, sizes: ModelSizes) -> Any:
    return tier_bytes(
        sizes, plan.placement, plan.cache, plan.cache_pages, max_batch=plan.max_batch, token_budget=plan.token_budget
    )


def room_for(store: Path, layers: float) -> int:
    """Bytes of a device for a cache, a step, the embedding, the head, and that many layers with the ring among them."""
    plan, sizes = planned(store, 2**30)
    rest = bytes_of(plan, sizes).device - sum(sizes.layers)
    return int(rest + layers * sizes.layers[0])


def test_what_fits_the_device_is_put_there_whole(store: Path) -> None:
    plan, _ = planned(store, 2**30)
    assert plan.placement == placed("cpu")
    assert plan.predicted is not None and plan.predicted.bound_by == "arithmetic"
    assert plan.predicted.streamed_bytes_per_step == 0


@pytest.mark.parametrize("layers", [3.5, 4.0, 4.9])
def test_a_plan_keeps_to_the_device_and_leaves_it_no_more_than_it_must(store: Path, layers: float) -> None:
    room = room_for(store, layers)
    plan, sizes = planned(store, room)
    placement, used = plan.placement, bytes_of(plan, sizes)
    assert used.device <= room
    assert placement.ring == 0 and placement.pinned | placement.hosted == frozenset(range(LAYERS))
    # Every step copies 2 ms and more of layers in the while that computing takes: the fewer the better.
    assert plan.predicted is not None
    assert used.device + sizes.layers[0] > room or not placement.hosted
    Engine.load(store, plan=replace(plan, hardware={}), threads=1).generate([[1, 2, 3]], SamplingParams(max_tokens=2))


def test_where_copies_take_longer_than_computing_the_plan_says_so_and_how_long(store: Path) -> None:
    slow = replace(RATES, to_device_bytes_per_s=1e6)
    plan, sizes = planned(store, room_for(store, 4.0), rates=slow)
    predicted = plan.predicted
    assert predicted is not None and predicted.bound_by == "copies"
    copied = sum(sizes.layers[index] for index in plan.placement.hosted)
    copied += sizes.head if plan.placement.head_hosted else 0
    assert predicted.streamed_bytes_per_step >= copied > 0
    assert predicted.step_seconds == pytest.approx(predicted.streamed_bytes_per_step / 1e6)


def test_what_neither_memory_holds_is_read_from_disk(store: Path) -> None:
    room = room_for(store, 3.1)
    _, sizes = planned(store, 2**30)
    layer = sizes.layers[0]
    plan, _ = planned(store, room, memory_bytes=int(3.4 * layer))
    on_disk = LAYERS - len(plan.placement.pinned) - len(plan.placement.hosted)
    used = bytes_of(plan, sizes)
    assert on_disk and used.device <= room and used.host <= plan.memory_bytes
    assert plan.predicted is not None and plan.predicted.bound_by == "disk"
    assert plan.predicted.step_seconds == pytest.approx(on_disk * layer / 1e8)
    Engine.load(store, plan=plan, threads=1).generate([[1, 2, 3]], SamplingParams(max_tokens=2))


def test_a_device_too_small_for_a_step_is_refused_with_what_it_takes(store: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"need \d+\. Allow that much"):
        planned(store, 2**16)
    with pytest.raises(MemoryBudgetError, match="host's memory"):
        planned(store, room_for(store, 3.1), memory_bytes=4096)


def test_loading_plans_what_the_device_does_not_hold(store: Path) -> None:
    config = StoreManifest.load(store).config
    settings: dict[str, Any] = {"compute": "fp32", "cache": "auto", "max_batch": 2, "token_budget": 32}
    loaded = load_on_device(
        store, config, torch.device("cpu"), memory_bytes=2**28, device_bytes=room_for(store, 4.0), **settings
    )
    assert loaded.plan is not None and loaded.plan.device_bytes == room_for(store, 4.0)
    with pytest.raises(SettingError, match="device_bytes"):
        load_on_device(store, config, torch.device("cpu"), **settings)


def test_a_plan_of_more_than_it_may_use_is_refused_before_loading(store: Path) -> None:
    config = StoreManifest.load(store).config
    plan = Plan(whole_placement(config, torch.device("cpu")), "fp32", "fp32", 32, 2, 32, 2**30, device_bytes=2**16)
    with pytest.raises(MemoryBudgetError, match="of which 65536 may be used"):
        Engine.load(store, plan=plan)


def test_the_plan_command_tells_what_lies_where(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    room = room_for(store, 4.0)
    arguments = [
        "plan",
        str(store),
        "--rows",
        "2",
        "--prompt",
        "32",
        "--new",
        "16",
        "--batch",
        "2",
        "--compute",
        "fp32",
    ]
    arguments += ["--token-budget", "32", "--device-memory", str(room), "--memory", "1GB"]
    parser = argparse.ArgumentParser()
    add_plan(parser.add_subparsers().add_parser("plan"))
    options = parser.parse_args(arguments)
    reader = StoreReader(store)
    plan = device_plan(options, torch.device("cpu"), reader, Workload.uniform(2, 32, 16), 10**9)
    print_plan(options, plan, LAYERS)
    told = capsys.readouterr().out
    sizes = ModelSizes.of(LayerReader(reader, kernels_on("cpu", store, "fp32")))
    assert f"device      cpu: {size(bytes_of(plan, sizes).device)} of {size(room)}" in told
    assert "in the host's memory" in told and "are copied" in told and plan.device_bytes == room
    assert (plan.predicted is not None) and plan.predicted.step_seconds > 0  # by rates measured here


def test_the_plan_command_refuses_a_device_that_is_not_there(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(store), "--prompt", "8", "--new", "8", "--device", "cuda:77"]) != 0
    assert "device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"device": None, "hosted": frozenset({1})},
        {"head_hosted": True},
        {"hosted": frozenset({1})},
        {"pinned": frozenset({0}), "hosted": frozenset({1, 2, 3, 4})},
        {"spilled": frozenset({0})},
        {"device": "tpu"},
    ],
)
def test_placements_that_contradict_themselves_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(device|head|hosted|spilled|device_ring)"):
        Placement(**{"pinned": frozenset(range(LAYERS)), "device": "cpu"} | changes)

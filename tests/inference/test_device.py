"""A model on a device of PyTorch's: on the processor always, on CUDA where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import PROMPTS, make_model
from whole_prompts import PAGES, logits_of, sequences_of

from inference import Engine, SamplingParams
from inference.device.loading import load_on_device, whole_placement
from inference.device.memory import chosen_device
from inference.errors import SettingError
from inference.kernels.base import KeyValueCache
from inference.kernels.reference import ReferenceKernels
from inference.model.batch import build_batch
from inference.model.decoder import Decoder
from inference.planner.plan import Plan
from inference.scheduler import Slice
from inference.weights import StoreManifest, import_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FAMILIES = ["llama, biases", "mistral", "qwen3", "phi3, longrope", "gemma2", "granite", "mixtral"]


def decoder_on(device: str, store: Path, compute: Any) -> Decoder:
    config = StoreManifest.load(store).config
    return Decoder.load(store, ReferenceKernels(config, compute, torch.device(device)))


def cache_on(device: str, decoder: Decoder, kind: Any = "fp32") -> KeyValueCache:
    return KeyValueCache(decoder.config, PAGES, kind, torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float32_are_those_of_transformers(device: str, family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    decoder = decoder_on(device, tmp_path / "store", "fp32")
    ours = logits_of(decoder, PROMPTS, [1, 7, 40], cache_on(device, decoder))
    for prompt, logits in zip(PROMPTS, ours, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compute", ["bf16", "int8"])
def test_quantized_arithmetic_stays_near_the_reference(device: str, compute: Any, smollm2_store: Path) -> None:
    config = StoreManifest.load(smollm2_store).config
    prompts = [[(31 * i + 17 * p + 100) % 40_000 for i in range(n)] for p, n in enumerate([1, 33])]
    exact = torch.cat(logits_of(Decoder.load(smollm2_store, ReferenceKernels(config, "fp32")), prompts, 33))
    decoder = decoder_on(device, smollm2_store, compute)
    found = torch.cat(logits_of(decoder, prompts, 33, cache_on(device, decoder, "bf16")))
    reference, ours = (torch.log_softmax(logits, dim=1) for logits in (exact, found))
    divergence = (reference.exp() * (reference - ours)).sum(dim=1)
    assert divergence.mean() < 0.03
    if compute == "bf16":  # the store's 4 bits are kept: half a byte a weight, and its scales
        layers = decoder.config.layers
        weights = sum(one.nbytes for one in decoder._weights.layers) / layers
        per_layer = config.hidden_size * (config.query_size + 2 * config.kv_size + config.query_size)
        assert weights < 0.7 * (per_layer + 3 * config.hidden_size * config.intermediate_size)


@pytest.mark.parametrize("device", DEVICES)
def test_the_likeliest_tokens_are_those_of_the_logits(device: str, tiny_store: Path) -> None:
    decoder = decoder_on(device, tiny_store, "fp32")
    prompts = [[5, 7, 11], [3] * 40]
    batch = build_batch([Slice(one, 0, len(one.tokens)) for one in sequences_of(prompts, decoder.config)])
    with torch.inference_mode():
        logits = decoder.forward(batch, cache_on(device, decoder)).values
        likeliest = decoder.likeliest(batch, cache_on(device, decoder))
    assert torch.equal(likeliest.tokens, logits.argmax(dim=1))
    assert torch.equal(likeliest.tops, logits.max(dim=1).values)


def test_a_step_that_is_moved_stays_the_same_step(tiny_store: Path) -> None:
    prompts = [[5, 7, 11], [3] * 40]
    config = StoreManifest.load(tiny_store).config
    batch = build_batch([Slice(one, 0, len(one.tokens)) for one in sequences_of(prompts, config)])
    moved = batch.on(torch.device("meta"))  # anywhere but here
    assert moved.host is batch and moved.lengths == batch.lengths
    assert moved.page_table.shape == batch.page_table.shape and moved.page_table.device.type == "meta"
    assert batch.on(torch.device("cpu")) is batch and moved.on(torch.device("cpu")) is batch


@pytest.mark.parametrize("device", DEVICES)
def test_the_engine_generates_on_a_device_what_it_generates_on_the_processor(device: str, smollm2_store: Path) -> None:
    config = StoreManifest.load(smollm2_store).config
    placement = whole_placement(config, torch.device(device))
    plan = Plan(placement, "fp32", "fp32", 64, 4, 64, 2**31, device_bytes=2**32)
    prompts = ["The capital of France is", "One, two, three,"]
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    there = Engine.load(smollm2_store, plan=plan, threads=1)
    assert there.stats().kernels == f"torch on {device}"
    here = Engine.load(smollm2_store, compute="fp32", device="cpu", threads=1, memory_bytes=2**31, max_batch=4)
    ours, theirs = (engine.generate(prompts, sampling) for engine in (there, here))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert there.plan == plan


@pytest.mark.gpu
def test_the_engine_takes_a_gpu_where_there_is_one(smollm2_store: Path) -> None:
    engine = Engine.load(smollm2_store, max_batch=8)
    assert engine.stats().kernels == "torch on cuda"
    (completion,) = engine.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0.0))
    assert "Paris" in completion.text


@pytest.mark.gpu
def test_a_gpu_without_room_says_what_would_help(smollm2_store: Path) -> None:
    from inference.errors import MemoryBudgetError

    with pytest.raises(MemoryBudgetError, match="device"):
        Engine.load(smollm2_store, device="cuda", device_bytes=2**20)


def test_a_device_that_is_not_there_is_refused(smollm2_store: Path) -> None:
    for wrong in ("gpu", "cuda:x", "cpu:1", "cuda:99"):
        with pytest.raises(SettingError, match="device"):
            Engine.load(smollm2_store, device=wrong)
    if not torch.cuda.is_available():
        assert chosen_device("auto") is None
        with pytest.raises(SettingError, match="no CUDA device"):
            chosen_device("cuda")


def test_what_fits_is_loaded_whole(tiny_store: Path) -> None:
    config = StoreManifest.load(tiny_store).config
    loaded = load_on_device(
        tiny_store,
        config,
        torch.device("cpu"),
        compute="fp32",
        cache="auto",
        max_batch=2,
        token_budget=64,
        device_bytes=2**28,
    )
    assert loaded.plan is None and not loaded.decoder._weights.streams
    assert loaded.pages == 2 * config.max_context // 32


def test_a_plan_for_a_device_survives_being_written_down(tiny_store: Path) -> None:
    config = StoreManifest.load(tiny_store).config
    placement = replace(
        whole_placement(config, torch.device("cpu")), pinned=frozenset({0}), hosted=frozenset({1, 2}), device_ring=2
    )
    plan = Plan(placement, "bf16", "bf16", 8, 2, 64, 2**30, device_bytes=2**20)
    assert Plan.from_dict(plan.as_dict()) == plan
    old = plan.as_dict()
    del old["device_bytes"]
    for name in ("device", "hosted", "head_hosted", "hosted_cache", "device_ring"):
        del old["placement"][name]
    assert Plan.from_dict(old).placement.device is None  # plans of before are of the processor

"""A model and its cache on a device: whole where they fit, else as a plan spreads them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from inference.cache.pages import pages_for
from inference.device.cache import HostedCache
from inference.device.memory import allocating, free_bytes
from inference.device.sizes import GATHERED, fixed_bytes, tier_bytes
from inference.errors import MemoryBudgetError, SettingError
from inference.fitting import CacheChoice, cache_kind
from inference.kernels.base import Compute, KeyValueCache
from inference.kernels.reference import ReferenceKernels
from inference.memory.budget import default_budget_bytes
from inference.memory.placement import Placement
from inference.model.config import DecoderConfig
from inference.model.decoder import Decoder
from inference.model.layers import LayerReader
from inference.planner.device_planning import make_device_plan
from inference.planner.plan import Plan
from inference.planner.sizes import ModelSizes
from inference.weights.store import StoreReader

logger = logging.getLogger(__name__)

# A cache of fewer tokens is of so little use that weights had better leave the device for it.
LEAST_CACHE_TOKENS = 192


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What was loaded; `plan` is None where all of it lies on the device."""

    decoder: Decoder
    cache: KeyValueCache
    pages: int
    plan: Plan | None = None


def device_compute(choice: Compute | Literal["auto"], device: torch.device) -> Compute:
    """The arithmetic asked for; "auto": bfloat16 where the device has it, else float32."""
    if choice != "auto":
        return choice
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "fp32"
    return "bf16"


def load_on_device(
    store: Path,
    config: DecoderConfig,
    device: torch.device,
    *,
    compute: Compute | Literal["auto"],
    cache: CacheChoice,
    max_batch: int,
    token_budget: int,
    memory_bytes: int | None = None,
    device_bytes: int | None = None,
    images: Path | None = None,
) -> OnDevice:
    """device_bytes: of its memory; None: most of what is free, which only CUDA tells.

    Raises SettingError, StoreError, QuantizationError; MemoryBudgetError where no plan makes it fit.
    """
    if device_bytes is None:
        if device.type != "cuda":
            raise SettingError("device_bytes", f"must be given for {device.type}, which does not tell what is free")
        device_bytes = free_bytes(device)
    kernels = ReferenceKernels(config, device_compute(compute, device), device)
    kind = cache_kind(cache, kernels)
    parts = LayerReader(StoreReader(store), kernels)
    sizes = ModelSizes.of(parts)
    whole = fixed_bytes(sizes, max_batch, token_budget) + sizes.weights + sizes.embedding
    page = sizes.page_of_layer(kind) * (config.layers + GATHERED)
    pages = min((device_bytes - whole) // page, max_batch * pages_for(config.max_context))
    if pages < pages_for(LEAST_CACHE_TOKENS):
        plan = make_device_plan(
            parts,
            cache=kind,
            device_bytes=device_bytes,
            memory_bytes=default_budget_bytes() if memory_bytes is None else memory_bytes,
            max_batch=max_batch,
            token_budget=token_budget,
            images=images,
        )
        return planned_on_device(store, config, plan, images)
    with allocating(device):
        made = KeyValueCache(config, pages, kind, device)
        return OnDevice(Decoder.load(store, kernels), made, pages)


def planned_on_device(store: Path, config: DecoderConfig, plan: Plan, images: Path | None) -> OnDevice:
    """As a plan says whose placement names a device.

    Raises as `load_on_device` does, MemoryBudgetError also where the plan's own figures do not hold the model.
    """
    placement = plan.placement
    assert placement.device is not None
    device = torch.device(placement.device)
    if config.is_foreign:
        raise SettingError("plan", "is for a device; a model in transformers' own code runs on the processor only")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError("plan", f"is for {device}, and PyTorch finds no CUDA device; make one for this host")
    kernels = ReferenceKernels(config, plan.compute, device)
    cache_kind(plan.cache, kernels)  # refuses what they do not read
    parts = LayerReader(StoreReader(store), kernels)
    check_room(ModelSizes.of(parts), plan)
    with allocating(device):
        decoder = Decoder.load(store, kernels, placement, images)
        return OnDevice(decoder, planned_cache(config, plan, device), plan.cache_pages, plan)


def planned_cache(config: DecoderConfig, plan: Plan, device: torch.device) -> KeyValueCache:
    hosted = plan.placement.hosted_cache
    if not hosted:
        return KeyValueCache(config, plan.cache_pages, plan.cache, device)
    return HostedCache(config, plan.cache_pages, plan.cache, device, hosted)


def check_room(sizes: ModelSizes, plan: Plan) -> None:
    """MemoryBudgetError where a tier has less than the plan puts there."""
    need = tier_bytes(
        sizes, plan.placement, plan.cache, plan.cache_pages, max_batch=plan.max_batch, token_budget=plan.token_budget
    )
    if plan.device_bytes is not None and need.device > plan.device_bytes:
        raise MemoryBudgetError(
            f"the plan puts {need.device} bytes on {plan.placement.device}, of which {plan.device_bytes} may be used; "
            "leave more layers in the host's memory, or plan fewer rows or less context"
        )
    if need.host > plan.memory_bytes:
        raise MemoryBudgetError(
            f"the plan puts {need.host} bytes in the host's memory, of which {plan.memory_bytes} may be used; read "
            "more layers from disk, or allow more"
        )


def whole_placement(config: DecoderConfig, device: torch.device) -> Placement:
    """Everything on the device."""
    return Placement(frozenset(range(config.layers)), device=str(device))

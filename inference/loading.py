"""From a path to a running engine's parts: the store (imported where need be), the weights, the cache."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import platformdirs
import torch

from inference.cache.pages import PagePool, pages_for
from inference.cache.spilled import SpilledCache
from inference.device.loading import OnDevice, load_on_device, planned_on_device
from inference.device.memory import chosen_device
from inference.errors import MemoryBudgetError, SettingError, StoreError
from inference.fitting import CacheChoice, cache_kind, cache_pages, fitting_pages, workspace_bytes
from inference.foreign_loading import fitting_placement
from inference.kernels.base import CacheKind, Compute, Kernels, KeyValueCache
from inference.kernels.native import KernelsUnavailable, NativeKernels
from inference.kernels.reference import ReferenceKernels
from inference.memory.allocation import keep_freed_memory
from inference.memory.budget import default_budget_bytes
from inference.memory.folders import images_folder
from inference.model.config import DecoderConfig
from inference.model.decoder import Decoder
from inference.model.foreign import ForeignDecoder
from inference.model.foreign_cache import ForeignCache
from inference.model.layers import LayerReader
from inference.model.linear import fastest_compute
from inference.model.residency import matrices_nbytes
from inference.planner.plan import Plan
from inference.planner.planning import make_plan
from inference.planner.sizes import ModelSizes
from inference.planner.workload import Workload
from inference.tokenizer import Tokenizer
from inference.weights.importer import import_model
from inference.weights.manifest import FORMAT_VERSION, MANIFEST_NAME, StoreManifest
from inference.weights.store import StoreReader
from inference.weights.tokenizer_files import TOKENIZER_NAME

logger = logging.getLogger(__name__)

ComputeChoice = Literal["auto", "fp32", "bf16", "int8"]
_USUAL_PROMPT_TOKENS, _USUAL_NEW_TOKENS = 256, 128
# A cache of fewer tokens is of so little use that a part of the weights had better be streamed.
_LEAST_CACHE_TOKENS = 192
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its cache. `tokenizer` is None for a store without one, `plan` where all was loaded without one."""

    store: Path
    manifest: StoreManifest
    decoder: Decoder
    tokenizer: Tokenizer | None
    cache: KeyValueCache
    pages: PagePool
    compute: Compute
    plan: Plan | None = None

    @property
    def sequence_pages(self) -> int:
        """Cache pages that one sequence can have."""
        return min(self.pages.total, self.cache.sequence_pages)


def store_at(path: Path) -> Path:
    """The weight store of a path: itself, or the import of a GGUF file or Hugging Face folder, kept in a user cache.

    The cached import is found again by the source's place, size and time of change.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    source = path.resolve()
    if not source.exists():
        raise StoreError(path, "does not exist; a store, a GGUF file or a Hugging Face folder is expected")
    files = [source] if source.is_file() else sorted(file for file in source.iterdir() if file.is_file())
    marks = "\n".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    key = hashlib.sha256(f"{FORMAT_VERSION}\n{marks}".encode()).hexdigest()[:16]
    store = Path(platformdirs.user_cache_dir("penstock")) / "stores" / key
    if not (store / MANIFEST_NAME).is_file():
        logger.info("importing %s into %s", source, store)
        try:
            import_model(source, store)
        except StoreError:
            # Another process may have finished the same import first; any other trouble shows when it is read.
            if not (store / MANIFEST_NAME).is_file():
                raise
    return store


def load_model(
    path: Path | str,
    *,
    compute: ComputeChoice,
    cache: CacheChoice = "auto",
    max_batch: int,
    token_budget: int,
    memory_bytes: int | None,
    plan: Plan | None = None,
    images: Path | None = None,
    device: str = "cpu",
    device_bytes: int | None = None,
) -> LoadedModel:
    """A model and its cache: in memory where both fit, else as a plan puts them, which is made now unless given.

    plan: decides about compute, cache and all sizes, whatever is given besides. Without one, what does not fit is
    planned for as many rows as max_batch says; the host is measured first where that has not been done.
    images: the folder of layer images and of a spilled cache, by default as `images_folder` says.
    device: "auto", "cpu", "cuda" or "cuda:N"; on CUDA, device_bytes of its memory are used, by default most of what is
    free. A model that only transformers' own code runs stays on the processor.
    Raises SettingError, ModelFormatError, StoreError, QuantizationError, MemoryBudgetError.
    """
    if compute not in ("auto", *_WEIGHT_BYTES):
        raise SettingError("compute", f"is {compute!r}; auto, {', '.join(_WEIGHT_BYTES)} are known")
    target = chosen_device(device) if plan is None else None
    numbers = {
        "max_batch": max_batch,
        "token_budget": token_budget,
        "memory_bytes": memory_bytes,
        "device_bytes": device_bytes,
    }
    for setting, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(setting, f"must be a whole number of at least 1, not {value!r}")
    keep_freed_memory()
    store = store_at(Path(path))
    manifest = StoreManifest.load(store)
    if plan is not None:
        return _as_given(store, manifest, plan, images)
    config = manifest.config
    if target is not None and not config.is_foreign:
        loaded = load_on_device(
            store,
            config,
            target,
            compute=compute,
            cache=cache,
            max_batch=max_batch,
            token_budget=token_budget,
            memory_bytes=memory_bytes,
            device_bytes=device_bytes,
            images=images,
        )
        return _from_device(store, manifest, loaded)
    budget = default_budget_bytes() if memory_bytes is None else memory_bytes
    chosen: Compute = fastest_compute() if compute == "auto" else compute
    tokenizer = Tokenizer.load(store) if TOKENIZER_NAME in manifest.tokenizer_files else None
    if config.is_foreign:
        placement, room = None, budget - workspace_bytes(config, max_batch, token_budget)
        if room < manifest.parameters * _WEIGHT_BYTES[chosen]:
            placement = fitting_placement(store, chosen, room)
        foreign = ForeignDecoder.open(store, config, chosen, placement, images)
        total = fitting_pages(config, foreign.page_bytes, budget - foreign.nbytes, max_batch, token_budget)
        return _foreign(store, manifest, foreign, tokenizer, total, chosen)
    kernels = choose_kernels(config, chosen)
    kind = cache_kind(cache, kernels)
    parts = LayerReader(StoreReader(store), kernels)
    if budget < _least_bytes(parts, kind, max_batch, token_budget):
        plan = make_plan(
            parts,
            compute=chosen,
            cache=kind,
            workload=_usual_workload(config, max_batch),
            memory_bytes=budget,
            threads=torch.get_num_threads(),
            images=images,
        )
        return _planned(store, manifest, plan, images)
    decoder = Decoder.load(store, kernels)
    total = cache_pages(config, kind, budget - decoder.nbytes, max_batch, token_budget)
    pages = KeyValueCache(config, total, kind)
    return LoadedModel(store, manifest, decoder, tokenizer, pages, PagePool(total, pages.clear, pages.copy), chosen)


def resident_bytes(path: Path | str, *, max_batch: int, token_budget: int) -> int:
    """The least memory_bytes with which a model is loaded whole, at what "auto" chooses. Raises StoreError."""
    store = store_at(Path(path))
    manifest = StoreManifest.load(store)
    compute = fastest_compute()
    if manifest.config.is_foreign:
        return manifest.parameters * _WEIGHT_BYTES[compute] + workspace_bytes(manifest.config, max_batch, token_budget)
    kernels = choose_kernels(manifest.config, compute)
    return _least_bytes(LayerReader(StoreReader(store), kernels), kernels.cache_kinds[0], max_batch, token_budget)


def _usual_workload(config: DecoderConfig, rows: int) -> Workload:
    """What an engine is planned for whose requests nobody knows yet."""
    prompt = min(_USUAL_PROMPT_TOKENS, -(-config.max_context // 2))
    return Workload.uniform(rows, prompt, max(1, min(_USUAL_NEW_TOKENS, config.max_context - prompt)))


def _least_bytes(parts: LayerReader, kind: CacheKind, max_batch: int, token_budget: int) -> int:
    """Bytes of memory with which nothing needs to be streamed."""
    sizes = ModelSizes.of(parts)
    page = parts.config.layers * sizes.page_of_layer(kind)
    whole = matrices_nbytes(parts) + sizes.embedding
    return whole + workspace_bytes(parts.config, max_batch, token_budget) + page * pages_for(_LEAST_CACHE_TOKENS)


def _as_given(store: Path, manifest: StoreManifest, plan: Plan, images: Path | None) -> LoadedModel:
    """`_planned` by a plan that someone else made, maybe for another model or host."""
    try:
        return _planned(store, manifest, plan, images)
    except ValueError as error:
        raise SettingError("plan", str(error)) from None
    except MemoryError as error:
        raise MemoryBudgetError(f"the plan needs more memory than can be had: {error}") from None


def _planned(store: Path, manifest: StoreManifest, plan: Plan, images: Path | None) -> LoadedModel:
    config = manifest.config
    if plan.placement.device is not None:
        return _from_device(store, manifest, planned_on_device(store, config, plan, images))
    tokenizer = Tokenizer.load(store) if TOKENIZER_NAME in manifest.tokenizer_files else None
    if config.is_foreign:
        foreign = ForeignDecoder.open(store, config, plan.compute, plan.placement, images)
        return replace(_foreign(store, manifest, foreign, tokenizer, plan.cache_pages, plan.compute), plan=plan)
    kernels = choose_kernels(config, plan.compute)
    kind = cache_kind(plan.cache, kernels)
    # The cache first: a disk that has no room for it shows before the weights are read.
    pages = _planned_cache(config, plan, kind, images)
    decoder = Decoder.load(store, kernels, plan.placement, images)
    pool = PagePool(plan.cache_pages, pages.clear, pages.copy)
    return LoadedModel(store, manifest, decoder, tokenizer, pages, pool, plan.compute, plan)


def _from_device(store: Path, manifest: StoreManifest, loaded: OnDevice) -> LoadedModel:
    tokenizer = Tokenizer.load(store) if TOKENIZER_NAME in manifest.tokenizer_files else None
    cache, decoder = loaded.cache, loaded.decoder
    pool = PagePool(loaded.pages, cache.clear, cache.copy)
    return LoadedModel(store, manifest, decoder, tokenizer, cache, pool, decoder.kernels.compute, loaded.plan)


def _foreign(
    store: Path,
    manifest: StoreManifest,
    decoder: ForeignDecoder,
    tokenizer: Tokenizer | None,
    total: int,
    compute: Compute,
) -> LoadedModel:
    cache = ForeignCache(decoder.shapes, total)
    return LoadedModel(store, manifest, decoder, tokenizer, cache, PagePool(total, cache.clear, cache.copy), compute)


def _planned_cache(config: DecoderConfig, plan: Plan, kind: CacheKind, images: Path | None) -> KeyValueCache:
    placement = plan.placement
    if not placement.spilled:
        return KeyValueCache(config, plan.cache_pages, kind)
    # What is streamed lies on the same disk: the plan has measured that one.
    return SpilledCache(config, plan.cache_pages, kind, placement.spilled, images_folder(images))


def choose_kernels(config: DecoderConfig, compute: Compute) -> Kernels:
    """The compiled kernels where this host can compile them, else the reference. PENSTOCK_KERNELS=torch: the latter."""
    if os.environ.get("PENSTOCK_KERNELS", "auto") != "torch":
        try:
            return NativeKernels(config, compute)
        except KernelsUnavailable as error:
            logger.warning("no compiled kernels, PyTorch's are used and are slower: %s", error)
    return ReferenceKernels(config, compute)

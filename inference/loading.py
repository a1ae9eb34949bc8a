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
from inference.errors import MemoryBudgetError, SettingError, StoreError
from inference.foreign_loading import fitting_placement
from inference.kernels.base import CacheKind, Compute, Kernels, KeyValueCache, page_head_bytes
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
from inference.scheduler import CHUNK_TOKENS
from inference.tokenizer import Tokenizer
from inference.weights.importer import import_model
from inference.weights.manifest import FORMAT_VERSION, MANIFEST_NAME, StoreManifest
from inference.weights.store import StoreReader
from inference.weights.tokenizer_files import TOKENIZER_NAME

logger = logging.getLogger(__name__)

ComputeChoice = Literal["auto", "fp32", "bf16", "int8"]
CacheChoice = Literal["auto", "fp32", "bf16", "int8", "int4"]
_USUAL_PROMPT_TOKENS, _USUAL_NEW_TOKENS = 256, 128
# A cache of fewer tokens is of so little use that a part of the weights had better be streamed.
_LEAST_CACHE_TOKENS = 192
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its cache. `tokenizer` is None for a store without one, `plan` where all was loaded without one."""

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
) -> LoadedModel:
    """A model and its cache: in memory where both fit, else as a plan puts them, which is made now unless given.

    plan: decides about compute, cache and all sizes, whatever is given besides. Without one, what does not fit is
    planned for as many rows as max_batch says; the host is measured first where that has not been done.
    images: the folder of layer images and of a spilled cache, by default as `images_folder` says.
    Raises SettingError, ModelFormatError, StoreError, QuantizationError, MemoryBudgetError.
    """
    if compute not in ("auto", *_WEIGHT_BYTES):
        raise SettingError("compute", f"is {compute!r}; auto, {', '.join(_WEIGHT_BYTES)} are known")
    for setting, value in (("max_batch", max_batch), ("token_budget", token_budget), ("memory_bytes", memory_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(setting, f"must be a whole number of at least 1, not {value!r}")
    keep_freed_memory()
    store = store_at(Path(path))
    manifest = StoreManifest.load(store)
    if plan is not None:
        return _as_given(store, manifest, plan, images)
    config = manifest.config
    budget = default_budget_bytes() if memory_bytes is None else memory_bytes
    chosen: Compute = fastest_compute() if compute == "auto" else compute
    tokenizer = Tokenizer.load(store) if TOKENIZER_NAME in manifest.tokenizer_files else None
    if config.is_foreign:
        placement, room = None, budget - workspace_bytes(config, max_batch, token_budget)
        if room < manifest.parameters * _WEIGHT_BYTES[chosen]:
            placement = fitting_placement(store, chosen, room)
        foreign = ForeignDecoder.open(store, config, chosen, placement, images)
        total = fitting_pages(config, foreign.page_bytes, budget - foreign.nbytes, max_batch, token_budget)
        return _foreign(manifest, foreign, tokenizer, total, chosen)
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
    return LoadedModel(manifest, decoder, tokenizer, pages, PagePool(total, pages.clear, pages.copy), chosen)


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
    tokenizer = Tokenizer.load(store) if TOKENIZER_NAME in manifest.tokenizer_files else None
    if config.is_foreign:
        foreign = ForeignDecoder.open(store, config, plan.compute, plan.placement, images)
        return replace(_foreign(manifest, foreign, tokenizer, plan.cache_pages, plan.compute), plan=plan)
    kernels = choose_kernels(config, plan.compute)
    kind = cache_kind(plan.cache, kernels)
    # The cache first: a disk that has no room for it shows before the weights are read.
    pages = _planned_cache(config, plan, kind, images)
    decoder = Decoder.load(store, kernels, plan.placement, images)
    pool = PagePool(plan.cache_pages, pages.clear, pages.copy)
    return LoadedModel(manifest, decoder, tokenizer, pages, pool, plan.compute, plan)


def _foreign(
    manifest: StoreManifest, decoder: ForeignDecoder, tokenizer: Tokenizer | None, total: int, compute: Compute
) -> LoadedModel:
    cache = ForeignCache(decoder.shapes, total)
    return LoadedModel(manifest, decoder, tokenizer, cache, PagePool(total, cache.clear, cache.copy), compute)


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


def cache_kind(choice: CacheChoice, kernels: Kernels) -> CacheKind:
    """The cache asked for, or the kernels' own choice; SettingError where they cannot read it."""
    if choice == "auto":
        return kernels.cache_kinds[0]
    if choice not in kernels.cache_kinds:
        raise SettingError("cache", f"is {choice!r}; the {kernels.name} kernels read {', '.join(kernels.cache_kinds)}")
    return choice


def workspace_bytes(config: DecoderConfig, max_batch: int, token_budget: int) -> int:
    """An upper bound of the activations of one step: float32 rows, several at a time, and the logits twice."""
    rows = max(token_budget, max_batch) + CHUNK_TOKENS
    widest = 2 * config.widest + 4 * config.hidden_size + config.query_size + 2 * config.kv_size
    return rows * widest * 4 * 2 + max_batch * config.vocab_size * 4 * 2


def cache_pages(config: DecoderConfig, kind: CacheKind, free_bytes: int, max_batch: int, token_budget: int) -> int:
    """`fitting_pages` of this model's cache of that kind."""
    page_bytes = config.layers * config.kv_heads * page_head_bytes(kind, config.head_dim)
    return fitting_pages(config, page_bytes, free_bytes, max_batch, token_budget)


def fitting_pages(config: DecoderConfig, page_bytes: int, free_bytes: int, max_batch: int, token_budget: int) -> int:
    """Pages that fit into the free bytes; never more than max_batch sequences of full length can use.

    MemoryBudgetError where not one does.
    """
    workspace = workspace_bytes(config, max_batch, token_budget)
    fitting = (free_bytes - workspace) // page_bytes
    if fitting < 1:
        raise MemoryBudgetError(
            f"the budget leaves no room for a cache: {max(0, free_bytes)} bytes are left beside the weights, for "
            f"{workspace} bytes of workspace and pages of {page_bytes}; allow more, or a smaller max_batch"
        )
    return int(min(fitting, max_batch * pages_for(config.max_context)))

"""From a store and a workload to a plan: sizes from the manifest, rates measured or kept, then the search."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from inference.kernels.base import CacheKind, Compute
from inference.memory.allocation import keep_freed_memory
from inference.memory.folders import images_folder
from inference.model.layers import LayerReader
from inference.planner.disk import disk_rate
from inference.planner.layer_rates import layer_rates
from inference.planner.plan import Plan
from inference.planner.search import Ask, Ground, check, search
from inference.planner.sizes import ModelSizes
from inference.planner.workload import Workload
from inference.quant.rotated import ENCODING as ROTATED

logger = logging.getLogger(__name__)


def make_plan(
    parts: LayerReader,
    *,
    compute: Compute,
    cache: CacheKind,
    workload: Workload,
    memory_bytes: int,
    process_bytes: int = 0,
    disk_bytes: int | None = None,
    threads: int,
    max_batch: int | None = None,
    token_budget: int | None = None,
    images: Path | None = None,
    other_caches: tuple[CacheKind, ...] = (),
    again: bool = False,
) -> Plan:
    """The fastest way to do a workload with a store's model in so much memory, before more than a layer is loaded.

    memory_bytes: for weights, cache and activations, and for process_bytes that the process takes besides
    (`memory.budget` tells). disk_bytes: for the layer image and spilled keys and values, by default what is free.
    max_batch, token_budget: fixed; None: chosen. images: where layer images lie, by default `images_folder()`.
    other_caches: to be compared with. again: measure whatever was kept.
    Raises MemoryBudgetError, which says what would work, StoreError, QuantizationError.
    """
    keep_freed_memory()  # as the engine does, so that what is measured is what will be
    folder = images_folder(images)
    encodings = {tensor.encoding for tensor in parts.reader.manifest.tensors if len(tensor.shape) == 2}
    ask = Ask(
        sizes=ModelSizes.of(parts),
        compute=compute,
        cache=cache,
        rows_at_once=parts.kernels.rows_at_once,
        memory_bytes=memory_bytes,
        process_bytes=process_bytes,
        disk_bytes=disk_left_bytes(folder, parts.reader.manifest.digest) if disk_bytes is None else disk_bytes,
        workload=workload,
        max_batch=max_batch,
        token_budget=token_budget,
        could_shrink=ROTATED not in encodings,
    )
    check(ask)  # before anything is measured
    logger.info("measuring the disk at %s and a layer, where that has not been done before", folder)
    rates = layer_rates(
        parts,
        (cache, *other_caches),
        compute=compute,
        threads=threads,
        folder=folder,
        room_bytes=ask.room_bytes - process_bytes,
        again=again,
    )
    return search(Ground(ask, rates, disk_rate(folder, again=again)))


def disk_left_bytes(folder: Path, digest: str) -> int:
    """What a model's layer image and spilled cache may take: what is free, and what an image of it takes already."""
    folder.mkdir(parents=True, exist_ok=True)
    made = sum(file.stat().st_size for file in folder.glob(f"{digest[:16]}-*/*") if file.is_file())
    return int(psutil.disk_usage(str(folder)).free) + made

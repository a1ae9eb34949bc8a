"""From a store and a workload to a plan: sizes from the manifest, rates measured or kept, then the search."""

from __future__ import annotations

import logging
from pathlib import Path

from inference.kernels.base import CacheKind, Compute
from inference.memory.image_making import images_folder
from inference.model.layers import LayerReader
from inference.planner.disk import disk_rate
from inference.planner.layer_rates import layer_rates
from inference.planner.plan import Plan
from inference.planner.search import Ground, search
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
    threads: int,
    max_batch: int | None = None,
    token_budget: int | None = None,
    images: Path | None = None,
    other_caches: tuple[CacheKind, ...] = (),
    again: bool = False,
) -> Plan:
    """The fastest way to do a workload with a store's model in so much memory; nothing of it is loaded but one layer.

    memory_bytes: for weights, cache and activations. max_batch, token_budget: fixed; None: chosen. images: where layer
    images lie, by default `images_folder()`. other_caches: to be compared with. again: measure whatever was kept.
    Raises MemoryBudgetError, which says what would work, StoreError, QuantizationError.
    """
    folder = images_folder(images)
    logger.info("measuring the disk at %s and a layer, where that has not been done before", folder)
    rates = {
        kind: layer_rates(parts, kind, compute=compute, threads=threads, folder=folder, again=again)
        for kind in (cache, *other_caches)
    }
    encodings = {tensor.encoding for tensor in parts.reader.manifest.tensors if len(tensor.shape) == 2}
    return search(
        Ground(
            sizes=ModelSizes.of(parts),
            rates=rates,
            disk=disk_rate(folder, again=again),
            compute=compute,
            rows_at_once=parts.kernels.rows_at_once,
            memory_bytes=memory_bytes,
            workload=workload,
            max_batch=max_batch,
            token_budget=token_budget,
            could_shrink=ROTATED not in encodings,
        ),
        cache,
    )

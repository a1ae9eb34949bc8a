"""What the steps of a loaded model should take, by the rates that its plan rests on, or would rest on."""

from __future__ import annotations

from dataclasses import replace

from inference.kernels.base import CacheKind
from inference.loading import LoadedModel
from inference.memory.folders import images_folder
from inference.model.layers import LayerReader
from inference.planner.cost import StepCost
from inference.planner.layer_rates import layer_rates
from inference.planner.sizes import ModelSizes
from inference.weights.store import StoreReader


def step_cost(model: LoadedModel, *, threads: int) -> StepCost | None:
    """By a layer's rates on this host, measured in some seconds unless that has been done for such a model before.

    None on a device, for a model that only transformers' own code runs, and for a plan that promises nothing.
    Raises StoreError, QuantizationError.
    """
    decoder, plan = model.decoder, model.plan
    if decoder.kernels.device.type != "cpu" or model.manifest.config.is_foreign:
        return None
    parts = LayerReader(StoreReader(model.store), decoder.kernels)
    kind: CacheKind = model.cache.kind
    on_disk = plan is not None and (plan.placement.ring > 0 or bool(plan.placement.spilled))
    if plan is not None and on_disk and plan.predicted is None:
        return None
    folder = images_folder(None) if on_disk else None
    rates = layer_rates(parts, (kind,), compute=model.compute, threads=threads, folder=folder, once=True)
    cost = StepCost(rates, kind, parts.config.layers)
    if plan is None or plan.predicted is None or not on_disk:
        return cost
    return replace(
        cost,
        streamed_bytes=plan.predicted.streamed_bytes_per_step,
        spilled_page_bytes=len(plan.placement.spilled) * ModelSizes.of(parts).page_of_layer(kind),
        read_bytes_per_s=plan.hardware["stream_bytes_per_s"],
        write_bytes_per_s=plan.hardware["disk_write_bytes_per_s"],
    )

"""From a store, a device and a workload to a plan over three tiers: rates measured or kept, then batch sizes tried."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from inference.cache.pages import pages_for
from inference.device.sizes import tier_bytes
from inference.errors import MemoryBudgetError
from inference.kernels.base import CacheKind
from inference.memory.folders import images_folder
from inference.memory.placement import Placement
from inference.model.layers import LayerReader
from inference.planner.device_placing import RING, OnTiers, Room, Rows, place
from inference.planner.device_rates import DeviceRates, device_rates
from inference.planner.disk import disk_rate
from inference.planner.plan import Neighbour, Plan, Predicted
from inference.planner.planning import disk_left_bytes
from inference.planner.sizes import ModelSizes
from inference.planner.workload import Workload

logger = logging.getLogger(__name__)
_USUAL_PROMPT_TOKENS, _USUAL_NEW_TOKENS = 256, 128


@dataclass(frozen=True, slots=True)
class _Candidate:
    rows: Rows
    tiers: OnTiers
    predicted: Predicted


def make_device_plan(
    parts: LayerReader,
    *,
    cache: CacheKind,
    device_bytes: int,
    memory_bytes: int,
    max_batch: int,
    token_budget: int,
    workload: Workload | None = None,
    images: Path | None = None,
    rates: DeviceRates | None = None,
    disk_bytes_per_s: float | None = None,
    again: bool = False,
) -> Plan:
    """The fastest way to do a workload with a store's model on the device of its kernels.

    device_bytes, memory_bytes: of the device's and of the host's memory. max_batch: at most; fewer where that leaves
    more room for weights and is faster. workload: by default as many rows as that, of middling length. rates,
    disk_bytes_per_s: measured where they are not given, the disk only where both memories together are too small.
    again: measure whatever was kept.
    Raises MemoryBudgetError, which says what would work; StoreError, QuantizationError.
    """
    config, device = parts.config, str(parts.kernels.device)
    if workload is None:
        prompt = min(_USUAL_PROMPT_TOKENS, -(-config.max_context // 2))
        workload = Workload.uniform(max_batch, prompt, max(1, min(_USUAL_NEW_TOKENS, config.max_context - prompt)))
    sizes, folder = ModelSizes.of(parts), images_folder(images)
    _check(sizes, cache, workload, token_budget, device_bytes, device)
    rates = rates or device_rates(parts, cache, again=again)

    def tried(disk: float) -> list[_Candidate]:
        left = disk_left_bytes(folder, parts.reader.manifest.digest)
        room = Room(device_bytes, memory_bytes, left, rates.to_device_bytes_per_s, disk)
        counts = sorted({min(max_batch, workload.rows, 1 << power) for power in range(max_batch.bit_length() + 1)})
        found = [_candidate(sizes, cache, workload, count, token_budget, room, rates, device) for count in counts]
        return [one for one in found if one is not None]

    candidates = tried(0.0)
    if not candidates:
        disk_bytes_per_s = disk_bytes_per_s or disk_rate(folder).bytes_per_s
        candidates = tried(disk_bytes_per_s)
    if not candidates:
        raise MemoryBudgetError(
            f"{device_bytes} bytes of {device} and {memory_bytes} of the host's memory do not hold what a step of one "
            "row needs, even with layers on disk; allow more of the host's memory, or of the disk for the layers' image"
        )
    best = max(candidates, key=lambda one: one.predicted.output_tokens_per_s)
    logger.info(
        "%s: %d of %d layers on the device, %d in the host's memory, %d rows",
        device,
        len(best.tiers.placement.pinned),
        config.layers,
        len(best.tiers.placement.hosted),
        best.rows.max_batch,
    )
    return Plan(
        placement=best.tiers.placement,
        compute=parts.kernels.compute,
        cache=cache,
        cache_pages=best.rows.pages,
        max_batch=best.rows.max_batch,
        token_budget=token_budget,
        memory_bytes=memory_bytes,
        device_bytes=device_bytes,
        workload=workload,
        predicted=best.predicted,
        hardware={
            "to_device_bytes_per_s": rates.to_device_bytes_per_s,
            "disk_bytes_per_s": disk_bytes_per_s or 0.0,
        },
        neighbours=tuple(_neighbour(one) for one in candidates if one is not best),
    )


def _row_pages(workload: Workload) -> int:
    """Of the longest row; a prompt is begun only where a page more than its own is free."""
    return max(pages_for(workload.context), pages_for(workload.prompt.largest) + 1)


def _check(
    sizes: ModelSizes, cache: CacheKind, workload: Workload, token_budget: int, device_bytes: int, device: str
) -> None:
    """MemoryBudgetError where the device is too small whatever is left in the host's memory. Nothing is measured."""
    layers = frozenset(range(sizes.config.layers))
    least = Placement(
        pinned=frozenset(),
        head_pinned=not sizes.head,
        head_hosted=bool(sizes.head),
        embedding_pinned=False,
        readers=1,
        device=device,
        hosted=layers,
        device_ring=RING,
    )
    pages = _row_pages(workload)
    # Of the cache only the buffers, where a row fits into them; tier_bytes of a hosted cache knows.
    needed = min(
        tier_bytes(sizes, placement, cache, pages, max_batch=1, token_budget=token_budget).device
        for placement in (least, _with_hosted_cache(least, layers))
    )
    if needed > device_bytes:
        raise MemoryBudgetError(
            f"{device_bytes} bytes of {device} are too few: buffers for {RING} layers, one row's keys and values and a "
            f"step's activations need {needed}. Allow that much of the device, or less context or a smaller "
            "token_budget, or use the processor (device cpu)"
        )


def _with_hosted_cache(placement: Placement, layers: frozenset[int]) -> Placement:
    return Placement.from_dict(placement.as_dict() | {"hosted_cache": sorted(layers)})


def _candidate(
    sizes: ModelSizes,
    cache: CacheKind,
    workload: Workload,
    count: int,
    token_budget: int,
    room: Room,
    rates: DeviceRates,
    device: str,
) -> _Candidate | None:
    context = workload.prompt.mean + workload.new.mean / 2
    rows = Rows(count, token_budget, context, workload.context, count * _row_pages(workload))
    layers = sizes.config.layers
    decoding = rates.step_seconds(layers, count, count, count * context)
    tiers = place(sizes, cache, rows, room, device, decoding)
    if tiers is None:
        return None
    moving = {
        "copies": tiers.copied_bytes / room.copy_bytes_per_s,
        "disk": tiers.read_bytes / room.disk_bytes_per_s if tiers.read_bytes else 0.0,
    }
    step = max(decoding, *moving.values())
    chunk = min(token_budget, count * workload.prompt.mean)
    prefill = max(rates.step_seconds(layers, chunk, 1, chunk * workload.prompt.mean / 2), *moving.values())
    prompts = workload.rows * workload.prompt.mean
    prefill_steps, decode_steps = prompts / chunk, workload.new.mean * workload.rows / count
    prefill_seconds, decode_seconds = prefill_steps * prefill, decode_steps * step
    output = workload.rows * workload.new.mean
    times = {"arithmetic": decoding, **moving}
    predicted = Predicted(
        prefill_tokens_per_s=prompts / prefill_seconds,
        decode_tokens_per_s=output / decode_seconds,
        output_tokens_per_s=output / (prefill_seconds + decode_seconds),
        seconds=prefill_seconds + decode_seconds,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        step_seconds=step,
        longest_step_seconds=max(step, prefill),
        steps=math.ceil(prefill_steps + decode_steps),
        peak_memory_bytes={"device": tiers.bytes.device, "host": tiers.bytes.host, "disk": tiers.bytes.disk},
        streamed_bytes_per_step=tiers.copied_bytes,
        bound_by=max(times, key=lambda name: times[name]),
    )
    return _Candidate(rows, tiers, predicted)


def _neighbour(one: _Candidate) -> Neighbour:
    return Neighbour(
        f"{one.rows.max_batch} rows at a time",
        one.predicted.output_tokens_per_s,
        f"a step takes {one.predicted.step_seconds:.4f} s, bound by {one.predicted.bound_by}",
    )

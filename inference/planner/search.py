"""Choosing a plan: the batch and the rows of a step by search, what stays in memory by a linear program.

For each batch size and token budget the program decides how many layers' weights, the head and the embedding stay in
memory, so that what a step reads is least, within the memory that is left (FlexGen's policy search, arXiv 2303.06865,
section 4.3, over whole layers). The workload is then run through the cost model, and the fastest plan wins. What fits
is never streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from inference.cache.pages import PAGE_TOKENS, pages_for
from inference.errors import MemoryBudgetError
from inference.kernels.base import CacheKind, Compute
from inference.memory.placement import Placement
from inference.planner.cost import Estimate, StepCost, decode_load, estimate
from inference.planner.disk import READERS, DiskRate
from inference.planner.layer_rates import LayerRates
from inference.planner.plan import Neighbour, Plan, Predicted
from inference.planner.sizes import ModelSizes
from inference.planner.workload import Workload

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKEN_BUDGETS = (256, 512, 1024, 2048)
RING = 3
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Ground:
    """All that a plan rests on. memory_bytes: for the model, its cache and the steps' activations together. max_batch,
    token_budget: where they are not to be chosen. could_shrink: the store's weights are wider than 4 bits.
    """

    sizes: ModelSizes
    rates: dict[CacheKind, LayerRates]
    disk: DiskRate
    compute: Compute
    rows_at_once: int | None
    memory_bytes: int
    workload: Workload
    max_batch: int | None = None
    token_budget: int | None = None
    could_shrink: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    max_batch: int
    token_budget: int
    cache: CacheKind
    placement: Placement
    cache_pages: int
    host_bytes: int
    disk_bytes: int
    streamed_bytes: int
    run: Estimate
    cost: StepCost


def search(ground: Ground, cache: CacheKind) -> Plan:
    """The fastest plan with that cache. MemoryBudgetError, saying what would work, where there is none."""
    candidates = list(_candidates(ground, cache))
    if not candidates:
        raise MemoryBudgetError(_what_would_work(ground, cache))
    limit = ground.workload.step_seconds
    soon = [one for one in candidates if limit is None or one.run.longest_step <= limit]
    # Where no plan keeps the limit, the one that misses it least.
    best = min(soon, key=lambda one: one.run.seconds) if soon else min(candidates, key=lambda one: one.run.longest_step)
    return _plan(ground, best, tuple(_neighbours(ground, best)))


def _candidates(ground: Ground, cache: CacheKind) -> Iterator[_Candidate]:
    most = ground.workload.rows if ground.max_batch is None else ground.max_batch
    batches = [size for size in BATCHES if size < most] + [min(most, BATCHES[-1])]
    if ground.max_batch is not None:
        batches = [ground.max_batch]
    budgets = TOKEN_BUDGETS if ground.token_budget is None else (ground.token_budget,)
    for max_batch in batches:
        for token_budget in budgets:
            found = _candidate(ground, cache, max_batch, token_budget)
            if found is not None:
                yield found


def _candidate(
    ground: Ground, cache: CacheKind, max_batch: int, token_budget: int, fewer_pinned: int = 0
) -> _Candidate | None:
    """The placement that reads least for that batch; None where it does not fit."""
    sizes, workload = ground.sizes, ground.workload
    layers = len(sizes.layers)
    pages = max_batch * pages_for(workload.context)
    cache_bytes = pages * layers * sizes.page_of_layer(cache)
    fixed = cache_bytes + sizes.small + sizes.workspace(max_batch, token_budget, ground.rows_at_once)
    left = ground.memory_bytes - fixed
    if left >= sizes.weights + sizes.embedding and not fewer_pinned:
        placement, host = Placement.resident(layers), fixed + sizes.weights + sizes.embedding
    else:
        left -= RING * sizes.largest_unit
        pinned, head, embedding = _pinned(sizes, left, token_budget)
        pinned -= fewer_pinned
        if pinned < 0:
            return None
        placement = Placement(
            pinned=_spread(layers, pinned), head_pinned=head, embedding_pinned=embedding, ring=RING, readers=READERS
        )
        host = fixed + RING * sizes.largest_unit + sum(sizes.layers[index] for index in placement.pinned)
        host += (sizes.head if head else 0) + (sizes.embedding if embedding else 0)
    streamed = sum(size for index, size in enumerate(sizes.layers) if index not in placement.pinned)
    streamed += 0 if placement.head_pinned else sizes.head
    cost = StepCost(ground.rates[cache], layers, streamed, 0.0, ground.disk.bytes_per_s)
    run = estimate(workload, max_batch, token_budget, cost)
    disk_bytes = sizes.weights if streamed else 0
    return _Candidate(max_batch, token_budget, cache, placement, pages, host, disk_bytes, streamed, run, cost)


def _pinned(sizes: ModelSizes, left: int, token_budget: int) -> tuple[int, bool, bool]:
    """How many layers, and whether the head and the embedding, stay in memory so that a step reads least.

    (-1, ...) where not even nothing fits. Layers count with their mean size, and are then rounded down to what fits.
    """
    layers = len(sizes.layers)
    layer = sum(sizes.layers) / layers
    row = sizes.embedding / sizes.config.vocab_size
    saved = np.array([layer, sizes.head, min(sizes.embedding, token_budget * row)])
    taken = np.array([layer, sizes.head, sizes.embedding])
    if left < 0:
        return -1, False, False
    found = milp(
        c=-saved,
        integrality=np.ones(3),
        bounds=Bounds(np.zeros(3), np.array([layers, 1 if sizes.head else 0, 1])),
        constraints=LinearConstraint(taken[None, :], -np.inf, left),
    )
    count, head, embedding = (round(value) for value in found.x)
    placed = (sizes.head if head else 0) + (sizes.embedding if embedding else 0)
    while count and sum(sizes.layers[index] for index in _spread(layers, count)) + placed > left:
        count -= 1
    return count, bool(head) or not sizes.head, bool(embedding)


def _spread(layers: int, pinned: int) -> frozenset[int]:
    """Which to pin of the layers: the streamed ones lie as far apart as can be, so that the disk is never idle."""
    streamed = layers - pinned
    apart = {int((index + 0.5) * layers / streamed) for index in range(streamed)}
    return frozenset(range(layers)) - apart


def _plan(ground: Ground, best: _Candidate, neighbours: tuple[Neighbour, ...]) -> Plan:
    workload, run = ground.workload, best.run
    load = decode_load(workload, min(best.max_batch, workload.rows))
    output = workload.rows * workload.new.mean
    arithmetic = best.cost.arithmetic_seconds(load)
    predicted = Predicted(
        prefill_tokens_per_s=workload.rows * workload.prompt.mean / run.prefill_seconds,
        decode_tokens_per_s=output / run.decode_seconds if run.decode_seconds else 0.0,
        output_tokens_per_s=output / run.seconds,
        seconds=run.seconds,
        prefill_seconds=run.prefill_seconds,
        decode_seconds=run.decode_seconds,
        step_seconds=best.cost.seconds(load),
        steps=run.steps,
        peak_memory_bytes={"host": best.host_bytes, "disk": best.disk_bytes},
        streamed_bytes_per_step=best.streamed_bytes,
        bound_by="disk" if run.disk_bound_seconds > run.seconds / 2 else "arithmetic",
    )
    return Plan(
        placement=best.placement,
        compute=ground.compute,
        cache=best.cache,
        cache_pages=best.cache_pages,
        max_batch=best.max_batch,
        token_budget=best.token_budget,
        memory_bytes=ground.memory_bytes,
        workload=workload,
        predicted=predicted,
        hardware={
            "disk_bytes_per_s": ground.disk.bytes_per_s,
            "layer_seconds_of_the_decoding_batch": arithmetic / len(ground.sizes.layers),
            "slower_beside_reads": ground.rates[best.cache].beside_reads,
        },
        neighbours=neighbours,
    )


def _neighbours(ground: Ground, best: _Candidate) -> Iterator[Neighbour]:
    """Plans a step away from the best, and what is wrong with them."""

    def looked_at(difference: str, other: _Candidate | None) -> Neighbour:
        if other is None:
            return Neighbour(difference, None, "does not fit into the memory allowed")
        rate = ground.workload.rows * ground.workload.new.mean / other.run.seconds
        return Neighbour(difference, rate, _why_worse(best, other))

    for batch in (best.max_batch // 2, best.max_batch * 2):
        if 1 <= batch <= ground.workload.rows and ground.max_batch is None:
            yield looked_at(f"{batch} sequences at a time", _candidate(ground, best.cache, batch, best.token_budget))
    for budget in (best.token_budget // 2, best.token_budget * 2):
        if budget >= TOKEN_BUDGETS[0] and ground.token_budget is None:
            yield looked_at(f"{budget} rows a step", _candidate(ground, best.cache, best.max_batch, budget))
    if best.placement.pinned:
        fewer = _candidate(ground, best.cache, best.max_batch, best.token_budget, fewer_pinned=1)
        yield looked_at("one layer fewer in memory", fewer)
    for kind in ground.rates:
        if kind != best.cache:
            yield looked_at(f"a {kind} cache", _candidate(ground, kind, best.max_batch, best.token_budget))


def _why_worse(best: _Candidate, other: _Candidate) -> str:
    if other.run.seconds <= best.run.seconds:
        return "is not slower; it was passed over for its longest step, or because its cache changes results"
    more = other.streamed_bytes - best.streamed_bytes
    if more > 0:
        return f"reads {more / MIB:.0f} MiB more in each step"
    if other.run.steps > best.run.steps:
        return f"takes {other.run.steps} steps instead of {best.run.steps}"
    return f"its steps take longer: {other.run.longest_step:.2f} s at most instead of {best.run.longest_step:.2f} s"


def _what_would_work(ground: Ground, cache: CacheKind) -> str:
    sizes, workload = ground.sizes, ground.workload
    batch, budget = ground.max_batch or 1, ground.token_budget or TOKEN_BUDGETS[0]
    context_bytes = batch * pages_for(workload.context) * len(sizes.layers) * sizes.page_of_layer(cache)
    rest = sizes.small + sizes.workspace(batch, budget, ground.rows_at_once) + RING * sizes.largest_unit
    least = rest + context_bytes
    message = (
        f"a budget of {ground.memory_bytes} bytes does not hold this model even with its layers on disk: "
        f"{least} bytes are needed, {context_bytes} of them for the keys and values of {batch} sequences of "
        f"{workload.context} tokens and {RING * sizes.largest_unit} to stream layers through"
    )
    remedies = [f"allow {least} bytes"]
    room = ground.memory_bytes - rest
    if room > 0:
        tokens = room // (batch * len(sizes.layers) * sizes.page_of_layer(cache)) * PAGE_TOKENS
        if tokens:
            remedies.append(f"allow contexts of {tokens} tokens at most")
    if batch > 1:
        remedies.append("fewer sequences at a time")
    if ground.could_shrink:
        remedies.append("import the model with --quantize int4, which makes its layers smaller")
    return f"{message}; " + ", or ".join(remedies)

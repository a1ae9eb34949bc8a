"""Choosing a plan: the batch and the rows of a step by search, what stays in memory by a linear program (`placing`).

For each batch size and token budget the program decides what stays in memory, so that the disk has least to do. The
workload is then run through the cost model, and the fastest plan wins (FlexGen's policy search, arXiv 2303.06865,
section 4.3). What fits is never streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inference.cache.pages import pages_for
from inference.errors import MemoryBudgetError
from inference.kernels.base import CacheKind, Compute
from inference.planner.cost import Estimate, StepCost, decode_load, estimate
from inference.planner.disk import DiskRate
from inference.planner.layer_rates import LayerRates
from inference.planner.placing import Need, Placed, Room, place
from inference.planner.plan import Neighbour, Plan, Predicted
from inference.planner.remedies import what_would_work
from inference.planner.sizes import ModelSizes
from inference.planner.workload import Workload
from inference.scheduler import CHUNK_TOKENS

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SPARE_SHARE = 0.06
TOKEN_BUDGETS = (256, 384, 512, 768, 1024, 1536, 2048)
# Rates are known to some 15 %: a plan that reads from disk has to promise more than that to be worth it.
WORTH_STREAMING = 1.25
# Rows in so many batches of one size are tried too, so that the last batch is as full as the others.
EVEN_BATCHES = 8
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Ask:
    """What a plan is wanted for.

    memory_bytes: for the process; process_bytes: what it takes of that without the model, its cache and the steps'
    activations. disk_bytes: for the layer image and spilled keys and values. max_batch, token_budget: where they are
    not to be chosen. could_shrink: the store's weights are wider than 4 bits.
    """

    sizes: ModelSizes
    compute: Compute
    cache: CacheKind
    rows_at_once: int | None
    memory_bytes: int
    process_bytes: int
    disk_bytes: int
    workload: Workload
    max_batch: int | None = None
    token_budget: int | None = None
    could_shrink: bool = False

    @property
    def room_bytes(self) -> int:
        """What may be planned with: where the whole process counts, a share stays free for what its libraries take as
        they work, and for gaps between pieces of memory.
        """
        return int(self.memory_bytes * (1 - SPARE_SHARE)) if self.process_bytes else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Ground:
    """All that a plan rests on."""

    ask: Ask
    rates: LayerRates
    disk: DiskRate

    @property
    def read_bytes_per_s(self) -> float:
        """At which layers stream beside arithmetic; what the disk gives by itself where no step waited for it."""
        return self.rates.stream_bytes_per_s or self.disk.bytes_per_s


@dataclass(frozen=True, slots=True)
class _Candidate:
    max_batch: int
    token_budget: int
    cache: CacheKind
    cache_pages: int
    placed: Placed
    run: Estimate
    cost: StepCost

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is read from disk once it has been loaded."""
        placement = self.placed.placement
        return not self.placed.streamed_bytes and not placement.spilled and placement.embedding_pinned


def check(ask: Ask) -> None:
    """MemoryBudgetError, saying what would work, where there is no plan at all. Needs no measurement."""
    if not _fits(ask):
        raise MemoryBudgetError(what_would_work(ask, _fits))


def search(ground: Ground) -> Plan:
    """The fastest plan. MemoryBudgetError, saying what would work, where there is none."""
    check(ground.ask)
    limit = ground.ask.workload.step_seconds
    candidates = list(_candidates(ground))
    soon = [one for one in candidates if limit is None or one.run.longest_step <= limit]
    # Where no plan keeps the limit, the one that misses it least.
    best = _fastest(soon) if soon else min(candidates, key=lambda one: one.run.longest_step)
    return _plan(ground, best, tuple(_neighbours(ground, best, [one for one in soon if one.keeps_all])))


def _fastest(candidates: list[_Candidate]) -> _Candidate:
    """The fastest; where that leaves something on disk, and hardly promises more, the fastest that does not."""
    best = min(candidates, key=_seconds)
    whole = min((one for one in candidates if one.keeps_all), key=_seconds, default=best)
    return whole if whole.run.seconds <= best.run.seconds * WORTH_STREAMING else best


def _seconds(candidate: _Candidate) -> float:
    return candidate.run.seconds


def batch_sizes(rows: int) -> list[int]:
    """Those that are tried for so many rows."""
    even = {-(-rows // parts) for parts in range(1, EVEN_BATCHES + 1)}
    return sorted(size for size in {*BATCHES, *even} if size <= min(rows, BATCHES[-1]))


def token_budgets(workload: Workload, max_batch: int) -> list[int]:
    """Those that are tried with so many sequences at a time.

    Some spread prompts so that in every step as many begin as end: then each step has prompts to compute while the
    disk is read for it. Where prompts come all at once, the disk has nothing to do at first, and arithmetic afterwards.
    """
    piece = min(round(workload.prompt.mean), CHUNK_TOKENS)
    pieces = -(-round(workload.prompt.mean) // CHUNK_TOKENS)
    steps = pieces + round(workload.new.mean) - 1  # of a row
    each = -(-max_batch * pieces // steps)
    spread = {max_batch - each + times * each * piece for times in (1, 2)}
    return sorted({*TOKEN_BUDGETS, *(budget for budget in spread if TOKEN_BUDGETS[0] < budget < TOKEN_BUDGETS[-1])})


def _budgets(ask: Ask, max_batch: int) -> list[int]:
    return token_budgets(ask.workload, max_batch) if ask.token_budget is None else [ask.token_budget]


def _candidates(ground: Ground) -> Iterator[_Candidate]:
    ask = ground.ask
    batches = batch_sizes(ask.workload.rows) if ask.max_batch is None else [ask.max_batch]
    for max_batch in batches:
        for token_budget in _budgets(ask, max_batch):
            found = _candidate(ground, ask.cache, max_batch, token_budget)
            if found is not None:
                yield found


def _fits(ask: Ask) -> bool:
    """Whether there is any placement."""
    need = _need(ask, ask.cache, ask.max_batch or 1, ask.token_budget or TOKEN_BUDGETS[0])
    return place(need, Room(ask.room_bytes, ask.disk_bytes, 1.0, 1.0)) is not None


def _need(ask: Ask, cache: CacheKind, max_batch: int, token_budget: int) -> Need:
    sizes, workload = ask.sizes, ask.workload
    return Need(
        sizes=sizes,
        cache=cache,
        pages=max_batch * pages_for(workload.context),
        longest_pages=pages_for(workload.context),
        step=decode_load(workload, min(max_batch, workload.rows)),
        step_rows=token_budget,
        fixed_bytes=ask.process_bytes + sizes.small + sizes.workspace(max_batch, token_budget, ask.rows_at_once),
    )


def _candidate(
    ground: Ground, cache: CacheKind, max_batch: int, token_budget: int, *, most_pinned: int | None = None
) -> _Candidate | None:
    """The placement that gives the disk least to do for that batch; None where it does not fit."""
    ask, disk = ground.ask, ground.disk
    need = _need(ask, cache, max_batch, token_budget)
    room = Room(ask.room_bytes, ask.disk_bytes, ground.read_bytes_per_s, disk.write_bytes_per_s)
    placed = place(need, room, most_pinned)
    if placed is None:
        return None
    cost = StepCost(
        ground.rates,
        cache,
        len(ask.sizes.layers),
        placed.streamed_bytes,
        len(placed.placement.spilled) * ask.sizes.page_of_layer(cache),
        ground.read_bytes_per_s,
        disk.write_bytes_per_s,
    )
    run = estimate(ask.workload, max_batch, token_budget, cost)
    return _Candidate(max_batch, token_budget, cache, need.pages, placed, run, cost)


def _plan(ground: Ground, best: _Candidate, neighbours: tuple[Neighbour, ...]) -> Plan:
    workload, run = ground.ask.workload, best.run
    load = decode_load(workload, min(best.max_batch, workload.rows))
    output = workload.rows * workload.new.mean
    predicted = Predicted(
        prefill_tokens_per_s=workload.rows * workload.prompt.mean / run.prefill_seconds,
        # The first token of an answer comes with the prompt's last piece.
        decode_tokens_per_s=(output - workload.rows) / run.decode_seconds if run.decode_seconds else 0.0,
        output_tokens_per_s=output / run.seconds,
        seconds=run.seconds,
        prefill_seconds=run.prefill_seconds,
        decode_seconds=run.decode_seconds,
        step_seconds=best.cost.seconds(load),
        longest_step_seconds=run.longest_step,
        steps=run.steps,
        peak_memory_bytes={"host": best.placed.host_bytes, "disk": best.placed.disk_bytes},
        streamed_bytes_per_step=best.placed.streamed_bytes,
        bound_by="disk" if run.disk_bound_seconds > run.seconds / 2 else "arithmetic",
    )
    return Plan(
        placement=best.placed.placement,
        compute=ground.ask.compute,
        cache=best.cache,
        cache_pages=best.cache_pages,
        max_batch=best.max_batch,
        token_budget=best.token_budget,
        memory_bytes=ground.ask.memory_bytes,
        workload=workload,
        predicted=predicted,
        hardware={
            "process_bytes": ground.ask.process_bytes,
            "disk_bytes_per_s": ground.disk.bytes_per_s,
            "disk_write_bytes_per_s": ground.disk.write_bytes_per_s,
            "arithmetic_seconds_of_a_decoding_step": best.cost.arithmetic_seconds(load),
            "disk_seconds_of_a_decoding_step": best.cost.disk_seconds(load),
            "stream_bytes_per_s": ground.read_bytes_per_s,
            "read_cost_seconds_per_gb": ground.rates.read_cost * 1e9,
        },
        neighbours=neighbours,
    )


def _neighbours(ground: Ground, best: _Candidate, whole: list[_Candidate]) -> Iterator[Neighbour]:
    """Plans a step away from the best, and what is wrong with them. whole: those that keep all in memory."""

    def looked_at(difference: str, other: _Candidate | None) -> Neighbour:
        if other is None:
            return Neighbour(difference, None, "does not fit into the memory allowed")
        rate = ground.ask.workload.rows * ground.ask.workload.new.mean / other.run.seconds
        return Neighbour(difference, rate, _why_worse(best, other))

    if whole and not best.keeps_all:
        other = min(whole, key=_seconds)
        yield looked_at(f"all in memory, {other.max_batch} sequences at a time", other)
    rows = ground.ask.workload.rows
    for batch in (best.max_batch // 2, best.max_batch * 2):
        if 1 <= batch <= rows and ground.ask.max_batch is None:
            yield looked_at(f"{batch} sequences at a time", _candidate(ground, best.cache, batch, best.token_budget))
    budgets = _budgets(ground.ask, best.max_batch)
    at = budgets.index(best.token_budget)
    for budget in (*budgets[max(0, at - 1) : at], *budgets[at + 1 : at + 2]):
        yield looked_at(f"{budget} rows a step", _candidate(ground, best.cache, best.max_batch, budget))
    pinned = len(best.placed.placement.pinned)
    if pinned:
        fewer = _candidate(ground, best.cache, best.max_batch, best.token_budget, most_pinned=pinned - 1)
        yield looked_at("one layer fewer in memory", fewer)
    for kind in ground.rates.attention:
        if kind != best.cache:
            yield looked_at(f"a cache in {kind}", _candidate(ground, kind, best.max_batch, best.token_budget))


def _why_worse(best: _Candidate, other: _Candidate) -> str:
    little = best.run.seconds / WORTH_STREAMING <= other.run.seconds <= best.run.seconds
    if best.keeps_all and not other.keeps_all and little:
        return "promises hardly more, which is not worth reading from disk in each step"
    if other.run.seconds <= best.run.seconds:
        return "is not slower; it was passed over for its longest step, or because its cache changes results"
    more = other.placed.streamed_bytes - best.placed.streamed_bytes
    if more > 0:
        return f"reads {more / MIB:.0f} MiB more of weights in each step"
    spilled = len(other.placed.placement.spilled) - len(best.placed.placement.spilled)
    if spilled > 0:
        return f"keeps the keys and values of {spilled} more layers on disk"
    if other.run.steps > best.run.steps:
        return f"takes {other.run.steps} steps instead of {best.run.steps}"
    return f"its steps take longer: {other.run.longest_step:.2f} s at most instead of {best.run.longest_step:.2f} s"

"""What a run did, step by step, and how near it came to the host's limit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from inference.memory.ring import StreamStats
from inference.planner.cost import StepCost, StepLoad
from inference.planner.peaks import HostPeaks
from inference.planner.work import Matrix, StepShape, WorkFormula

STEPS_KEPT = 32_768
TIMELINE_POINTS = 24

_STEP = np.dtype(
    [
        ("started", np.float64),  # seconds, by the clock that also times steps
        ("ended", np.float64),
        ("seconds", np.float64),  # without urgent steps that were done in between
        ("sequences", np.int32),
        ("prefill_rows", np.int32),
        ("decode_context", np.int64),
        ("rows", np.int32),
        ("logit_rows", np.int32),
        ("pairs", np.int64),
        ("context_tokens", np.int64),
        ("streamed_bytes", np.int64),
        ("streaming_seconds", np.float64),
        ("waited_seconds", np.float64),
    ]
)


@dataclass(frozen=True, slots=True)
class RunReport:
    """A stretch of steps against the host's measured limit. Rates are a second of wall time, first to last step.

    operations, bytes: by the formulas of `inference.planner.work`. roofline_seconds: the least time by the peaks, each
    step at max(bytes / read rate, operations / peak operations). fraction_of_limit: that over the steps' measured
    time. The shares add up to 1 over the wall time: what the roofline says memory and arithmetic need, `overhead` the
    rest of the steps, `idle` the time between steps, when nothing was there to do or the caller held it up.
    own_kernels_seconds: as roofline_seconds, but at the rates that the engine's own kernels reach: the matrix products
    on the model's shapes at each step's rows, and attention after them. prefill and decode apart: a step that holds
    both is split by rows.
    streamed_bytes: of weights read from disk; streamed_bytes_per_s: while at least one read was under way;
    waited_seconds: of the steps, in which computing waited for weights.
    predicted_seconds: what the planner's cost model says these steps take, by what this host took for a layer of the
    model before they ran; predicted_prefill_seconds: its share of prompts. To be held against busy_seconds and
    prefill_seconds.
    Fields that need the peaks, or a layer's rates, are None where these were not measured.
    """

    steps: int
    steps_left_out: int
    wall_seconds: float
    busy_seconds: float
    prefill_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    mean_batch_size: float
    mean_rows: float
    batch_size_over_time: tuple[tuple[float, float], ...]
    operations: int
    attention_operations: int
    bytes: int
    cache_bytes: int
    operations_per_s: float
    bytes_per_s: float
    peak_operations_per_s: float | None
    peak_bytes_per_s: float | None
    roofline_seconds: float | None
    own_kernels_seconds: float | None
    fraction_of_limit: float | None
    memory_share: float | None
    arithmetic_share: float | None
    overhead_share: float | None
    idle_share: float
    bound_by: str
    streamed_bytes: int
    streamed_bytes_per_s: float
    waited_seconds: float
    predicted_seconds: float | None
    predicted_prefill_seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line for a person."""
        said = (
            f"{self.steps} steps of {self.mean_batch_size:.1f} sequences, prefill {self.prefill_tokens_per_s:.0f} and "
            f"decode {self.decode_tokens_per_s:.0f} tokens/s, {self.operations_per_s / 1e9:.1f} G operations/s, "
            f"{self.bytes_per_s / 1e9:.2f} GB/s"
        )
        if self.streamed_bytes:
            said += (
                f", {self.streamed_bytes / 1e9:.1f} GB streamed at {self.streamed_bytes_per_s / 1e9:.2f} GB/s "
                f"({100 * _ratio(self.waited_seconds, self.busy_seconds):.0f} % of the steps waited for)"
            )
        if self.peak_operations_per_s is None or self.peak_bytes_per_s is None or self.fraction_of_limit is None:
            return f"{said}; the host's peaks have not been measured"
        return (
            f"{said}; the host's peaks: {self.peak_operations_per_s / 1e9:.0f} G operations/s, "
            f"{self.peak_bytes_per_s / 1e9:.1f} GB/s; {100 * self.fraction_of_limit:.0f} % of the limit, "
            f"bound by {self.bound_by}"
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    """What each step of a stretch computed, and read from disk."""

    operations: tuple[int, ...]
    streamed_bytes: tuple[int, ...]

    def least_seconds(self, operations_per_s: float, disk_bytes_per_s: float | None) -> float:
        """Each step at the slower of its arithmetic and its disk, one after the other. None: there is no disk."""
        rate = disk_bytes_per_s or math.inf
        steps = zip(self.operations, self.streamed_bytes, strict=True)
        return sum(max(operations / operations_per_s, nbytes / rate) for operations, nbytes in steps)


class StepMeter:
    """Remembers the last STEPS_KEPT steps in a fixed block of memory. Written by the stepping thread only."""

    def __init__(self) -> None:
        self._steps = np.zeros(STEPS_KEPT, dtype=_STEP)
        self.count = 0

    def record(
        self,
        started: float,
        ended: float,
        seconds: float,
        shape: StepShape,
        *,
        sequences: int,
        prefill_rows: int,
        decode_context: int,
        streamed: StreamStats,
    ) -> None:
        """decode_context: tokens that the decoding rows look back to, in one layer without a window."""
        self._steps[self.count % STEPS_KEPT] = (
            started,
            ended,
            seconds,
            sequences,
            prefill_rows,
            decode_context,
            shape.rows,
            shape.logit_rows,
            shape.pairs,
            shape.context_tokens,
            streamed.bytes,
            streamed.reading_seconds,
            streamed.waited_seconds,
        )
        self.count += 1

    def report(
        self,
        formula: WorkFormula,
        peaks: HostPeaks | None,
        matrices: tuple[Matrix, ...],
        *,
        cost: StepCost | None = None,
        since: int = 0,
    ) -> RunReport:
        """The steps from number `since` on, as far as they are kept. matrices: the model's. cost: of its steps."""
        first, steps = self._since(since)
        return _report(steps, first - min(since, first), formula, peaks, matrices, cost)

    def work(self, formula: WorkFormula, *, since: int = 0) -> StepWork:
        """Of the steps from number `since` on, as far as they are kept."""
        _, steps = self._since(since)
        return StepWork(
            tuple(formula.operations(shape) for shape in _shapes(steps)), tuple(steps["streamed_bytes"].tolist())
        )

    def _since(self, since: int) -> tuple[int, Any]:
        first = max(since, self.count - STEPS_KEPT, 0)
        return first, self._steps[np.arange(first, self.count) % STEPS_KEPT]


def _shapes(steps: Any) -> list[StepShape]:
    return [
        StepShape(int(step["rows"]), int(step["logit_rows"]), int(step["pairs"]), int(step["context_tokens"]))
        for step in steps
    ]


def _loads(steps: Any, layers: int) -> list[StepLoad]:
    """The steps as the cost model takes them. Windows shorten what rows look back to: that is taken off prompts."""
    loads = []
    for step in steps:
        rows, prompt_rows = int(step["rows"]), int(step["prefill_rows"])
        decode_rows, context = rows - prompt_rows, int(step["decode_context"])
        loads.append(
            StepLoad(
                decode_rows=decode_rows,
                decode_tokens=context,
                prompt_rows=prompt_rows,
                prompt_pairs=max(0.0, int(step["pairs"]) / layers - context),
                yielding=int(step["logit_rows"]),
                prompts=max(0, int(step["sequences"]) - decode_rows),
            )
        )
    return loads


def _report(
    steps: Any,
    left_out: int,
    formula: WorkFormula,
    peaks: HostPeaks | None,
    matrices: tuple[Matrix, ...],
    cost: StepCost | None,
) -> RunReport:
    busy = float(steps["seconds"].sum())
    wall = max(busy, float(steps["ended"].max() - steps["started"].min())) if len(steps) else 0.0
    rows = np.maximum(steps["rows"], 1)
    prefill_seconds = float((steps["seconds"] * steps["prefill_rows"] / rows).sum())
    prefill = int(steps["prefill_rows"].sum())
    decode = int(steps["rows"].sum()) - prefill
    shapes = _shapes(steps)
    operations = sum(formula.operations(shape) for shape in shapes)
    moved = sum(formula.bytes(shape) for shape in shapes)
    memory = arithmetic = own = 0.0
    for shape in shapes if peaks is not None else []:
        assert peaks is not None
        reading = formula.bytes(shape) / peaks.bytes_per_s_of(formula.bytes(shape))
        computing = formula.operations(shape) / peaks.operations_per_s
        if reading > computing:
            memory += reading
        else:
            arithmetic += computing
        products = formula.matrix_operations(shape) / peaks.matrix_operations_per_s(shape.rows, matrices)
        own += max(reading, products + _attention_seconds(formula, shape, peaks))
    roofline = memory + arithmetic
    # Above 1 only where the peaks were measured on a busier host than the run's.
    fraction = roofline / busy if busy else 0.0
    spread = 1.0 / max(1.0, fraction)
    shares = {
        "memory": _ratio(memory * spread, wall),
        "arithmetic": _ratio(arithmetic * spread, wall),
        "overhead": _ratio(max(0.0, busy - roofline), wall),
        "idle time": _ratio(wall - busy, wall),
    }
    known = peaks is not None
    predicted = np.array([cost.seconds(load) for load in _loads(steps, cost.layers)]) if cost is not None else None
    return RunReport(
        steps=len(steps),
        steps_left_out=left_out,
        wall_seconds=wall,
        busy_seconds=busy,
        prefill_tokens=prefill,
        decode_tokens=decode,
        prefill_seconds=prefill_seconds,
        decode_seconds=busy - prefill_seconds,
        prefill_tokens_per_s=_ratio(prefill, prefill_seconds),
        decode_tokens_per_s=_ratio(decode, busy - prefill_seconds),
        mean_batch_size=float(steps["sequences"].mean()) if len(steps) else 0.0,
        mean_rows=float(steps["rows"].mean()) if len(steps) else 0.0,
        batch_size_over_time=_timeline(steps),
        operations=operations,
        attention_operations=sum(formula.attention_operations(shape) for shape in shapes),
        bytes=round(moved),
        cache_bytes=round(sum(formula.cache_bytes(shape) for shape in shapes)),
        operations_per_s=_ratio(operations, wall),
        bytes_per_s=_ratio(moved, wall),
        peak_operations_per_s=peaks.operations_per_s if peaks is not None else None,
        peak_bytes_per_s=peaks.bytes_per_s if peaks is not None else None,
        roofline_seconds=roofline if known else None,
        own_kernels_seconds=own if known else None,
        fraction_of_limit=fraction if known else None,
        memory_share=shares["memory"] if known else None,
        arithmetic_share=shares["arithmetic"] if known else None,
        overhead_share=shares["overhead"] if known else None,
        idle_share=shares["idle time"],
        bound_by=max(shares, key=lambda name: shares[name]) if known and len(steps) else "not known",
        streamed_bytes=int(steps["streamed_bytes"].sum()),
        streamed_bytes_per_s=_ratio(float(steps["streamed_bytes"].sum()), float(steps["streaming_seconds"].sum())),
        waited_seconds=float(steps["waited_seconds"].sum()),
        predicted_seconds=None if predicted is None else float(predicted.sum()),
        predicted_prefill_seconds=None
        if predicted is None
        else float((predicted * steps["prefill_rows"] / rows).sum()),
    )


def _attention_seconds(formula: WorkFormula, shape: StepShape, peaks: HostPeaks) -> float:
    """At the rates of the engine's own attention: bound by the cache's bytes in decode, by arithmetic in prefill."""
    if peaks.attention is None:
        return formula.attention_operations(shape) / peaks.operations_per_s
    return max(
        formula.cache_bytes(shape) / peaks.attention.decode_bytes_per_s,
        formula.attention_operations(shape) / peaks.attention.prefill_operations_per_s,
    )


def _timeline(steps: Any) -> tuple[tuple[float, float], ...]:
    """(seconds since the first step, mean sequences) over at most TIMELINE_POINTS equal stretches of steps."""
    if not len(steps):
        return ()
    points = []
    for part in np.array_split(steps, min(TIMELINE_POINTS, len(steps))):
        elapsed = float(part["started"].min() - steps["started"].min())
        points.append((round(elapsed, 3), round(float(part["sequences"].mean()), 1)))
    return tuple(points)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

"""Interactive requests over a saturating batch: how long people wait, and what it costs the batch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.bench.measure import Run, result_line
from inference.bench.prompts import Row, random_rows
from inference.engine import Engine
from inference.request import Completion, GenerationRequest

INTERACTIVE_PRIORITY = 0
BATCH_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class Stream:
    """The interactive requests: one every 1 / rate seconds on average, gaps exponential (a Poisson process, seed 0)."""

    rate_per_s: float
    prompt: int
    new: int
    idle_requests: int


@dataclass(slots=True)
class _Arrivals:
    """Completions as they come, from the engine's thread."""

    completions: list[Completion] = field(default_factory=list)
    left: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def submit(self, engine: Engine, name: str, row: Row, priority: int) -> None:
        with self.changed:
            self.left += 1
        engine.submit(GenerationRequest(name, row.token_ids, row.sampling, priority), on_finish=self._receive)

    def _receive(self, completion: Completion) -> None:
        with self.changed:
            self.completions.append(completion)
            self.left -= 1
            self.changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Until all have come, or for that long; True where all have."""
        with self.changed:
            return self.changed.wait_for(lambda: self.left == 0, seconds)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The batch alone, the interactive requests alone one at a time, and both together."""

    alone: Run
    together: Run
    idle: list[Completion]
    interactive: list[Completion]


def run_under_load(engine: Engine, rows: Sequence[Row], stream: Stream) -> LoadRun:
    """The engine must not be started; it is while this runs."""
    vocab_size = engine.manifest.config.vocab_size
    rng = random.Random(0)

    def interactive(number: int) -> Row:
        return random_rows(1, stream.prompt, stream.new, vocab_size, seed=10_000 + number)[0]

    engine.start()
    try:
        idle = _Arrivals()
        for number in range(stream.idle_requests):
            idle.submit(engine, f"idle-{number}", interactive(number), INTERACTIVE_PRIORITY)
            idle.wait()
        alone = _run_batch(engine, rows, "alone")
        people = _Arrivals()
        number = stream.idle_requests

        def arrive() -> float:
            nonlocal number
            people.submit(engine, f"person-{number}", interactive(number), INTERACTIVE_PRIORITY)
            number += 1
            return rng.expovariate(stream.rate_per_s)

        together = _run_batch(engine, rows, "together", arrive, first_gap=rng.expovariate(stream.rate_per_s))
        people.wait()
    finally:
        engine.stop()
    return LoadRun(alone, together, idle.completions, people.completions)


def _run_batch(
    engine: Engine, rows: Sequence[Row], name: str, arrive: Any = None, first_gap: float = float("inf")
) -> Run:
    """Run the rows to their end; meanwhile call `arrive` after each gap, which it returns."""
    engine.forget_prefixes()
    before = engine.stats()
    batch = _Arrivals()
    started = time.perf_counter()
    for index, row in enumerate(rows):
        batch.submit(engine, f"{name}-{index}", row, BATCH_PRIORITY)
    due = started + first_gap
    while not batch.wait(max(0.0, due - time.perf_counter()) if arrive is not None else None):
        due += arrive()
    seconds = time.perf_counter() - started
    return Run.since(engine, before, seconds, batch.completions)


def load_line(engine: Engine, runs: Sequence[LoadRun], *, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """One batch size's line. `seconds` and the rates are the batch's while the stream runs, of the median run.

    throughput_fall: of the batch's output tokens a second, by the stream. interactive_work_share: the operations of
    the stream's requests, by formula, of all operations: what the fall may be where nothing is lost.
    """
    ordered = sorted(runs, key=lambda run: run.together.seconds)
    run = ordered[(len(ordered) - 1) // 2]
    line = result_line(engine, [each.together for each in runs], batch=batch, prompt=prompt, new=new)
    idle = [completion.ttft_seconds for each in runs for completion in each.idle]
    loaded = [completion.ttft_seconds for each in runs for completion in each.interactive]
    rate = run.together.output_tokens / run.together.seconds
    rate_alone = run.alone.output_tokens / run.alone.seconds
    added = sum(engine.operations(c.prompt_tokens, c.output_tokens) for c in run.interactive if c.output_tokens)
    of_batch = sum(engine.operations(c.prompt_tokens, c.output_tokens) for c in run.together.completions)
    compute = sum(completion.compute_seconds for completion in run.interactive)
    idle_percentiles, loaded_percentiles = percentiles(idle), percentiles(loaded)
    ratio = None
    if idle_percentiles is not None and loaded_percentiles is not None:
        ratio = round(loaded_percentiles["p95"] / idle_percentiles["p95"], 2)
    return line | {
        "output_tokens_per_s_alone": round(rate_alone, 1),
        "seconds_alone": round(run.alone.seconds, 2),
        "throughput_fall": round(1.0 - rate / rate_alone, 4),
        "interactive_work_share": round(added / (added + of_batch), 4),
        "interactive_compute_share": round(compute / run.together.report.busy_seconds, 4),
        "interactive_requests": len(loaded),
        "interactive_errors": sum(completion.finish_reason == "error" for completion in run.interactive),
        "ttft_seconds_idle": idle_percentiles,
        "ttft_seconds_under_load": loaded_percentiles,
        "ttft_p95_ratio": ratio,
    }


def percentiles(seconds: Sequence[float | None]) -> dict[str, float] | None:
    """p50, p95 and p99 by nearest rank; None where there is nothing."""
    known = sorted(value for value in seconds if value is not None)
    if not known:
        return None
    ranks = {50: 0.50, 95: 0.95, 99: 0.99}
    return {f"p{name}": round(known[max(0, -int(-share * len(known) // 1) - 1)], 4) for name, share in ranks.items()}

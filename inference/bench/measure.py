"""Running a workload's rows: timing, repeats, and the result line."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference.bench.prompts import Row, random_rows
from inference.engine import Engine, EngineStats
from inference.planner.meter import RunReport, StepWork
from inference.request import Completion

WARM_UP_ROWS = 4
WARM_UP_NEW = 4


@dataclass(frozen=True, slots=True)
class Run:
    """All rows of a batch, computed once. seconds: from the first submission to the last completion."""

    seconds: float
    completions: list[Completion]
    report: RunReport
    work: StepWork
    prefix_hit_tokens: int
    preemptions: int
    pauses: int

    @classmethod
    def since(cls, engine: Engine, before: EngineStats, seconds: float, completions: list[Completion]) -> Run:
        """What the engine did between the two counts."""
        after = engine.stats()
        return cls(
            seconds,
            completions,
            engine.report(since=before.steps),
            engine.step_work(since=before.steps),
            prefix_hit_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
            preemptions=after.preemptions - before.preemptions,
            pauses=after.pauses - before.pauses,
        )

    @property
    def output_tokens(self) -> int:
        return sum(completion.output_tokens for completion in self.completions)

    @property
    def prompt_tokens(self) -> int:
        return sum(completion.prompt_tokens for completion in self.completions)


def warm_up(engine: Engine, prompt: int) -> None:
    """A few prompts of the same length, others than the measured ones, so that nothing is made at first use."""
    rows = random_rows(WARM_UP_ROWS, prompt, WARM_UP_NEW, engine.manifest.config.vocab_size, seed=1)
    run_rows(engine, rows)


def run_rows(engine: Engine, rows: Sequence[Row]) -> Run:
    """Compute the rows in one call, with nothing kept from earlier ones."""
    engine.forget_prefixes()
    before = engine.stats()
    started = time.perf_counter()
    completions = engine.generate([row.token_ids for row in rows], [row.sampling for row in rows])
    seconds = time.perf_counter() - started
    return Run.since(engine, before, seconds, completions)


def result_line(engine: Engine, runs: Sequence[Run], *, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """One batch size's line, of the run with the median time; the peers' keys first. Rates over the whole call."""
    ordered = sorted(runs, key=lambda run: run.seconds)
    run = ordered[(len(ordered) - 1) // 2]
    seconds = run.seconds
    first = sorted(completion.ttft_seconds or 0.0 for completion in run.completions)
    stats, report = engine.stats(), run.report
    return {
        "engine": "penstock",
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(run.output_tokens / seconds, 1),
        "total_tokens_per_s": round((run.output_tokens + run.prompt_tokens) / seconds, 1),
        "requests_per_s": round(len(run.completions) / seconds, 2),
        "repeats": len(runs),
        "seconds_range": [round(ordered[0].seconds, 2), round(ordered[-1].seconds, 2)],
        "output_tokens": run.output_tokens,
        "prompt_tokens": run.prompt_tokens,
        "errors": sum(completion.finish_reason == "error" for completion in run.completions),
        "ttft_seconds_median": round(statistics.median(first), 3),
        "ttft_seconds_largest": round(first[-1], 3),
        "prefill_tokens_per_s": round(report.prefill_tokens_per_s, 1),
        "decode_tokens_per_s": round(report.decode_tokens_per_s, 1),
        "prefix_hit_tokens": run.prefix_hit_tokens,
        "prefix_hit_share": round(run.prefix_hit_tokens / run.prompt_tokens, 4),
        "preemptions": run.preemptions,
        "pauses": run.pauses,
        "steps": report.steps,
        "busy_share": round(report.busy_seconds / seconds, 3),
        "compute": stats.compute,
        "kernels": stats.kernels,
        "threads": stats.threads,
        "threads_at_end": stats.threads_now,
        "limits": rounded(report.as_dict()),
    }


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Four significant digits are more than a noisy machine gives."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


def show(line: dict[str, Any], run: Run, as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    print(
        f"batch {line['batch']}: {line['output_tokens_per_s']} output tokens/s, {line['total_tokens_per_s']} in all, "
        f"{line['seconds']} s (of {line['repeats']}: {line['seconds_range'][0]} to {line['seconds_range'][1]}), first "
        f"token after {line['ttft_seconds_median']} s (median); {line['compute']}, {line['kernels']} kernels, "
        f"{line['threads']} threads\n  {run.report.line()}",
        flush=True,
    )

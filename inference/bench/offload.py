"""Models larger than the memory allowed: planned, streamed, and held against the disk and the arithmetic."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inference.bench.footprint import Footprint, forget_process_peak
from inference.bench.measure import Run, result_line, rounded, run_rows, show
from inference.bench.prompts import random_rows
from inference.command_line import byte_count
from inference.engine import Engine
from inference.errors import ModelFormatError, StoreError
from inference.fitting import CacheChoice, cache_kind
from inference.kernels.base import Kernels
from inference.loading import ComputeChoice, choose_kernels, store_at
from inference.memory.budget import process_bytes
from inference.memory.folders import images_folder
from inference.model.layers import LayerReader
from inference.model.linear import fastest_compute
from inference.planner.disk import TrialFile
from inference.planner.meter import StepWork
from inference.planner.peaks import host_peaks
from inference.planner.plan import Plan
from inference.planner.planning import make_plan
from inference.planner.workload import Workload
from inference.weights.store import StoreReader

DISK_SECONDS = 2.0
WARM_UP_PROMPT, WARM_UP_NEW = 16, 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be planned and run. memory_bytes: what the whole process may take. max_batch, token_budget: None where
    the planner is to choose.
    """

    store: Path
    memory_bytes: int
    threads: int
    compute: ComputeChoice = "auto"
    cache: CacheChoice = "auto"
    max_batch: int | None = None
    token_budget: int | None = None

    def kernels(self) -> Kernels:
        config = StoreReader(self.store).manifest.config
        return choose_kernels(config, fastest_compute() if self.compute == "auto" else self.compute)


def plan_for(wanted: Wanted, workload: Workload, *, again: bool = False) -> Plan:
    """The planner's choice, the process's own memory counted in. Raises MemoryBudgetError, StoreError."""
    kernels = wanted.kernels()
    return make_plan(
        LayerReader(StoreReader(wanted.store), kernels),
        compute=kernels.compute,
        cache=cache_kind(wanted.cache, kernels),
        workload=workload,
        memory_bytes=wanted.memory_bytes,
        process_bytes=process_bytes(),
        threads=wanted.threads,
        max_batch=wanted.max_batch,
        token_budget=wanted.token_budget,
        again=again,
    )


def measure_peaks(wanted: Wanted, plan: Plan, *, again: bool = False) -> None:
    """Measure and keep the host's peaks for this model before it takes the memory; the report finds them again."""
    config = StoreReader(wanted.store).manifest.config
    kernels = choose_kernels(config, plan.compute)
    host_peaks(config, plan.compute, kernels, plan.cache, threads=wanted.threads, again=again)


def disk_bytes_per_s(readers: int) -> float:
    """What the disk of the images gives now, by so many readers, checksums compared."""
    with TrialFile(images_folder()) as trial:
        return trial.read_for(DISK_SECONDS, readers)


def fractions_of_limit(
    *,
    seconds: float,
    streamed_bytes: int,
    disk_bytes_per_s: float | None,
    work: StepWork,
    operations_per_s: float,
    own_kernels_seconds: float,
) -> dict[str, Any]:
    """A run against the slower of its disk and its arithmetic.

    fraction_of_limit: max(streamed bytes / disk rate, operations / peak rate) over the seconds. fraction_of_kernels:
    the same with the time that the engine's own kernels take for these steps by themselves in the place of the latter.
    fraction_of_step_limits: as the first, each step at the slower of the two, one after the other.
    disk_bytes_per_s: None where nothing is streamed.
    """
    disk = streamed_bytes / disk_bytes_per_s if disk_bytes_per_s else 0.0
    arithmetic = sum(work.operations) / operations_per_s
    return {
        "disk_seconds": disk,
        "arithmetic_seconds": arithmetic,
        "own_kernels_seconds": own_kernels_seconds,
        "bound_by": "disk" if disk > own_kernels_seconds else "arithmetic",
        "fraction_of_limit": max(disk, arithmetic) / seconds,
        "fraction_of_step_limits": work.least_seconds(operations_per_s, disk_bytes_per_s) / seconds,
        "fraction_of_kernels": max(disk, own_kernels_seconds) / seconds,
    }


def prediction(plan: Plan, run: Run) -> dict[str, Any]:
    """What the plan promised beside what came; errors as shares of what was measured, above 0 where too much was
    promised."""
    predicted = plan.predicted
    if predicted is None:
        return {"predicted": None}
    measured = run.output_tokens / run.seconds
    step = run.report.busy_seconds / run.report.steps
    return {
        "predicted": rounded(predicted.as_dict()),
        "rate_error": round(predicted.output_tokens_per_s / measured - 1.0, 4),
        "seconds_error": round(predicted.seconds / run.seconds - 1.0, 4),
        "steps_error": round(predicted.steps / run.report.steps - 1.0, 4),
        "mean_step_seconds": round(step, 4),
    }


def _run(options: argparse.Namespace) -> None:
    store = store_at(options.model)
    manifest = StoreReader(store).manifest
    if manifest.config.is_foreign:
        raise ModelFormatError(options.model, "config.json", "this family has no plans: its own modelling code runs it")
    wanted = Wanted(
        store,
        options.memory,
        options.threads,
        options.compute,
        options.cache,
        options.max_batch,
        options.token_budget,
    )
    torch.set_num_threads(options.threads)
    for batch in options.batch:
        _run_one(options, wanted, batch)


def _run_one(options: argparse.Namespace, wanted: Wanted, batch: int) -> None:
    own: dict[str, Any] = {"workload": "offload", "memory_bytes": wanted.memory_bytes}
    started = time.perf_counter()
    if options.plan is None:
        workload = Workload.uniform(batch, options.prompt, options.new)
        plan = plan_for(wanted, workload, again=options.measure_again)
    else:
        plan = read_plan(options.plan)
    own["plan_seconds"] = round(time.perf_counter() - started, 2)
    if options.plan_only:
        print(plan.to_json(), end="")
        return
    streams = plan.placement.ring > 0
    measure_peaks(wanted, plan, again=options.measure_again)
    before = disk_bytes_per_s(plan.placement.readers) if streams else None
    forget_process_peak()
    started = time.perf_counter()
    engine = Engine.load(wanted.store, threads=wanted.threads, plan=plan)
    own["load_seconds"] = round(time.perf_counter() - started, 2)
    vocab_size = engine.manifest.config.vocab_size
    run_rows(engine, random_rows(1, min(WARM_UP_PROMPT, options.prompt), WARM_UP_NEW, vocab_size, seed=1))
    rows = random_rows(batch, options.prompt, options.new, vocab_size)
    runs = [run_rows(engine, rows) for _ in range(options.repeat)]
    own["footprint"] = Footprint.now().as_dict()
    own["within_memory"] = (own["footprint"]["process_peak_bytes"] or 0) <= wanted.memory_bytes
    line = result_line(engine, runs, batch=batch, prompt=options.prompt, new=options.new)
    run = sorted(runs, key=lambda one: one.seconds)[(len(runs) - 1) // 2]
    own |= _against_the_limit(run, plan, before)
    own |= prediction(plan, run)
    own["plan"] = plan.as_dict() | {"neighbours": [], "predicted": None}
    show(line | own, run, options.json)
    if not options.json:
        print(_sentence(own))
    del engine


def _against_the_limit(run: Run, plan: Plan, disk_before: float | None) -> dict[str, Any]:
    report = run.report
    assert report.peak_operations_per_s is not None and report.own_kernels_seconds is not None
    disk = None
    if disk_before is not None:
        # Whatever else ran can only have slowed either try down.
        disk = max(disk_before, disk_bytes_per_s(plan.placement.readers))
    found = fractions_of_limit(
        seconds=run.seconds,
        streamed_bytes=report.streamed_bytes,
        disk_bytes_per_s=disk,
        work=run.work,
        operations_per_s=report.peak_operations_per_s,
        own_kernels_seconds=report.own_kernels_seconds,
    )
    return {
        "streamed_bytes": report.streamed_bytes,
        "disk_bytes_per_s": round(report.streamed_bytes / run.seconds),
        "disk_bytes_per_s_while_reading": round(report.streamed_bytes_per_s),
        "disk_bytes_per_s_measured": None if disk is None else round(disk),
        "waited_share": round(report.waited_seconds / run.seconds, 4),
        **rounded(found),
    }


def _sentence(own: dict[str, Any]) -> str:
    placement = own["plan"]["placement"]
    peak = own["footprint"]["process_peak_bytes"] or 0
    said = (
        f"  {len(placement['pinned'])} layers in memory, {own['streamed_bytes'] / 1e9:.1f} GB streamed, "
        f"{100 * own['fraction_of_limit']:.0f} % of the limit ({own['bound_by']}), {peak / 1e6:.0f} MB at most"
    )
    if own["predicted"] is not None:
        said += f"; predicted {own['predicted']['output_tokens_per_s']:.1f} tokens/s ({100 * own['rate_error']:+.0f} %)"
    return said


def read_plan(file: Path) -> Plan:
    """A plan as `--plan-only` prints it. Raises StoreError where it is none."""
    try:
        return Plan.from_dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(file, f"is not a plan: {error}") from None


def add_offload(workloads: Any, positive: Any) -> None:
    """The command's arguments. `options.run(options)` runs it. positive: reads a count of at least 1."""
    parser = workloads.add_parser("offload", help="as resident, in less memory than the model takes: planned, streamed")
    parser.add_argument("--model", required=True, type=Path, help="a weight store, GGUF file or Hugging Face folder")
    parser.add_argument("--memory", required=True, type=byte_count, help="what the process may take, such as 2GB")
    parser.add_argument("--batch", type=positive, nargs="+", default=[128], help="rows a call (default 128)")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens a prompt (default 128)")
    parser.add_argument("--new", type=positive, default=64, help="tokens to generate a prompt (default 64)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    parser.add_argument("--cache", choices=["auto", "fp32", "bf16", "int8", "int4"], default="auto")
    parser.add_argument("--max-batch", type=positive, help="sequences at a time (default: the planner chooses)")
    parser.add_argument("--token-budget", type=positive, help="rows a step (default: the planner chooses)")
    parser.add_argument(
        "--repeat", type=positive, default=1, help="times; the median and the range are told (default 1)"
    )
    parser.add_argument("--measure-again", action="store_true", help="measure disk, layers and peaks anew")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="run this plan instead of the planner's")
    parser.add_argument("--plan-only", action="store_true", help="print the plan as JSON, and end")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=_run)

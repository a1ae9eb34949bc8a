"""The planner against what happens: its predictions over many points, its choice against a whole small grid.

Every run is an `offload` of its own in a process of its own, so that each has the memory to itself, and one that is
killed for taking too much costs only its own line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.bench.offload import Wanted, plan_for
from inference.command_line import byte_count
from inference.errors import InferenceError, MemoryBudgetError
from inference.loading import store_at
from inference.memory.placement import Placement
from inference.planner.plan import Plan
from inference.planner.workload import Workload

SECONDS_A_RUN = 900
PINNED_SHARES = (1.0, 0.5, 0.0)  # of the layers that fit
TOLD = ("output_tokens_per_s", "seconds", "streamed_bytes", "bound_by", "fraction_of_limit", "within_memory")
MEDIANS = ("output_tokens_per_s", "predicted_tokens_per_s", "seconds", "fraction_of_limit")


@dataclass(frozen=True, slots=True)
class Point:
    """A model, what the process may take, and the work."""

    model: Path
    memory: str
    rows: int
    prompt: int
    new: int

    @classmethod
    def of(cls, text: str) -> Point:
        """Of "MODEL,MEMORY,ROWS,PROMPT,NEW". ArgumentTypeError where it is none."""
        try:
            model, memory, *counts = text.rsplit(",", 4)
            rows, prompt, new = (int(count) for count in counts)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not MODEL,MEMORY,ROWS,PROMPT,NEW") from None
        if min(rows, prompt, new) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: rows, prompt and new must be at least 1")
        byte_count(memory)
        return cls(Path(model), memory, rows, prompt, new)

    def options(self) -> list[str]:
        work = ["--batch", str(self.rows), "--prompt", str(self.prompt), "--new", str(self.new)]
        return ["--model", str(self.model), "--memory", self.memory, *work]


class RunFailed(InferenceError):
    """A run that gave no line: killed for its memory, too slow, or refused."""


def offload_line(options: Sequence[str], under: Sequence[str] = ()) -> dict[str, Any]:
    """The line of one `offload` in a process of its own, `under` a command that takes another as its arguments."""
    command = [*under, sys.executable, "-m", "inference.bench", "offload", *options, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_A_RUN, check=False)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"took more than {SECONDS_A_RUN} s: {' '.join(options)}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise RunFailed(f"ended with {done.returncode}: {' '.join(options)}: {said}")
    line: dict[str, Any] = json.loads(lines[-1])
    return line


def median_line(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one point or plan as one: of what was measured and promised the medians, and the error of these.

    The latest line's, for all else; the first failure, where there is one.
    """
    failed = next((line for line in lines if "failed" in line), None)
    if failed is not None:
        return failed
    found = dict(lines[-1])
    for name in MEDIANS:
        if isinstance(found.get(name), (int, float)):
            found[name] = statistics.median(line[name] for line in lines)
    promised = found.get("predicted_tokens_per_s")
    if promised is not None and found.get("rate_error") is not None:
        found["rate_error"] = round(promised / found["output_tokens_per_s"] - 1.0, 4)
    if len(lines) > 1:
        found["each"] = [line["output_tokens_per_s"] for line in lines]
    return found


def accuracy_summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the errors of prediction, as shares of the measured rate."""
    errors = [abs(line["rate_error"]) for line in lines if line.get("rate_error") is not None]
    return {
        "points": len(lines),
        "measured": len(errors),
        "within_15_percent": sum(error <= 0.15 for error in errors),
        "error_median": round(statistics.median(errors), 4) if errors else None,
        "error_largest": round(max(errors), 4) if errors else None,
    }


def grid(
    plan: Plan, wanted: Wanted, workload: Workload, batches: Sequence[int], budgets: Sequence[int]
) -> Iterator[Plan]:
    """The planner's own plan, then all of the grid that fit: batch x token budget x layers pinned.

    All with the planner's kind of cache: another kind gives other results, so it is never the planner's to choose.
    """
    yield plan
    seen = {_marks(plan)}
    for batch, budget in itertools.product(batches, budgets):
        try:
            fixed = plan_for(replace(wanted, max_batch=batch, token_budget=budget, cache=plan.cache), workload)
        except MemoryBudgetError:
            continue
        for share in PINNED_SHARES:
            other = replace(fixed, placement=_with_pinned(fixed.placement, share))
            if _marks(other) not in seen:
                seen.add(_marks(other))
                yield other


def _with_pinned(placement: Placement, share: float) -> Placement:
    """So much of the pinned layers, spread evenly; of a model that fits, all of them always."""
    if not placement.ring:
        return placement
    pinned = sorted(placement.pinned)
    count = round(len(pinned) * share)
    return replace(placement, pinned=frozenset(pinned[index * len(pinned) // count] for index in range(count)))


def _marks(plan: Plan) -> tuple[object, ...]:
    return plan.max_batch, plan.token_budget, plan.cache, plan.placement


def _accuracy(options: argparse.Namespace) -> None:
    lines: dict[Point, list[dict[str, Any]]] = {point: [] for point in options.point}
    for _ in range(options.rounds):
        for point, found in lines.items():
            told: dict[str, Any] = {
                "model": point.model.name,
                "memory": point.memory,
                "batch": point.rows,
                "prompt": point.prompt,
                "new": point.new,
            }
            try:
                line = offload_line([*point.options(), *_threads(options)], _under(options, point.memory))
                told |= {name: line[name] for name in TOLD}
                told |= {"rate_error": line["rate_error"], "predicted_tokens_per_s": _predicted(line)}
            except RunFailed as error:
                told |= {"failed": str(error)}
            found.append(told)
            _show(told, options)
    if options.rounds > 1:
        for found in lines.values():
            _show(median_line(found), options)
    _show(accuracy_summary([median_line(found) for found in lines.values()]), options)


def _grid(options: argparse.Namespace) -> None:
    point: Point = options.point
    wanted = Wanted(store_at(point.model), byte_count(point.memory), options.threads)
    workload = Workload.uniform(point.rows, point.prompt, point.new)
    plans = list(grid(plan_for(wanted, workload), wanted, workload, options.batches, options.token_budgets))
    lines: list[list[dict[str, Any]]] = [[] for _ in plans]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        for _ in range(options.rounds):
            for plan, found in zip(plans, lines, strict=True):
                file.write_text(plan.to_json(), "utf-8")
                told: dict[str, Any] = {
                    "chosen": plan is plans[0],
                    "max_batch": plan.max_batch,
                    "token_budget": plan.token_budget,
                    "cache": plan.cache,
                    "pinned": len(plan.placement.pinned),
                }
                try:
                    line = offload_line(
                        [*point.options(), "--plan", str(file), *_threads(options)], _under(options, point.memory)
                    )
                    told |= {name: line[name] for name in TOLD}
                except RunFailed as error:
                    told |= {"failed": str(error)}
                found.append(told)
                _show(told, options)
    _show(grid_summary([median_line(found) for found in lines]), options)


def _show(line: dict[str, Any], options: argparse.Namespace) -> None:
    print(json.dumps(line) if options.json else _sentence(line), flush=True)


def grid_summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The planner's choice, the first line, beside the best of all."""
    done = [line for line in lines if "failed" not in line]
    best = max(done, key=lambda line: line["output_tokens_per_s"], default=None)
    chosen = next((line for line in done if line["chosen"]), None)
    share = None if best is None or chosen is None else chosen["output_tokens_per_s"] / best["output_tokens_per_s"]
    return {
        "plans": len(lines),
        "failed": len(lines) - len(done),
        "chosen": chosen,
        "best": best,
        "chosen_of_best": share,
    }


def _predicted(line: dict[str, Any]) -> float | None:
    return line["predicted"]["output_tokens_per_s"] if line["predicted"] else None


def _threads(options: argparse.Namespace) -> list[str]:
    return ["--threads", str(options.threads)]


def _under(options: argparse.Namespace, memory: str) -> list[str]:
    return [word.replace("{memory}", str(byte_count(memory))) for word in (options.under or "").split()]


def _sentence(told: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _add(workloads: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = workloads.add_parser(name, help=text)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--under",
        metavar="COMMAND",
        help='put before each run; "{memory}" stands for its bytes, as in "./capped.sh {memory}"',
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="times that all is run, one after the other; medians count (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the summary last")
    return parser


def add_plan_accuracy(workloads: Any) -> None:
    """The command's arguments. `options.run(options)` runs it."""
    parser = _add(workloads, "plan-accuracy", "predictions of the planner against runs, over a list of points")
    parser.add_argument(
        "--point", type=Point.of, nargs="+", required=True, metavar="MODEL,MEMORY,ROWS,PROMPT,NEW", help="what to run"
    )
    parser.set_defaults(run=_accuracy)


def add_plan_grid(workloads: Any, positive: Any) -> None:
    """The command's arguments. `options.run(options)` runs it. positive: reads a count of at least 1."""
    parser = _add(workloads, "plan-grid", "the planner's choice against every plan of a small grid, one point")
    parser.add_argument(
        "--point", type=Point.of, required=True, metavar="MODEL,MEMORY,ROWS,PROMPT,NEW", help="the work"
    )
    parser.add_argument("--batches", type=positive, nargs="+", default=[16, 64], help="sequences at a time (16 64)")
    parser.add_argument("--token-budgets", type=positive, nargs="+", default=[256, 1024], help="rows a step (256 1024)")
    parser.set_defaults(run=_grid)

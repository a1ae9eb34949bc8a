"""`python -m inference.bench WORKLOAD --model PATH --batch N ... --json`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from inference.bench.invariance import add_invariance
from inference.bench.json_outputs import json_counts
from inference.bench.measure import result_line, run_rows, show, warm_up
from inference.bench.offload import add_offload
from inference.bench.plan_checks import add_plan_accuracy, add_plan_grid
from inference.bench.prompts import (
    ITEM_NEW,
    ITEM_TOKENS,
    JSON_NEW,
    SYSTEM_TOKENS,
    Row,
    dump_rows,
    json_rows,
    random_rows,
    shared_prefix_rows,
    uniform_rows,
)
from inference.bench.soak import add_soak
from inference.bench.under_load import Stream, load_line, run_under_load
from inference.command_line import positive, told
from inference.engine import DEFAULT_TOKEN_BUDGET, Engine
from inference.loading import store_at
from inference.tokenizer import Tokenizer
from inference.weights.manifest import StoreManifest

_DESCRIPTION = """\
Measure the engine. Each batch size gives one line; output tokens a second count the whole call, prefill included.
Machines are noisy: compare only figures of one sitting. docs/performance.md explains workloads and lines.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    workloads = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    resident = workloads.add_parser(
        "resident", help="random prompts of one length, greedy outputs of one length, all weights in memory"
    )
    _add_common(resident, prompt=128, new=128)
    resident.add_argument(
        "--uniform", type=_span, metavar="LEAST-MOST", help="draw the length of each prompt and output (100-1024)"
    )
    shared = workloads.add_parser(
        "shared-prefix", help="one system prompt before every item, real text; needs a tokenizer"
    )
    _add_common(shared, prompt=ITEM_TOKENS, new=ITEM_NEW)
    shared.add_argument(
        "--system", type=positive, default=SYSTEM_TOKENS, help="tokens of the system prompt (default 400)"
    )
    forms = workloads.add_parser("json", help="outputs held to a JSON schema, validated afterwards; needs a tokenizer")
    _add_common(forms, prompt=None, new=JSON_NEW)
    load = workloads.add_parser(
        "interactive-under-load", help="a Poisson stream of urgent requests over a saturating batch"
    )
    _add_common(load, prompt=128, new=128)
    load.add_argument("--rate", type=float, default=2.0, help="interactive requests a second (default 2)")
    load.add_argument(
        "--interactive-prompt", type=positive, default=128, help="tokens of each one's prompt (default 128)"
    )
    load.add_argument(
        "--interactive-new", type=positive, default=32, help="tokens that each one generates (default 32)"
    )
    load.add_argument(
        "--idle-requests", type=positive, default=40, help="timed one by one on the idle engine (default 40)"
    )
    for workload in (resident, shared, forms, load):
        workload.set_defaults(run=_run)
    add_offload(workloads, positive)
    add_plan_accuracy(workloads)
    add_plan_grid(workloads, positive)
    add_invariance(workloads)
    add_soak(workloads)
    return parser


def _add_common(workload: argparse.ArgumentParser, *, prompt: int | None, new: int) -> None:
    workload.add_argument("--model", required=True, type=Path, help="a weight store, GGUF file or Hugging Face folder")
    workload.add_argument(
        "--batch", type=positive, nargs="+", default=[64, 256], help="prompts a call (default 64 256)"
    )
    if prompt is not None:
        workload.add_argument("--prompt", type=positive, default=prompt, help=f"tokens a prompt (default {prompt})")
    workload.add_argument("--new", type=positive, default=new, help=f"tokens to generate a prompt (default {new})")
    workload.add_argument("--threads", type=positive, default=os.cpu_count())
    workload.add_argument("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    workload.add_argument("--token-budget", type=positive, default=DEFAULT_TOKEN_BUDGET, help="rows a step")
    workload.add_argument(
        "--repeat", type=positive, default=1, help="times; the median and the range are told (default 1)"
    )
    workload.add_argument("--measure-again", action="store_true", help="measure the host's peaks anew")
    workload.add_argument(
        "--dump-prompts", type=Path, metavar="FILE", help="write the prompts as JSONL for other engines, and end"
    )
    workload.add_argument("--json", action="store_true", help="one JSON object a line")


def _span(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LEAST-MOST, such as 100-1024")
    return int(least), int(most)


def _rows(options: argparse.Namespace, batch: int, store: Path) -> list[Row]:
    vocab_size = StoreManifest.load(store).config.vocab_size
    if options.workload == "shared-prefix":
        tokenizer = Tokenizer.load(store)
        return shared_prefix_rows(batch, tokenizer, system=options.system, item=options.prompt, new=options.new)
    if options.workload == "json":
        return json_rows(batch, Tokenizer.load(store), options.new)
    if options.workload == "resident" and options.uniform is not None:
        least, most = options.uniform
        return uniform_rows(batch, least, most, vocab_size)
    return random_rows(batch, options.prompt, options.new, vocab_size)


def _run(options: argparse.Namespace) -> None:
    store = store_at(options.model)
    work = {batch: _rows(options, batch, store) for batch in options.batch}
    if options.dump_prompts is not None:
        options.dump_prompts.unlink(missing_ok=True)
        for batch, rows in work.items():
            dump_rows(options.dump_prompts, batch, rows)
        return
    loading = time.perf_counter()
    engine = Engine.load(
        store,
        threads=options.threads,
        compute=options.compute,
        max_batch=max(options.batch),
        token_budget=options.token_budget,
    )
    load_seconds = round(time.perf_counter() - loading, 2)
    engine.peaks(again=options.measure_again)
    warm_up(engine, min(len(rows[0].token_ids) for rows in work.values()))
    for batch, rows in work.items():
        own: dict[str, object] = {"workload": options.workload, "load_seconds": load_seconds}
        prompt = round(sum(len(row.token_ids) for row in rows) / batch)
        new = round(sum(row.sampling.max_tokens for row in rows) / batch)
        if options.workload == "interactive-under-load":
            stream = Stream(options.rate, options.interactive_prompt, options.interactive_new, options.idle_requests)
            loads = [run_under_load(engine, rows, stream) for _ in range(options.repeat)]
            line = load_line(engine, loads, batch=batch, prompt=prompt, new=new) | own
            show(line, loads[0].together, options.json)
            continue
        runs = [run_rows(engine, rows) for _ in range(options.repeat)]
        if options.workload == "json":
            own |= json_counts(runs[0].completions)
        if options.workload == "resident" and options.uniform is not None:
            own["uniform"] = "{}-{}".format(*options.uniform)
        show(result_line(engine, runs, batch=batch, prompt=prompt, new=new) | own, runs[0], options.json)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return told(lambda: options.run(options) or 0)


if __name__ == "__main__":
    sys.exit(main())

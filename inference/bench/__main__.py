"""`python -m inference.bench WORKLOAD --model PATH --batch N ... --json`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from inference.bench.resident import run_resident
from inference.errors import InferenceError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m inference.bench",
        description="Measure the engine. Each batch size gives one line; output tokens a second count the whole call, "
        "prefill included. Machines are noisy: compare only figures of one sitting.",
    )
    workloads = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    resident = workloads.add_parser(
        "resident", help="random prompts of one length, greedy outputs of one length, all weights in memory"
    )
    resident.add_argument("--model", required=True, type=Path, help="a weight store, GGUF file or Hugging Face folder")
    resident.add_argument("--batch", type=int, nargs="+", default=[64, 256], help="prompts a call (default 64 256)")
    resident.add_argument("--prompt", type=int, default=128, help="tokens a prompt (default 128)")
    resident.add_argument("--new", type=int, default=128, help="tokens to generate a prompt (default 128)")
    resident.add_argument("--threads", type=int, default=os.cpu_count())
    resident.add_argument("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    resident.add_argument("--token-budget", type=int, help="rows a step")
    resident.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    try:
        run_resident(options)
    except InferenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m inference evaluate`: a store against its reference, in figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.command_line import positive

if TYPE_CHECKING:
    from inference.evaluate import Evaluation, Figure


def add_evaluate_command(commands: Any) -> None:
    """Add the sub-command to what argparse's add_subparsers returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate", help="measure perplexity, agreement, divergence and a task's score against a reference"
    )
    parser.add_argument("store", type=Path, help="a weight store, GGUF file or Hugging Face folder")
    parser.add_argument("--reference", type=Path, help="what to compare with, of the same kinds (default: the same)")
    parser.add_argument("--text", required=True, type=Path, help="held-out text, UTF-8")
    parser.add_argument("--task", type=Path, help='JSONL: {"context", "choices", "answer"} or {"context", "target"}')
    parser.add_argument("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    parser.add_argument("--reference-compute", choices=["fp32", "bf16", "int8"], default="fp32")
    parser.add_argument("--window", type=int, default=512, help="tokens read at a time (default 512)")
    parser.add_argument("--tokens", type=positive, help="of the text, at most (default: all)")
    parser.add_argument("--threads", type=positive, help="processor threads (default: all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run_evaluate(options: argparse.Namespace) -> int:
    import torch

    from inference.evaluate import EvaluationError, evaluate

    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        text = options.text.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{options.text}: cannot be read as UTF-8 text: {error}") from None

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total} tokens", end="" if done < total else "\n", file=sys.stderr, flush=True)

    result = evaluate(
        options.store,
        text,
        reference=options.reference,
        compute=options.compute,
        reference_compute=options.reference_compute,
        window_tokens=options.window,
        max_tokens=options.tokens,
        task=options.task,
        progress=progress,
    )
    if options.json:
        print(json.dumps(result.to_dict(), indent=1, ensure_ascii=False))
    else:
        _print_figures(result)
    return 0


def _print_figures(result: Evaluation) -> None:
    for label, side in (("model", result.model), ("reference", result.reference)):
        print(f"{label:20} {side.source}, {side.quantization}, computed in {side.compute} ({side.digest[:16]})")
    print(f"{'text':20} {result.scored_tokens} tokens in {result.windows} windows, SHA-256 {result.text_sha256[:16]}")
    print(f"{'perplexity':20} {_with_interval(result.perplexity)}")
    print(f"{'reference':20} {_with_interval(result.reference_perplexity)}")
    print(f"{'change':20} {_with_interval(result.perplexity_change, 100, ' %')}")
    print(f"{'top-1 agreement':20} {_with_interval(result.top1_agreement, 100, ' %')}")
    print(f"{'KL divergence':20} {_with_interval(result.kl_mean_nats)} nats, 99th percentile {result.kl_p99_nats:.4f}")
    if result.task is not None:
        task = result.task
        share = f"{100 * task.accuracy:.1f} % [{100 * task.accuracy_low:.1f}, {100 * task.accuracy_high:.1f}]"
        print(f"{'task':20} {share} of {task.items} items; reference {100 * task.reference_accuracy:.1f} %")


def _with_interval(figure: Figure, factor: float = 1.0, unit: str = "") -> str:
    value = f"{factor * figure.value:.4f}{unit}"
    if figure.low is None or figure.high is None:
        return value
    return f"{value} [{factor * figure.low:.4f}, {factor * figure.high:.4f}]"

"""Random prompts of one length, all weights in memory: the throughput of the plain running batch."""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from inference.engine import DEFAULT_TOKEN_BUDGET, Engine
from inference.request import SamplingParams


def random_prompts(batch: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Uniformly random token ids, the same for every engine that is compared."""
    rng = random.Random(seed)
    top = min(40_000, vocab_size - 1)
    return [[rng.randint(100, top) for _ in range(length)] for _ in range(batch)]


def run_resident(options: argparse.Namespace) -> None:
    loading = time.perf_counter()
    engine = Engine.load(
        options.model,
        threads=options.threads,
        compute=options.compute,
        max_batch=max(options.batch),
        token_budget=options.token_budget or DEFAULT_TOKEN_BUDGET,
    )
    load_seconds = time.perf_counter() - loading
    vocab_size = engine.manifest.config.vocab_size
    engine.generate(
        random_prompts(4, options.prompt, vocab_size, seed=1), SamplingParams(max_tokens=4, ignore_eos=True)
    )
    for batch in options.batch:
        _show(_measure(engine, options, batch, vocab_size) | {"load_seconds": round(load_seconds, 2)}, options.json)


def _measure(engine: Engine, options: argparse.Namespace, batch: int, vocab_size: int) -> dict[str, Any]:
    prompts = random_prompts(batch, options.prompt, vocab_size)
    before = engine.stats()
    started = time.perf_counter()
    completions = engine.generate(prompts, SamplingParams(max_tokens=options.new, ignore_eos=True))
    seconds = time.perf_counter() - started
    after = engine.stats()
    output_tokens = sum(completion.output_tokens for completion in completions)
    first = sorted(completion.ttft_seconds or 0.0 for completion in completions)
    steps = after.steps - before.steps
    return {
        "engine": "penstock",
        "batch": batch,
        "prompt": options.prompt,
        "new": options.new,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "total_tokens_per_s": round((output_tokens + batch * options.prompt) / seconds, 1),
        "requests_per_s": round(batch / seconds, 2),
        "ttft_seconds_median": round(first[len(first) // 2], 3),
        "ttft_seconds_largest": round(first[-1], 3),
        "steps": steps,
        "busy_share": round((after.busy_seconds - before.busy_seconds) / seconds, 3),
        "compute": after.compute,
        "kernels": after.kernels,
        "threads": after.threads,
        "threads_at_end": after.threads_now,
    }


def _show(line: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
        return
    print(
        f"batch {line['batch']}: {line['output_tokens_per_s']} output tokens/s, {line['total_tokens_per_s']} in all, "
        f"{line['seconds']} s, first token after {line['ttft_seconds_median']} s (median); "
        f"{line['compute']}, {line['kernels']} kernels, {line['threads']} threads",
        flush=True,
    )

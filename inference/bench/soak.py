"""Very many mixed requests through one engine: does memory stay flat, and does every page come back?

A day of traffic is simulated by its count, not its hours. Requests of all lengths and priorities come so that some
always wait; some are cancelled at any moment, some end at a stop token, some cannot run at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from inference.bench.tiny import write_tiny_model
from inference.engine import Engine
from inference.request import Completion, GenerationRequest, SamplingParams
from inference.weights import import_model

IN_FLIGHT = 64
MAX_BATCH = 4
SAMPLES = 40  # of the memory in use, over the run
CACHE_PAGES = 18  # tight, so that requests have to take turns


@dataclass(frozen=True, slots=True)
class SoakResult:
    """rss_bytes: of this process, at even distances in requests. growth_bytes: of its second half, by the medians of
    the half's own two halves; a leak shows there, caches that fill up do not."""

    requests: int
    seconds: float
    reasons: dict[str, int]
    preemptions: int
    pauses: int
    prefix_hit_tokens: int
    pages_leaked: int
    requests_left: int
    rss_bytes: tuple[int, ...]

    @property
    def growth_bytes(self) -> int:
        half = self.rss_bytes[len(self.rss_bytes) // 2 :]
        middle = len(half) // 2
        return _median(half[middle:]) - _median(half[:middle])


def soak(engine: Engine, requests: int, *, seed: int = 0, progress: bool = False) -> SoakResult:
    """Run that many requests; the engine must not be started."""
    rng = random.Random(seed)
    vocab_size = engine.manifest.config.vocab_size
    longest = min(engine.max_context, 32 * engine.stats().cache_pages_total) - 1
    beginnings = [[rng.randrange(3, vocab_size) for _ in range(longest // 3)] for _ in range(4)]
    process, reasons, open_ids = psutil.Process(), Counter[str](), dict[str, None]()
    rss: list[int] = []
    started = time.perf_counter()

    def finish(completion: Completion) -> None:
        reasons[completion.finish_reason] += 1
        open_ids.pop(completion.request_id, None)

    for number in range(requests):
        name = f"soak-{number}"
        open_ids[name] = None
        prompt = _prompt(rng, beginnings, vocab_size, longest)
        request = GenerationRequest(name, prompt, _sampling(rng, longest - len(prompt)), rng.choice([0, 3, 3, 3, 9]))
        engine.submit(request, on_finish=finish)
        if rng.random() < 0.1:
            engine.cancel(rng.choice(list(open_ids)))
        while len(open_ids) >= IN_FLIGHT:
            engine.step()
        if number * SAMPLES // requests != (number + 1) * SAMPLES // requests:
            gc.collect()
            rss.append(process.memory_info().rss)
            if progress:
                print(f"\r{number + 1} of {requests}, {rss[-1] / 1e6:.1f} MB", end="", file=sys.stderr, flush=True)
    while engine.step():
        pass
    stats = engine.stats()
    return SoakResult(
        requests=requests,
        seconds=round(time.perf_counter() - started, 1),
        reasons=dict(reasons),
        preemptions=stats.preemptions,
        pauses=stats.pauses,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        pages_leaked=stats.cache_pages_used,
        requests_left=len(open_ids) + stats.running + stats.paused + stats.waiting,
        rss_bytes=tuple(rss),
    )


def _prompt(rng: random.Random, beginnings: list[list[int]], vocab_size: int, longest: int) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.01:
        return ()  # cannot run
    if kind < 0.02:
        return (3,) * (longest + 1)  # cannot run
    beginning = rng.choice(beginnings)[: rng.choice([0, rng.randint(0, longest // 3)])]
    return tuple(beginning + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 60))])


def _sampling(rng: random.Random, room: int) -> SamplingParams:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": rng.randint(0, 99)} if rng.random() < 0.5 else {}
    ends = tuple(rng.randrange(3, 300) for _ in range(rng.choice([0, 0, 3])))
    return SamplingParams(max_tokens=rng.randint(1, max(1, min(60, room))), stop_token_ids=ends, **drawn)


def _median(values: tuple[int, ...]) -> int:
    return sorted(values)[len(values) // 2]


def small_engine(folder: Path) -> Engine:
    """An engine on a tiny random model, with little memory. Writes into the folder."""
    write_tiny_model(folder / "model")
    import_model(folder / "model", folder / "store")
    settings: dict[str, Any] = {"threads": 1, "max_batch": MAX_BATCH, "token_budget": 256}
    roomy = Engine.load(folder / "store", **settings)
    spare = (roomy.stats().cache_pages_total - CACHE_PAGES) * roomy.cache_page_bytes
    return Engine.load(folder / "store", memory_bytes=roomy.memory_bytes_at_most - spare, **settings)


def add_soak(workloads: Any) -> None:
    """The command's arguments. `options.run(options)` runs it."""
    parser = workloads.add_parser("soak", help="very many mixed requests: memory stays flat, no page is lost")
    parser.add_argument("--requests", type=int, default=20_000, help="how many (default 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = small_engine(Path(folder))
        watched = not options.json and sys.stderr.isatty()
        result = soak(engine, options.requests, seed=options.seed, progress=watched)
    if options.json:
        line = {name: getattr(result, name) for name in SoakResult.__slots__}
        print(json.dumps(line | {"growth_bytes": result.growth_bytes}))
        return
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(result.reasons.items()))
    print(f"{result.requests} requests in {result.seconds} s: {ended}")
    print(f"{result.preemptions} preemptions, {result.pauses} pauses, {result.prefix_hit_tokens} tokens found in cache")
    print(f"pages not given back: {result.pages_leaked}; requests not ended: {result.requests_left}")
    print("memory in MB: " + " ".join(f"{value / 1e6:.0f}" for value in result.rss_bytes))
    print(f"growth within the second half: {result.growth_bytes / 1e6:.2f} MB")

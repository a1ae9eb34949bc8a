"""Random mixes of requests: whatever runs beside a request, before it or instead of it, its output is the same bits.

A mix draws the engine's settings (pages of memory, batch, token budget, chunks), prompts that begin alike, sampling,
priorities, the step at which each request comes (some of them between two layers of a step) and the cancellations.
Each output is compared with that of the same request alone in an engine that shares nothing and takes every prompt in
one piece.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inference.bench.tiny import KV_HEADS, write_tiny_model
from inference.cache.pages import PagePool, pages_for
from inference.engine import Engine
from inference.errors import InferenceError
from inference.kernels.base import KeyValueCache, Rows
from inference.loading import ComputeChoice, LoadedModel, load_model
from inference.model.batch import StepBatch
from inference.model.decoder import Decoder
from inference.request import Choice, Completion, GenerationRequest, SamplingParams
from inference.weights import import_model
from inference.weights.importer import Quantize

MOST_PAGES = 64
MOST_BATCH = 8
MOST_BUDGET = 512


class NotInvariant(InferenceError):
    """An output that changed with its surroundings. Says which, and in which mix."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes: before a step, and so many layers into it. cancel_step: None to let it end."""

    request: GenerationRequest
    step: int
    layer: int
    cancel_step: int | None


@dataclass(frozen=True, slots=True)
class Mix:
    """An engine's settings, and what it is given to do."""

    pages: int
    max_batch: int
    token_budget: int
    chunk_tokens: int
    share_prefixes: bool
    arrivals: tuple[Arrival, ...]


@dataclass(slots=True)
class Tally:
    """What the mixes brought about: without prefix hits, preemptions and so on they would prove little."""

    mixes: int = 0
    outputs: int = 0
    tokens: int = 0
    cancelled: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: int = 0
    steps_within_steps: int = 0


class _Interrupted(Decoder):
    """A decoder that lets requests come between two layers of a step."""

    def __init__(self, decoder: Decoder, interrupt: Callable[[], None]) -> None:
        vars(self).update(vars(decoder))
        self._interrupt = interrupt

    def forward(self, batch: StepBatch, cache: KeyValueCache, between_layers: Callable[[], None] | None = None) -> Rows:
        if between_layers is None:
            return super().forward(batch, cache)
        rest = between_layers

        def between() -> None:
            self._interrupt()
            rest()

        return super().forward(batch, cache, between)


@dataclass(slots=True)
class InvarianceCheck:
    """Runs mixes on one model, whose outputs without company it remembers."""

    model: LoadedModel
    tally: Tally = field(default_factory=Tally)
    _alone: dict[tuple[tuple[int, ...], SamplingParams], Completion] = field(default_factory=dict)

    def run(self, mix: Mix) -> None:
        """Raises NotInvariant; also where a page or a request is lost."""
        pages = PagePool(mix.pages, self.model.cache.clear, self.model.cache.copy)
        todo = sorted(mix.arrivals, key=lambda arrival: (arrival.step, arrival.layer))
        done: dict[str, Completion] = {}
        step = layer = 0

        def arrive() -> None:
            nonlocal layer
            while todo and (todo[0].step, todo[0].layer) <= (step, layer):
                engine.submit(todo.pop(0).request, on_finish=finish)
            layer += 1

        def finish(completion: Completion) -> None:
            done[completion.request_id] = completion

        decoder = _Interrupted(self.model.decoder, arrive)
        engine = Engine(
            replace(self.model, decoder=decoder, pages=pages),
            threads=1,
            max_batch=mix.max_batch,
            token_budget=mix.token_budget,
            chunk_tokens=mix.chunk_tokens,
            share_prefixes=mix.share_prefixes,
        )
        while len(done) < len(mix.arrivals):
            layer = 0
            arrive()
            for arrival in mix.arrivals:
                if arrival.cancel_step == step:
                    engine.cancel(arrival.request.request_id)
            if not engine.step() and not todo and len(done) < len(mix.arrivals):
                raise NotInvariant(f"requests are left and nothing moves: {mix}")
            step += 1
        self._compare(mix, done)
        stats = engine.stats()
        if stats.cache_pages_used or stats.running or stats.paused or stats.waiting:
            raise NotInvariant(f"pages or requests are left over at the end: {stats} after {mix}")
        tally = self.tally
        tally.mixes += 1
        tally.prefix_hit_tokens += stats.prefix_hit_tokens
        tally.preemptions += stats.preemptions
        tally.recomputed_tokens += stats.recomputed_tokens
        tally.pauses += stats.pauses
        tally.steps_within_steps += stats.steps_within_steps

    def _compare(self, mix: Mix, done: dict[str, Completion]) -> None:
        for arrival in mix.arrivals:
            request, made = arrival.request, done[arrival.request.request_id]
            alone = self._completion_alone(request)
            self.tally.outputs += 1
            self.tally.tokens += made.output_tokens
            if made.finish_reason == "cancelled":
                self.tally.cancelled += 1
                same = _begins(alone, made) and all(map(_begins, alone.choices, made.choices))
            else:
                same = _outcome(made) == _outcome(alone)
            if not same:
                raise NotInvariant(f"{request} gave {made}, and alone {alone}, in {mix}")

    def _completion_alone(self, request: GenerationRequest) -> Completion:
        key = request.prompt_token_ids, request.sampling
        if key not in self._alone:
            engine = Engine(
                replace(self.model, pages=PagePool(MOST_PAGES, self.model.cache.clear, self.model.cache.copy)),
                threads=1,
                max_batch=MOST_BATCH,
                token_budget=MOST_BUDGET,
                share_prefixes=False,
            )
            (self._alone[key],) = engine.generate([request.prompt_token_ids], request.sampling)
        return self._alone[key]


def _begins(whole: Completion | Choice, part: Completion | Choice) -> bool:
    count = len(part.token_ids)
    return part.token_ids == whole.token_ids[:count] and (part.logprobs or ()) == (whole.logprobs or ())[:count]


def _outcome(completion: Completion) -> tuple[object, ...]:
    return completion.finish_reason, completion.token_ids, completion.logprobs, completion.choices


def random_mix(rng: random.Random, vocab_size: int) -> Mix:
    """A mix drawn by that generator: the same generator, the same mix."""
    beginnings = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 140))] for _ in range(2)]
    requests = [
        GenerationRequest(f"r{index}", _prompt(rng, beginnings, vocab_size), _sampling(rng), rng.randint(0, 3))
        for index in range(rng.randint(2, 8))
    ]
    least = max(pages_for(len(request.prompt_token_ids) + request.sampling.max_tokens) for request in requests)
    last = rng.choice([0, 3, 12])
    return Mix(
        pages=min(MOST_PAGES, least + rng.choice([0, 1, 3, 8, MOST_PAGES])),
        max_batch=rng.randint(1, MOST_BATCH),
        token_budget=rng.choice([1, 64, 200, MOST_BUDGET]),
        chunk_tokens=rng.choice([32, 64, 96, 256]),
        share_prefixes=rng.random() < 0.9,
        arrivals=tuple(
            Arrival(
                request,
                step=rng.randint(0, last),
                layer=rng.choice([0, 0, 1, 2]),
                cancel_step=rng.randint(0, 20) if rng.random() < 0.15 else None,
            )
            for request in requests
        ),
    )


def _prompt(rng: random.Random, beginnings: list[list[int]], vocab_size: int) -> tuple[int, ...]:
    beginning = rng.choice(beginnings)
    shared = rng.choice([0, len(beginning), rng.randint(0, len(beginning))])
    own = [rng.randrange(3, vocab_size) for _ in range(rng.choice([0, 1, rng.randint(1, 60)]))]
    return tuple(beginning[:shared] + own) or (3,)


def _sampling(rng: random.Random) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 12, 40]), "ignore_eos": True}
    if rng.random() < 0.5:
        settings |= {"temperature": rng.choice([0.5, 1.0, 3.0]), "seed": rng.randint(0, 5)}
        settings |= {"top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 20])}
    if rng.random() < 0.3:
        settings["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        settings |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    if rng.random() < 0.15 and "seed" in settings:
        settings["n"] = 2
    return SamplingParams(**settings)


@contextmanager
def tiny_model(
    compute: ComputeChoice = "auto", *, quantize: Quantize = "keep", kv_heads: int = KV_HEADS
) -> Iterator[LoadedModel]:
    """The tiny model, imported and loaded with room for any mix. kv_heads: as of `write_tiny_model`."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", kv_heads=kv_heads)
        import_model(Path(folder) / "model", Path(folder) / "store", quantize=quantize)
        yield load_small(Path(folder) / "store", compute)


def load_small(path: Path, compute: ComputeChoice) -> LoadedModel:
    model = load_model(path, compute=compute, max_batch=MOST_BATCH, token_budget=MOST_BUDGET, memory_bytes=None)
    if model.pages.total < MOST_PAGES:
        raise NotInvariant(f"mixes need {MOST_PAGES} pages of cache; there is memory for {model.pages.total}")
    return model


def add_invariance(workloads: Any) -> None:
    """The command's arguments. `options.run(options)` runs it."""
    parser = workloads.add_parser("invariance", help="check that no output depends on what runs beside it")
    parser.add_argument("--mixes", type=int, default=1000, help="random mixes (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a tiny random model is made by default")
    parser.add_argument("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    if options.model is None:
        with tiny_model(options.compute) as model:
            check = _run_mixes(model, options)
    else:
        check = _run_mixes(load_small(options.model, options.compute), options)
    seconds = round(time.perf_counter() - started, 1)
    line = {name: getattr(check.tally, name) for name in Tally.__slots__} | {"changed": 0, "seconds": seconds}
    line |= {"compute": check.model.compute, "kernels": check.model.decoder.kernels.name}
    if options.json:
        print(json.dumps(line))
        return
    print(f"{line.pop('outputs')} outputs in {line.pop('mixes')} mixes: every one the same bits as alone")
    print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in line.items()))


def _run_mixes(model: LoadedModel, options: argparse.Namespace) -> InvarianceCheck:
    check = InvarianceCheck(model)
    for number in range(options.mixes):
        check.run(random_mix(random.Random(f"{options.seed} {number}"), model.manifest.config.vocab_size))
        if not options.json and sys.stderr.isatty():
            print(f"\r{number + 1} of {options.mixes}", end="", file=sys.stderr, flush=True)
    return check

"""Runs random mixes (`mixes`): whatever runs beside a request, before it or instead of it, its output is the same bits.

Each output is compared with that of the same request alone in an engine that shares nothing and takes every prompt in
one piece.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inference.bench.mixes import MOST_BATCH, MOST_BUDGET, MOST_PAGES, Mix, random_mix
from inference.bench.tiny import USUAL, HeadShape, write_tiny_model
from inference.cache.pages import PagePool
from inference.engine import Engine
from inference.errors import InferenceError, SettingError
from inference.fitting import CacheChoice
from inference.kernels.base import Between, StepPages
from inference.loading import ComputeChoice, LoadedModel, load_model
from inference.model.batch import StepBatch
from inference.model.decoder import Decoder
from inference.request import Choice, Completion, GenerationRequest, SamplingParams
from inference.weights import import_model
from inference.weights.importer import Quantize


class Trial(NamedTuple):
    """A tiny model and the cache that it is run with, where this host's kernels have that one."""

    shape: HeadShape
    quantize: Quantize
    cache: CacheChoice


# Mixes take turns at these: heads in groups of three (as SmolLM2 has them), of two, and alone.
TRIALS = (
    Trial(HeadShape(3, 1, 64), "keep", "int8"),
    Trial(HeadShape(4, 4, 32), "int4", "int8"),
    Trial(HeadShape(4, 2, 32), "keep", "int4"),
    Trial(HeadShape(2, 2, 64), "int8", "bf16"),
)


class NotInvariant(InferenceError):
    """An output that changed with its surroundings. Says which, and in which mix."""


@dataclass(slots=True)
class Tally:
    """What the mixes brought about: without prefix hits, preemptions and so on they would prove little."""

    mixes: int = 0
    outputs: int = 0
    tokens: int = 0
    constrained: int = 0
    cancelled: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: int = 0
    steps_within_steps: int = 0


_ALWAYS = ctypes.c_int32(1)


class _Interrupted(Decoder):
    """A decoder that lets requests come between two layers of a step."""

    def __init__(self, decoder: Decoder, interrupt: Callable[[], None]) -> None:
        vars(self).update(vars(decoder))
        self._interrupt = interrupt

    def _states(self, batch: StepBatch, pages: StepPages, between: Between | None = None) -> torch.Tensor:
        if between is None:
            return super()._states(batch, pages)
        rest = between.call

        def interrupted() -> None:
            self._interrupt()
            rest()

        return super()._states(batch, pages, Between(interrupted, _ALWAYS))


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
            self.tally.constrained += request.sampling.constraint is not None
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
    return completion.finish_reason, completion.error, completion.token_ids, completion.logprobs, completion.choices


@contextmanager
def tiny_model(
    compute: ComputeChoice = "auto",
    *,
    shape: HeadShape = USUAL,
    quantize: Quantize = "keep",
    cache: CacheChoice = "auto",
) -> Iterator[LoadedModel]:
    """A tiny model, imported and loaded with room for any mix."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "model", shape=shape)
        import_model(Path(folder) / "model", Path(folder) / "store", quantize=quantize)
        yield load_small(Path(folder) / "store", compute, cache)


def load_small(path: Path, compute: ComputeChoice, cache: CacheChoice = "auto") -> LoadedModel:
    """With room for any mix. cache: the kernels' own choice where they have not got that one."""
    try:
        model = load_model(
            path, compute=compute, cache=cache, max_batch=MOST_BATCH, token_budget=MOST_BUDGET, memory_bytes=None
        )
    except SettingError:
        if cache == "auto":
            raise
        return load_small(path, compute)
    if model.pages.total < MOST_PAGES:
        raise NotInvariant(f"mixes need {MOST_PAGES} pages of cache; there is memory for {model.pages.total}")
    return model


def add_invariance(workloads: Any) -> None:
    """The command's arguments. `options.run(options)` runs it."""
    parser = workloads.add_parser("invariance", help="check that no output depends on what runs beside it")
    parser.add_argument("--mixes", type=int, default=1000, help="random mixes (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="by default, tiny random ones with several shapes of heads")
    parser.add_argument("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    started, tally = time.perf_counter(), Tally()
    if options.model is None:
        with ExitStack() as stack:
            models = [
                stack.enter_context(
                    tiny_model(options.compute, shape=trial.shape, quantize=trial.quantize, cache=trial.cache)
                )
                for trial in TRIALS[: options.mixes]
            ]
            _run_mixes(models, tally, options)
    else:
        models = [load_small(options.model, options.compute)]
        _run_mixes(models, tally, options)
    seconds = round(time.perf_counter() - started, 1)
    line = {name: getattr(tally, name) for name in Tally.__slots__} | {"changed": 0, "seconds": seconds}
    line |= {"compute": models[0].compute, "kernels": models[0].decoder.kernels.name}
    line |= {"models": [_described(model) for model in models]}
    if options.json:
        print(json.dumps(line))
        return
    print(f"{line.pop('outputs')} outputs in {line.pop('mixes')} mixes: every one the same bits as alone")
    print("models: " + "; ".join(line.pop("models")))
    print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in line.items()))


def _run_mixes(models: list[LoadedModel], tally: Tally, options: argparse.Namespace) -> None:
    checks = [InvarianceCheck(model, tally) for model in models]
    for number in range(options.mixes):
        check = checks[number % len(checks)]
        check.run(random_mix(random.Random(f"{options.seed} {number}"), check.model.manifest.config.vocab_size))
        if not options.json and sys.stderr.isatty():
            print(f"\r{number + 1} of {options.mixes}", end="", file=sys.stderr, flush=True)


def _described(model: LoadedModel) -> str:
    config = model.manifest.config
    shape = HeadShape(config.heads, config.kv_heads, config.head_dim)
    return f"heads {shape}, weights {model.manifest.tensor('layers.0.gate').encoding}, cache {model.cache.kind}"

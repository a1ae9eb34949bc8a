"""How long a layer takes, measured on one of the model's own: by rows, by what they attend to, and beside reads."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference.cache.pages import pages_for
from inference.group import lone_sequence
from inference.kernels.base import CacheKind, Kernels, KeyValueCache
from inference.kernels.native.build import HEADERS, SOURCES, processor_marks
from inference.memory.allocation import give_back_freed_memory, keep_freed_memory
from inference.model.batch import StepBatch, build_batch
from inference.model.decoder import Decoder
from inference.model.layers import DecoderLayer, LayerReader
from inference.model.residency import WeightsInMemory
from inference.planner.disk import READERS, TrialFile
from inference.planner.measured import keep, kept, measured_place
from inference.scheduler import Slice

FORMAT = 4
ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
# Weights come from memory in a step, not from a cache that the layer before has filled.
WORKING_BYTES = 128 * 2**20
MOST_COPIES = 16
CONTEXT = 256
CONTEXT_ROWS = 64
PROMPT = 256
BESIDE_ROWS = 128
TRIES = 3
MORE_TRIES = 8
SECONDS_A_RATE = 0.25
BESIDE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSeconds:
    """What looking back adds to a layer, with one kind of cache.

    decode_token: for each row and token of context that a decoding row looks back to. prompt_pair: for each pair of a
    prompt's row and a token before it.
    """

    decode_token: float
    prompt_pair: float


@dataclass(frozen=True, slots=True)
class LayerRates:
    """Seconds of one layer on this host, all its matrices in memory.

    layer: by `rows`, each a sequence of its own with nothing to look back to. head: by `rows`, of the head and the
    choice of tokens; batch: by `rows`, of making ready a step. beside_reads: how many times longer a layer takes while
    the disk is read at full rate; reads_beside: what is left of that rate meanwhile. attention: by kind of cache.
    """

    rows: tuple[int, ...]
    layer: tuple[float, ...]
    head: tuple[float, ...]
    batch: tuple[float, ...]
    beside_reads: float
    reads_beside: float
    attention: dict[CacheKind, AttentionSeconds]

    def layer_seconds(self, kind: CacheKind, rows: float, decode_tokens: float, prompt_pairs: float) -> float:
        """decode_tokens: context of all decoding rows; prompt_pairs: of all prompts' rows."""
        attention = self.attention[kind]
        looking_back = decode_tokens * attention.decode_token + prompt_pairs * attention.prompt_pair
        return _between(self.rows, self.layer, rows) + looking_back

    def head_seconds(self, rows: float) -> float:
        return _between(self.rows, self.head, rows) if rows else 0.0

    def batch_seconds(self, rows: float) -> float:
        return _between(self.rows, self.batch, rows)


def layer_rates(
    parts: LayerReader, kinds: Sequence[CacheKind], *, compute: str, threads: int, folder: Path, again: bool = False
) -> LayerRates:
    """The rates of a store's layers, from the cache, else measured now (some seconds, a few hundred MB of memory).

    folder: on the disk that would be read from. Kept by host, kernels' sources, threads, shapes and encodings.
    Raises StoreError, QuantizationError.
    """
    index = parts.config.layers // 2
    prefix = f"layers.{index}."
    tensors = [t for t in parts.reader.manifest.tensors if t.name.startswith(prefix)]
    marks: list[object] = [FORMAT, processor_marks(), threads, compute, parts.kernels.name, torch.__version__]
    marks += [(t.name.removeprefix(prefix), t.shape, t.encoding, t.group_size) for t in tensors]
    marks += [parts.config.head_dim, parts.config.heads, parts.config.vocab_size]
    marks += [file.read_bytes() for file in (*SOURCES, *HEADERS)]
    trial: list[_Trial] = []  # made once, where it is needed

    def measured(kind: str, further: list[object], measure: Callable[[_Trial], dict[str, Any]]) -> dict[str, Any]:
        place = measured_place(kind, [*marks, *further])
        found = None if again else kept(place)
        if found is None:
            if not trial:
                trial.append(_Trial(parts, index))
            found = measure(trial[0])
            keep(place, found)
        return found

    keep_freed_memory()  # as the engine does
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            of_layer = measured("layers", [os.stat(folder).st_dev], lambda one: one.layer(folder))
            attention = {
                kind: AttentionSeconds(**measured("attention", [kind], partial(_Trial.attention, kind=kind)))
                for kind in kinds
            }
    finally:
        torch.set_num_threads(before)
        if trial:
            trial.clear()
            give_back_freed_memory()  # the model is still to be loaded, within the memory allowed
    numbers: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in of_layer.items()}
    return LayerRates(**numbers, attention=attention)


class _Noise:
    """Stands for the embedding: rows of the right size."""

    nbytes = 0

    def __init__(self, hidden_size: int) -> None:
        self._rows = torch.randn((max(*ROWS, PROMPT), hidden_size), generator=torch.Generator().manual_seed(0))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows[: len(token_ids)].clone()


class _Trial:
    """Some copies of one layer as a decoder of its own."""

    def __init__(self, parts: LayerReader, index: int) -> None:
        self._parts = parts
        layer = parts.layer(index)
        self._copies = max(1, min(MOST_COPIES, -(-WORKING_BYTES // max(1, layer.nbytes))))
        layers = [layer, *(_copied(layer) for _ in range(self._copies - 1))]
        self._config = replace(
            parts.config,
            layers=self._copies,
            windows=parts.config.windows[index : index + 1] * self._copies,
            ropes=parts.config.ropes[index : index + 1] * self._copies,
            expert_layers=parts.config.expert_layers[index : index + 1] * self._copies,
        )
        self._norm = torch.ones(self._config.hidden_size)
        noise = _Noise(self._config.hidden_size)
        self._decoder = Decoder(self._config, noise, WeightsInMemory(layers, None), self._norm, parts.kernels)

    def _seconds(self, batch: StepBatch, kind: CacheKind) -> float:
        """Of one layer."""
        cache = KeyValueCache(self._config, max(max(ROWS), CONTEXT_ROWS * pages_for(CONTEXT)), kind)
        for layer in cache.layers:
            layer.pages.zero_()  # written, and so really there, each page elsewhere
        return best_of(lambda: self._decoder.states(batch, cache)) / self._copies

    def layer(self, folder: Path) -> dict[str, Any]:
        parts, kind = self._parts, self._parts.kernels.cache_kinds[0]
        alone = _rising(self._seconds(_decoding(rows, 1), kind) for rows in ROWS)
        head = [0.0] * len(ROWS)
        if parts.config.has_head:
            head = _head_seconds(parts, parts.kernels, self._norm)
        beside, left = self._beside_reads(kind, folder)
        return {
            "rows": list(ROWS),
            "layer": alone,
            "head": head,
            "batch": _rising(best_of(partial(_decoding, rows, 1)) for rows in ROWS),
            "beside_reads": beside,
            "reads_beside": left,
        }

    def _beside_reads(self, kind: CacheKind, folder: Path) -> tuple[float, float]:
        """How many times longer a layer takes while the disk is read, and the share of the rate that reads then keep.

        Both over the same second or so, for each slows the other down.
        """
        batch = _decoding(BESIDE_ROWS, 1)
        cache = KeyValueCache(self._config, BESIDE_ROWS, kind)

        def steps() -> float:
            """Seconds of a step, one after the other for a while."""
            self._decoder.states(batch, cache)
            started, count = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - started) < BESIDE_SECONDS or not count:
                self._decoder.states(batch, cache)
                count += 1
            return elapsed / count

        alone, beside = steps(), []
        with TrialFile(folder) as trial:
            full = trial.read_for(BESIDE_SECONDS, READERS)
            rate = trial.read_for(0.0, READERS, meanwhile=lambda: beside.append(steps()))
        return max(1.0, beside[0] / alone), min(1.0, rate / full)

    def attention(self, kind: CacheKind) -> dict[str, Any]:
        def more(batch: StepBatch) -> float:
            rows = len(batch.token_ids)
            return max(0.0, self._seconds(batch, kind) - self._seconds(_decoding(rows, 1), kind))

        return {
            "decode_token": more(_decoding(CONTEXT_ROWS, CONTEXT)) / (CONTEXT_ROWS * CONTEXT),
            "prompt_pair": more(_prompt(PROMPT)) / (PROMPT * (PROMPT + 1) // 2),
        }


def _copied(layer: DecoderLayer) -> DecoderLayer:
    """The same layer elsewhere in memory."""
    return layer.with_linears(
        {
            name: linear.over({part: array.clone() for part, array in linear.arrays().items()})
            for name, linear in layer.linears().items()
        }
    )


def _head_seconds(parts: LayerReader, kernels: Kernels, norm: torch.Tensor) -> list[float]:
    names, factor = parts.head_product()
    head = parts.linear(*names, factor=factor)
    highest: Callable[..., object] = getattr(head, "highest", head)
    noise = _Noise(parts.config.hidden_size)

    def pick(rows: int) -> object:
        return highest(kernels.norm(noise(torch.zeros(rows, dtype=torch.int64)), norm))

    return _rising(best_of(partial(pick, rows)) for rows in ROWS)


def _decoding(rows: int, context: int) -> StepBatch:
    pages = pages_for(context)
    slices = []
    for number in range(rows):
        sequence = lone_sequence([0] * context)
        sequence.pages = list(range(number * pages, (number + 1) * pages))
        slices.append(Slice(sequence, context - 1, 1))
    return build_batch(slices)


def _prompt(tokens: int) -> StepBatch:
    sequence = lone_sequence([0] * tokens)
    sequence.pages = list(range(pages_for(tokens)))
    return build_batch([Slice(sequence, 0, tokens)])


def best_of(act: Callable[[], object]) -> float:
    """The least seconds of some tries: whatever else runs can only make one slower."""
    act()
    times: list[float] = []
    while len(times) < TRIES or (len(times) < MORE_TRIES and sum(times) < SECONDS_A_RATE):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return min(times)


def _rising(seconds: Iterable[float]) -> list[float]:
    """By rising rows: fewer rows never take longer than more, so a longer time was someone else's doing."""
    return list(itertools.accumulate(reversed(list(seconds)), min))[::-1]


def _between(at: Sequence[int], values: Sequence[float], wanted: float) -> float:
    """On the lines through the measured points; beyond the last, where arithmetic is all, in proportion to it."""
    if wanted <= at[0]:
        return values[0]
    if wanted >= at[-1]:
        return values[-1] * wanted / at[-1]
    upper = next(i for i, x in enumerate(at) if x >= wanted)
    x0, x1, y0, y1 = at[upper - 1], at[upper], values[upper - 1], values[upper]
    return y0 + (y1 - y0) * (wanted - x0) / (x1 - x0)

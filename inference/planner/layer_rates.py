"""How long a layer takes, measured on one of the model's own: by rows, by what they attend to, and while it streams.

Everything is measured in rounds, one try of each a round, and the medians are taken: what a run will meet is the host
as it mostly is, neither its best moment nor its worst.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference.cache.pages import pages_for
from inference.group import lone_sequence
from inference.kernels.base import CacheKind, KeyValueCache, Linear
from inference.kernels.native.build import HEADERS, SOURCES, processor_marks
from inference.memory.allocation import give_back_freed_memory, keep_freed_memory
from inference.memory.image import ImageKey, LayerImage, UnitPlace
from inference.memory.image_making import Matrix, Unit, image_for
from inference.memory.ring import LayerRing, StreamStats
from inference.model.batch import StepBatch, build_batch
from inference.model.decoder import Decoder
from inference.model.layers import HEAD, DecoderLayer, LayerReader, unit_name
from inference.model.residency import WeightsInMemory, made_image
from inference.parallelism import CONTENDED_SHARE
from inference.planner.disk import READERS, RING
from inference.planner.measured import measured_place, sampled
from inference.scheduler import Slice

logger = logging.getLogger(__name__)

FORMAT = 10
ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
# Some that wait for the disk on most hosts, and some that do not.
STREAMED_ROWS = (8, 64, 128, 512)
# Weights come from memory in a step, not from a cache that the layer before has filled.
WORKING_BYTES = 128 * 2**20
MOST_COPIES = 16
# Streamed from as much of a disk, so that no cache below this host's own holds it; at most so many times the copies.
STREAMED_BYTES = 384 * 2**20
MOST_TIMES = 8
CONTEXT = 256
CONTEXT_ROWS = 64
PROMPT = 256
PIECE = 64
LEAST_ROUNDS = 3
MOST_ROUNDS = 9
SECONDS = 5.0
# Of a step, from which on it is the disk that it waits for.
WAITING_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class AttentionSeconds:
    """What looking back adds to a layer, with one kind of cache.

    decode_row: for each decoding row, which has a page to itself. decode_token: for each row and token of context that
    a decoding row looks back to. prompt_pair: for each pair of a prompt's row and a token before it.
    """

    decode_row: float
    decode_token: float
    prompt_pair: float


@dataclass(frozen=True, slots=True)
class LayerRates:
    """Seconds of one layer on this host, all its matrices in memory.

    layer: by `rows`, of short prompts; apart: how many times longer where layers are computed by calls of their own, as
    they are where anything is streamed or spilled. head: by `rows`, of the head and the
    choice of tokens; batch: of making ready a step, by its pieces of sequences. stream_bytes_per_s: at which layers
    stream where steps wait for them, None where none did; read_cost: seconds by which reading a byte lengthens the
    arithmetic beside it. attention: by kind of cache.
    """

    rows: tuple[int, ...]
    layer: tuple[float, ...]
    apart: float
    head: tuple[float, ...]
    batch: tuple[float, ...]
    stream_bytes_per_s: float | None
    read_cost: float
    attention: dict[CacheKind, AttentionSeconds]

    def layer_seconds(
        self, kind: CacheKind, rows: float, decode_rows: float, decode_tokens: float, prompt_pairs: float
    ) -> float:
        """decode_rows: of the rows; decode_tokens: context of all of these; prompt_pairs: of all prompts' rows."""
        attention = self.attention[kind]
        looking_back = decode_rows * attention.decode_row + decode_tokens * attention.decode_token
        return _between(self.rows, self.layer, rows) + looking_back + prompt_pairs * attention.prompt_pair

    def head_seconds(self, rows: float) -> float:
        return _between(self.rows, self.head, rows) if rows else 0.0

    def batch_seconds(self, pieces: float) -> float:
        return _between(self.rows, self.batch, pieces)


def layer_rates(
    parts: LayerReader, kinds: Sequence[CacheKind], *, compute: str, threads: int, folder: Path, again: bool = False
) -> LayerRates:
    """The rates of a store's layers, from the cache, else measured now (some seconds, a few hundred MB of memory).

    folder: on the disk that would be read from. Kept by host, kernels' sources, threads, shapes and encodings, as
    `measured.sampled` does.
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

        def now() -> tuple[dict[str, Any], bool]:
            if not trial:
                trial.append(_Trial(parts, index))
            found = measure(trial[0])
            if not (sound := trial[0].share_of_processor() >= CONTENDED_SHARE):
                logger.warning("others take the processor: a plan made now promises too little")
            return found, sound

        return sampled(place, now, again=again)

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
        self._rows = torch.randn(
            (max(*ROWS, *STREAMED_ROWS, PROMPT), hidden_size), generator=torch.Generator().manual_seed(0)
        )

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows[: len(token_ids)].clone()


class _HeldCopies(WeightsInMemory):
    """Copies of a layer in memory, computed one by one, as where others of them are streamed."""

    streams = True


class _StreamedCopies:
    """Copies of a layer in a trial image, streamed as a model's layers are, some in each step."""

    head: Linear | None = None
    nbytes = 0
    streams = True

    def __init__(self, layer: DecoderLayer, image: LayerImage, copies: int) -> None:
        """copies: in each step; the image has them some times over."""
        self._names = [unit.name for unit in image.units]
        self._at = 0
        self._layer, self._linears = layer, layer.linears()
        self.layers = [layer] * copies
        self._ring = LayerRing(image, self._names, ring=RING, readers=READERS)
        self.unit_bytes = image.units[0].bytes

    @contextmanager
    def step(self, *, head: bool) -> Iterator[None]:
        yield

    def in_order(self) -> Iterator[DecoderLayer]:
        for _ in self.layers:
            name = self._names[self._at]
            if not self._at:
                with self._ring.step(optional=False):
                    pass  # for the ring, a step is all that the image has
            self._at = (self._at + 1) % len(self._names)
            with self._ring.unit(name) as views:
                yield self._layer.with_linears({key: one.over(views[key]) for key, one in self._linears.items()})

    @contextmanager
    def for_head(self) -> Iterator[Linear]:
        assert self.head is not None
        yield self.head

    def stream_stats(self) -> StreamStats:
        return self._ring.stats()

    def settle(self) -> None:
        """Return when nothing is read any more, the ring being full."""
        before = -1
        while before != (before := self._ring.stats().bytes):
            time.sleep(0.02)

    def close(self) -> None:
        self._ring.close()


class _Trial:
    """Some copies of one layer as a decoder of its own."""

    def __init__(self, parts: LayerReader, index: int) -> None:
        self._parts, self._index = parts, index
        layer = parts.layer(index)
        copies = max(1, min(MOST_COPIES, -(-WORKING_BYTES // max(1, layer.nbytes))))
        self._layers = [layer, *(_copied(layer) for _ in range(copies - 1))]
        self._config = replace(
            parts.config,
            layers=copies,
            windows=parts.config.windows[index : index + 1] * copies,
            ropes=parts.config.ropes[index : index + 1] * copies,
            expert_layers=parts.config.expert_layers[index : index + 1] * copies,
        )
        self._norm = torch.ones(self._config.hidden_size)
        self._noise = _Noise(self._config.hidden_size)
        self._wall = self._processor = 0.0
        weights = WeightsInMemory(self._layers, None)
        self._decoder = Decoder(self._config, self._noise, weights, self._norm, parts.kernels)

    def _seconds(self, batch: StepBatch, cache: KeyValueCache) -> float:
        """Of a layer, in memory."""
        started, processor_started = time.perf_counter(), time.thread_time()
        self._decoder.states(batch, cache)
        seconds = time.perf_counter() - started
        self._wall += seconds
        self._processor += time.thread_time() - processor_started
        return seconds / len(self._layers)

    def share_of_processor(self) -> float:
        """Of the time of steps in memory so far, that which this thread was given."""
        return self._processor / self._wall

    def _cache(self, pages: int, kind: CacheKind) -> KeyValueCache:
        cache = KeyValueCache(self._config, pages, kind)
        for layer in cache.layers:
            layer.pages.zero_()  # written, and so really there, each page elsewhere
        return cache

    def layer(self, folder: Path) -> dict[str, Any]:
        parts, copies = self._parts, len(self._layers)
        cache = self._cache(max(*ROWS, *STREAMED_ROWS), parts.kernels.cache_kinds[0])
        batches = {rows: _prompts(rows, PIECE) for rows in {*ROWS, *STREAMED_ROWS}}
        head = _head(parts, self._norm)
        alone: dict[int, list[float]] = {rows: [] for rows in batches}
        picking: dict[int, list[float]] = {rows: [] for rows in ROWS}
        making: dict[int, list[float]] = {rows: [] for rows in ROWS}
        apart: dict[int, list[float]] = {rows: [] for rows in STREAMED_ROWS}
        streamed: dict[int, list[float]] = {rows: [] for rows in STREAMED_ROWS}
        waited: dict[int, list[float]] = {rows: [] for rows in STREAMED_ROWS}
        with self._streamed(folder) as weights:
            decoder = Decoder(self._config, self._noise, weights, self._norm, parts.kernels)
            held = _HeldCopies(self._layers, None)
            one_by_one = Decoder(self._config, self._noise, held, self._norm, parts.kernels)
            for _ in _rounds(SECONDS):
                weights.settle()
                for rows in ROWS:
                    making[rows].append(_seconds(partial(_decoding, rows, 1)))
                    picking[rows].append(_seconds(partial(head, rows)))
                for rows, batch in batches.items():
                    alone[rows].append(self._seconds(batch, cache))
                    if rows in apart:
                        apart[rows].append(_seconds(partial(one_by_one.states, batch, cache)) / copies)
                for rows in STREAMED_ROWS:
                    decoder.states(batches[rows], cache)  # the ring is as full after as before a step like it
                    before = weights.stream_stats()
                    seconds = _seconds(partial(decoder.states, batches[rows], cache))
                    streamed[rows].append(seconds / copies)
                    waited[rows].append(weights.stream_stats().since(before).waited_seconds / seconds)
            unit_bytes = weights.unit_bytes
        rate, cost = stream_rates(unit_bytes, apart, streamed, waited)
        return {
            "rows": list(ROWS),
            "layer": _rising(_median(alone[rows]) for rows in ROWS),
            "apart": max(1.0, _median([_median(apart[rows]) / _median(alone[rows]) for rows in apart])),
            "head": _rising(_median(picking[rows]) for rows in ROWS),
            "batch": _rising(_median(making[rows]) for rows in ROWS),
            "stream_bytes_per_s": rate,
            "read_cost": cost,
        }

    @contextmanager
    def _streamed(self, folder: Path) -> Iterator[_StreamedCopies]:
        """Layers of the model's own image, where it has been made and they are alike; else the copies in an image of
        their own, which is removed at the end. What has just been written is read more slowly for a while.
        """
        place = folder / f".trial-{uuid.uuid4().hex[:8]}"
        layer, copies = self._layers[0], len(self._layers)
        linears = layer.linears()
        count = copies * max(1, min(MOST_TIMES, STREAMED_BYTES // max(1, copies * layer.nbytes)))

        def units() -> Iterator[Unit]:
            for copy in range(count):
                matrices = [Matrix(name, one.form, [one.arrays()]) for name, one in linears.items()]
                yield Unit(unit_name(copy), matrices)

        key = ImageKey("trial", self._parts.kernels.compute, "trial")
        made = made_image(self._parts, folder)
        try:
            if made is not None and (alike := _alike(made, self._index)):
                image = replace(made, units=alike)
            else:
                image = image_for(key, units, total=count, expected_bytes=count * layer.nbytes, folder=place)
            weights = _StreamedCopies(layer, image, copies)
            try:
                yield weights
            finally:
                weights.close()
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def attention(self, kind: CacheKind) -> dict[str, Any]:
        cache = self._cache(CONTEXT_ROWS * pages_for(CONTEXT) + PROMPT, kind)
        short = _prompts(PROMPT, PIECE)
        pairs = [
            (_decoding(PROMPT, 1), short),
            (_decoding(CONTEXT_ROWS, CONTEXT), _decoding(CONTEXT_ROWS, 1)),
            (_prompts(PROMPT, PROMPT), short),
        ]
        more: list[list[float]] = [[], [], []]
        for _ in _rounds(SECONDS / 3):
            for found, (dear, cheap) in zip(more, pairs, strict=True):
                found.append(self._seconds(dear, cache) - self._seconds(cheap, cache))
        row, token, pair = (max(0.0, _median(found)) for found in more)
        return {
            "decode_row": row / PROMPT,
            "decode_token": token / (CONTEXT_ROWS * (CONTEXT - 1)),
            "prompt_pair": pair / (PROMPT * (PROMPT - PIECE) / 2),
        }


def _alike(image: LayerImage, index: int) -> tuple[UnitPlace, ...]:
    """Those of an image's layers that are laid out as that one."""
    layer = image.unit(unit_name(index))
    return tuple(
        unit
        for unit in image.units
        if unit.name != HEAD and (unit.bytes, unit.matrices) == (layer.bytes, layer.matrices)
    )


def stream_rates(
    unit_bytes: int,
    alone: Mapping[int, Sequence[float]],
    streamed: Mapping[int, Sequence[float]],
    waited: Mapping[int, Sequence[float]],
) -> tuple[float | None, float]:
    """(stream_bytes_per_s, read_cost) of `LayerRates`, from the seconds of a layer by rows, in memory and streamed.

    waited: shares of the streamed seconds. Where a step waits, bytes over seconds is what the disk gave beside it;
    where it does not, what it takes longer is what reading cost it.
    """
    waits = [rows for rows in streamed if _median(waited[rows]) >= WAITING_SHARE]
    rate = _median([unit_bytes / _median(streamed[rows]) for rows in waits]) if waits else None
    busiest = max((rows for rows in streamed if rows not in waits), default=None)
    if busiest is None:
        return rate, 0.0
    longer = [beside - by_itself for beside, by_itself in zip(streamed[busiest], alone[busiest], strict=True)]
    return rate, max(0.0, _median(longer)) / unit_bytes


def _copied(layer: DecoderLayer) -> DecoderLayer:
    """The same layer elsewhere in memory."""
    return layer.with_linears(
        {
            name: linear.over({part: array.clone() for part, array in linear.arrays().items()})
            for name, linear in layer.linears().items()
        }
    )


def _head(parts: LayerReader, norm: torch.Tensor) -> Callable[[int], object]:
    """What the head does with so many rows, and the choice of tokens."""
    if not parts.config.has_head:
        return lambda rows: None
    names, factor = parts.head_product()
    head, kernels = parts.linear(*names, factor=factor), parts.kernels
    highest: Callable[..., object] = getattr(head, "highest", head)
    noise = _Noise(parts.config.hidden_size)
    return lambda rows: highest(kernels.norm(noise(torch.zeros(rows, dtype=torch.int64)), norm))


def _decoding(rows: int, context: int) -> StepBatch:
    pages = pages_for(context)
    slices = []
    for number in range(rows):
        sequence = lone_sequence([0] * context)
        sequence.pages = list(range(number * pages, (number + 1) * pages))
        slices.append(Slice(sequence, context - 1, 1))
    return build_batch(slices)


def _prompts(rows: int, tokens: int) -> StepBatch:
    """Prompts of so many tokens, the last one of what is left of the rows."""
    slices: list[Slice] = []
    for start in range(0, rows, tokens):
        count = min(tokens, rows - start)
        sequence, pages = lone_sequence([0] * count), pages_for(tokens)
        sequence.pages = list(range(len(slices) * pages, len(slices) * pages + pages_for(count)))
        slices.append(Slice(sequence, 0, count))
    return build_batch(slices)


def _rounds(seconds: float) -> Iterator[int]:
    """Tries of everything: at least LEAST_ROUNDS, for so long."""
    started = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - started > seconds:
            return
        yield number


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


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

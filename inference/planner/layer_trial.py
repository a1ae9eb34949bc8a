"""A few copies of one of a model's layers as a decoder of their own, timed in memory and streamed.

Everything is measured in rounds, one try of each a round, and the medians are taken: what a run will meet is the host
as it mostly is, neither its best moment nor its worst.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference.cache.pages import pages_for
from inference.group import lone_sequence
from inference.kernels.base import CacheKind, KeyValueCache, Linear
from inference.memory.image import ImageKey, LayerImage, UnitPlace
from inference.memory.image_making import Matrix, Unit, image_for
from inference.memory.ring import LayerRing, StreamStats
from inference.model.batch import StepBatch, build_batch
from inference.model.decoder import Decoder
from inference.model.layers import HEAD, DecoderLayer, LayerReader, unit_name
from inference.model.residency import Weights, WeightsInMemory, made_image
from inference.planner.disk import READERS, RING
from inference.planner.sizes import ModelSizes
from inference.scheduler import Slice

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
# Of a trial's cache, about: for attention more than for anything else.
MOST_PAGES = CONTEXT_ROWS * pages_for(CONTEXT) + PROMPT
# What the largest steps of a trial take besides, about.
ACTIVATION_BYTES = 48 * 2**20
LEAST_ROUNDS = 3
MOST_ROUNDS = 9
SECONDS = 5.0
# Of a step, from which on it is the disk that it waits for.
WAITING_SHARE = 0.1
# Of a trial without a disk.
NOTHING_READ: dict[str, Any] = {"apart": 1.0, "stream_bytes_per_s": None, "read_cost": 0.0}


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


def copies_within(room_bytes: int | None, layer_bytes: int, cache_bytes: int, head_bytes: int) -> int:
    """Copies of a layer that a trial takes: what makes WORKING_BYTES, or what fits, at least 1.

    cache_bytes: of the trial's cache, of one layer.
    """
    most = max(1, min(MOST_COPIES, -(-WORKING_BYTES // max(1, layer_bytes))))
    if room_bytes is None:
        return most
    left = room_bytes - RING * layer_bytes - head_bytes - ACTIVATION_BYTES
    return max(1, min(most, left // (layer_bytes + cache_bytes)))


class LayerTrial:
    """Some copies of one layer as a decoder of its own."""

    def __init__(self, parts: LayerReader, index: int, room_bytes: int | None = None) -> None:
        """room_bytes: of memory for the trial; None: no limit."""
        self._parts, self._index = parts, index
        layer = parts.layer(index)
        sizes = ModelSizes.of(parts)
        cache_bytes = sizes.page_of_layer(parts.kernels.cache_kinds[0]) * MOST_PAGES
        copies = copies_within(room_bytes, layer.nbytes, cache_bytes, sizes.head)
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
        self._decoder = self.decoder(WeightsInMemory(self._layers, None))

    def decoder(self, weights: Weights) -> Decoder:
        """Of so many layers as the trial has copies."""
        return Decoder(self._config, self._noise, weights, self._norm, self._parts.kernels)

    def held_apart(self) -> Decoder:
        """The copies in memory, computed one by one."""
        return self.decoder(_HeldCopies(self._layers, None))

    @property
    def copies(self) -> int:
        return len(self._layers)

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

    def layer(self, folder: Path | None) -> dict[str, Any]:
        """`LayerRates`, all but attention. folder: to stream from; None: in memory alone."""
        cache = self._cache(max(*ROWS, *STREAMED_ROWS), self._parts.kernels.cache_kinds[0])
        batches = {rows: _prompts(rows, PIECE) for rows in {*ROWS, *STREAMED_ROWS}}
        head = _head(self._parts, self._norm)
        alone: dict[int, list[float]] = {rows: [] for rows in batches}
        picking: dict[int, list[float]] = {rows: [] for rows in ROWS}
        making: dict[int, list[float]] = {rows: [] for rows in ROWS}
        with ExitStack() as stack:
            beside = None
            if folder is not None:
                beside = _BesideReads(self, stack.enter_context(self._streamed(folder)))
            for _ in _rounds(SECONDS):
                if beside is not None:
                    beside.weights.settle()
                for rows in ROWS:
                    making[rows].append(_seconds(partial(_decoding, rows, 1)))
                    picking[rows].append(_seconds(partial(head, rows)))
                for rows, batch in batches.items():
                    alone[rows].append(self._seconds(batch, cache))
                    if beside is not None and rows in STREAMED_ROWS:
                        beside.apart(rows, batch, cache)
                if beside is not None:
                    for rows in STREAMED_ROWS:
                        beside.streamed(rows, batches[rows], cache)
        return {
            "rows": list(ROWS),
            "layer": _rising(_median(alone[rows]) for rows in ROWS),
            "head": _rising(_median(picking[rows]) for rows in ROWS),
            "batch": _rising(_median(making[rows]) for rows in ROWS),
            **(NOTHING_READ if beside is None else beside.rates(alone)),
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


class _BesideReads:
    """A trial's layer computed by calls of its own, by rows: in memory, and while its copies stream."""

    def __init__(self, trial: LayerTrial, weights: _StreamedCopies) -> None:
        self.weights = weights
        self._copies = trial.copies
        self._held, self._streaming = trial.held_apart(), trial.decoder(weights)
        self._apart: dict[int, list[float]] = {rows: [] for rows in STREAMED_ROWS}
        self._streamed: dict[int, list[float]] = {rows: [] for rows in STREAMED_ROWS}
        self._waited: dict[int, list[float]] = {rows: [] for rows in STREAMED_ROWS}

    def apart(self, rows: int, batch: StepBatch, cache: KeyValueCache) -> None:
        self._apart[rows].append(_seconds(partial(self._held.states, batch, cache)) / self._copies)

    def streamed(self, rows: int, batch: StepBatch, cache: KeyValueCache) -> None:
        self._streaming.states(batch, cache)  # the ring is as full after as before a step like it
        before = self.weights.stream_stats()
        seconds = _seconds(partial(self._streaming.states, batch, cache))
        self._streamed[rows].append(seconds / self._copies)
        self._waited[rows].append(self.weights.stream_stats().since(before).waited_seconds / seconds)

    def rates(self, alone: Mapping[int, Sequence[float]]) -> dict[str, Any]:
        """alone: seconds of a layer by rows, all layers in one call."""
        rate, cost = stream_rates(self.weights.unit_bytes, self._apart, self._streamed, self._waited)
        apart = _median([_median(self._apart[rows]) / _median(alone[rows]) for rows in STREAMED_ROWS])
        return {"apart": max(1.0, apart), "stream_bytes_per_s": rate, "read_cost": cost}


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

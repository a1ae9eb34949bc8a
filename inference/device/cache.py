"""The key-value cache of which some layers lie in the host's memory, and are copied to the device as they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from inference.cache.spilled.page_file import Place
from inference.cache.spilled.partition import PartPlan, partition
from inference.cache.spilled.sizes import buffer_pages, layer_page_bytes
from inference.device.streams import CopyStream, lock_pages
from inference.kernels.base import CacheKind, KeyValueCache, LayerCache, Part, StepPages, lazy_pages
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig

BUFFERS = 3
"""One is computed with while the next is filled and the last one written back."""


class _Unit(NamedTuple):
    """A part of a step in one layer, and its batch on the device."""

    layer: int
    plan: PartPlan
    batch: StepBatch


class _Filled(NamedTuple):
    unit: _Unit
    buffer: torch.Tensor
    arrived: torch.Event | None


class HostedCache(KeyValueCache):
    """Of the hosted layers, only the pages that a part of a step uses are on the device, in one of a few buffers.

    `layers` holds hosted layers' pages in host memory. Copies both ways go one after the other on one stream: what was
    written back is what is read next, and a buffer is filled again only after it has been written back.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: int,
        kind: CacheKind,
        device: torch.device,
        hosted: frozenset[int],
        *,
        capacity: int | None = None,
    ) -> None:
        """hosted: at least one layer. capacity: pages of a buffer, of one layer. ValueError for unknown layers."""
        strange = sorted(hosted.difference(range(config.layers)))
        if strange or not hosted:
            raise ValueError(f"hosted_cache: of {config.layers} layers at least one, and not {strange}")
        self.kind = kind
        self.page_bytes = config.layers * layer_page_bytes(config, kind)
        self.layers = [
            LayerCache(lazy_pages(config, pages, kind, None if index in hosted else device), kind)
            for index in range(config.layers)
        ]
        self._config = config
        self._device = device
        self._hosted = hosted
        self._capacity = capacity or buffer_pages(config, kind, pages)
        self._stream = CopyStream(device)
        self._buffers = [lazy_pages(config, self._capacity, kind, device) for _ in range(BUFFERS)]
        self._free: deque[torch.Tensor] = deque()
        self._coming: deque[_Unit] = deque()
        self._filled: deque[_Filled] = deque()
        for index in hosted:
            lock_pages(self.layers[index].pages, device, self)

    @property
    def nbytes(self) -> int:
        """Of host and device together."""
        return super().nbytes + sum(buffer.nbytes for buffer in self._buffers)

    @property
    def sequence_pages(self) -> int:
        return self._capacity

    @property
    def nests(self) -> bool:
        return False

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepPages]:
        host = batch.host or batch
        cut: dict[int, list[tuple[PartPlan, StepBatch]]] = {}
        units: list[_Unit] = []
        for index in sorted(self._hosted):
            window = self._config.layer(index).window
            if window not in cut:
                plans = partition(host, self._capacity, window)
                cut[window] = [(plan, plan.batch.on(self._device)) for plan in plans]
            units += [_Unit(index, *planned) for planned in cut[window]]
        # Whatever a step that failed has left under way comes first.
        with self._stream.copying(after=self._stream.computed()):
            pass
        self._coming, self._filled, self._free = deque(units), deque(), deque(self._buffers)
        self._fill()
        try:
            yield _HostedStep(self, batch)
        finally:
            self._coming.clear()

    def parts(self, index: int, batch: StepBatch) -> Iterator[Part]:
        """A layer's parts within `step`."""
        if index not in self._hosted:
            yield Part(slice(None), batch, self.layers[index])
            return
        while self._filled and self._filled[0].unit.layer == index:
            unit, buffer, arrived = self._filled.popleft()
            self._stream.compute_after(arrived)
            yield Part(unit.plan.rows, unit.batch, LayerCache(buffer, self.kind))
            with self._stream.copying(after=self._stream.computed()):
                for there, here in _runs(unit.plan.changed):
                    self.layers[index].pages[there].copy_(buffer[here], non_blocking=True)
            self._free.append(buffer)
            self._fill()

    def clear(self, pages: list[int]) -> None:
        self._stream.settle()
        super().clear(pages)

    def copy(self, source: int, target: int) -> None:
        self._stream.settle()
        super().copy(source, target)

    def _fill(self) -> None:
        """Begin to copy what comes next into free buffers."""
        while self._coming and self._free:
            unit, buffer = self._coming.popleft(), self._free.popleft()
            with self._stream.copying():
                for local in unit.plan.fresh:
                    buffer[local].zero_()
                for there, here in _runs(unit.plan.kept):
                    buffer[here].copy_(self.layers[unit.layer].pages[there], non_blocking=True)
            self._filled.append(_Filled(unit, buffer, self._stream.copied()))


class _HostedStep:
    def __init__(self, cache: HostedCache, batch: StepBatch) -> None:
        self._cache = cache
        self._batch = batch

    def parts(self, index: int) -> Iterator[Part]:
        return self._cache.parts(index, self._batch)


def _runs(places: list[Place]) -> Iterator[tuple[slice, slice]]:
    """Pages that follow one another here and there, as (pages there, places here): each run is one copy."""
    start = 0
    for end in range(1, len(places) + 1):
        first, before = places[start], places[end - 1]
        if end < len(places) and places[end] == Place(before.page + 1, before.local + 1):
            continue
        yield slice(first.page, before.page + 1), slice(first.local, before.local + 1)
        start = end

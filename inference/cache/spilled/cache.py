"""The key-value cache of which some layers lie on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference.cache.spilled.page_file import LostPage, PageFile
from inference.cache.spilled.partition import PartPlan, holders, partition
from inference.cache.spilled.ring import PageRing, Unit
from inference.cache.spilled.sizes import BUFFERS, READERS, buffer_pages, layer_page_bytes, spilled_memory_bytes
from inference.errors import CacheLost
from inference.kernels.base import (
    CacheKind,
    CacheTraffic,
    KeyValueCache,
    LayerCache,
    Part,
    StepPages,
    lazy_pages,
    pages_over,
)
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig


class SpilledCache(KeyValueCache):
    """Of the spilled layers, only the pages that a part of a step uses are in memory, in one of a few buffers.

    `layers` holds no pages of spilled layers. A page that the disk lost, or gives back otherwise than it was written,
    ends the sequences that hold it (CacheLost); a page that could not be written does so when it is needed.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: int,
        kind: CacheKind,
        spilled: frozenset[int],
        folder: Path,
        *,
        readers: int = READERS,
        capacity: int | None = None,
    ) -> None:
        """spilled: at least one layer. folder: on the disk to use. capacity: pages of a buffer, of one layer.

        Raises StoreError where the disk has no room for all of it; ValueError for layers that the model has not got.
        """
        strange = sorted(spilled.difference(range(config.layers)))
        if strange or not spilled:
            raise ValueError(f"spilled: of {config.layers} layers at least one, and not {strange}")
        self.kind = kind
        self.page_bytes = config.layers * layer_page_bytes(config, kind)
        self.layers = [
            LayerCache(lazy_pages(config, 0 if index in spilled else pages, kind), kind)
            for index in range(config.layers)
        ]
        self._config = config
        self._slot = {index: slot for slot, index in enumerate(sorted(spilled))}
        self._file = PageFile(folder, sorted(spilled), pages, layer_page_bytes(config, kind))
        self._ring = PageRing(
            self._file,
            buffers=BUFFERS,
            capacity=capacity or buffer_pages(config, kind, pages),
            readers=readers,
        )
        self._beside = spilled_memory_bytes(config, kind, len(spilled), pages)

    @property
    def path(self) -> Path:
        """Where the file was made; it has no name any more."""
        return self._file.path

    @property
    def traffic(self) -> CacheTraffic:
        return CacheTraffic(self._file.bytes_read, self._file.bytes_written, self._ring.waited_seconds)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._beside

    @property
    def sequence_pages(self) -> int:
        return self._ring.capacity

    @property
    def nests(self) -> bool:
        return False

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepPages]:
        windows = {index: self._config.layer(index).window for index in self._slot}
        cut = {window: partition(batch, self._ring.capacity, window) for window in set(windows.values())}
        plans = {index: cut[window] for index, window in windows.items()}
        self._ring.begin([Unit(slot, plan) for index, slot in self._slot.items() for plan in plans[index]])
        try:
            yield _SpilledStep(self, batch, plans)
        finally:
            self._ring.end()

    def clear(self, pages: list[int]) -> None:
        for layer in self._in_memory():
            layer.pages[pages] = 0
        self._ring.settle()
        self._file.forget(pages)

    def copy(self, source: int, target: int) -> None:
        for layer in self._in_memory():
            layer.pages[target] = layer.pages[source]
        self._ring.copy(len(self._slot), source, target)

    def parts(self, index: int, batch: StepBatch, plans: dict[int, list[PartPlan]]) -> Iterator[Part]:
        """A layer's parts within `step`."""
        if index not in self._slot:
            yield Part(slice(None), batch, self.layers[index])
            return
        for plan in plans[index]:
            filled = self._ring.take()
            if filled.lost:
                raise self._trouble(batch, filled.lost)
            pages = pages_over(filled.rows, self._config, self.kind)
            yield Part(plan.rows, plan.batch, LayerCache(pages, self.kind))
            self._ring.give_back()

    def _in_memory(self) -> Iterator[LayerCache]:
        return (layer for index, layer in enumerate(self.layers) if index not in self._slot)

    def _trouble(self, batch: StepBatch, lost: list[LostPage]) -> CacheLost:
        return CacheLost(self.path, lost[0].reason, holders(batch, {page.page for page in lost}))


class _SpilledStep:
    def __init__(self, cache: SpilledCache, batch: StepBatch, plans: dict[int, list[PartPlan]]) -> None:
        self._cache = cache
        self._batch = batch
        self._plans = plans

    def parts(self, index: int) -> Iterator[Part]:
        return self._cache.parts(index, self._batch, self._plans)

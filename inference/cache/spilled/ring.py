"""Buffers that are filled ahead of the computing and written back behind it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence as Several
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from inference.cache.spilled.page_file import LostPage, PageBuffer, PageFile, Place
from inference.cache.spilled.partition import PartPlan


class Unit(NamedTuple):
    """A part of a step in one layer of the file."""

    layer: int
    plan: PartPlan


class Filled(NamedTuple):
    """A unit's pages in memory, uint8 [capacity, page_bytes]; `lost` of them are not there."""

    unit: Unit
    rows: torch.Tensor
    lost: list[LostPage]


class _Filling(NamedTuple):
    unit: Unit
    buffer: PageBuffer
    reads: list[Future[list[LostPage]]]


class _Writing(NamedTuple):
    unit: Unit
    pages: frozenset[int]
    done: Future[None]


class PageRing:
    """One step at a time: `begin` with its units, then `take` and `give_back` each in order, and `end`.

    capacity: pages that a buffer holds. Reading threads fill free buffers with the units to come. One thread writes, so
    that what was written last is what stays; a page is read only when all that was to be written to it has been.
    waited_seconds: in which `take` waited, so far.
    """

    def __init__(self, file: PageFile, *, buffers: int, capacity: int, readers: int) -> None:
        self.capacity = capacity
        self._file = file
        self._free = [PageBuffer(capacity, file.page_bytes) for _ in range(buffers)]
        self.waited_seconds = 0.0
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="cache-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cache-writer")
        self._changed = threading.Condition()  # guards all that follows, and _free
        self._coming: deque[Unit] = deque()
        self._filling: deque[_Filling] = deque()
        self._writing: list[_Writing] = []
        self._taken: _Filling | None = None

    def begin(self, units: Several[Unit]) -> None:
        """Begin to fill buffers with these."""
        with self._changed:
            assert not self._coming and not self._filling and self._taken is None, "the step before has not ended"
            self._coming.extend(units)
            self._fill_free()

    def take(self) -> Filled:
        """The next unit, when it has been read."""
        started = time.perf_counter()
        with self._changed:
            while not self._filling:
                self._changed.wait()
            self._taken = filling = self._filling.popleft()
        lost = [page for read in filling.reads for page in read.result()]
        self.waited_seconds += time.perf_counter() - started
        return Filled(filling.unit, filling.buffer.rows, lost)

    def give_back(self) -> None:
        """The unit taken has been computed; what it changed is written, and then its buffer is filled again."""
        with self._changed:
            filling, self._taken = self._taken, None
            assert filling is not None, "nothing has been taken"
            unit = filling.unit
            done = self._writer.submit(self._file.write, unit.layer, unit.plan.changed, filling.buffer)
            writing = _Writing(unit, frozenset(place.page for place in unit.plan.changed), done)
            self._writing.append(writing)
        done.add_done_callback(lambda _: self._written(writing, filling.buffer))

    def end(self) -> None:
        """Let go of what has not been computed; what was given back is still written."""
        with self._changed:
            self._coming.clear()
            left = [*self._filling, *filter(None, [self._taken])]
            self._filling.clear()
            self._taken = None
        wait([read for filling in left for read in filling.reads])
        with self._changed:
            self._free += [filling.buffer for filling in left]

    def settle(self) -> None:
        """Return when all that was given back has been written."""
        with self._changed:
            pending = [writing.done for writing in self._writing]
        wait(pending)

    def copy(self, layers: int, source: int, target: int) -> None:
        """Write one page's content over another's, in every layer of the file."""
        self.settle()
        wait([self._readers.submit(self._file.copy, layer, source, target) for layer in range(layers)])

    def _written(self, writing: _Writing, buffer: PageBuffer) -> None:
        with self._changed:
            self._writing.remove(writing)
            self._free.append(buffer)
            self._fill_free()

    def _fill_free(self) -> None:
        """With the lock held."""
        while self._coming and self._free:
            unit, buffer = self._coming.popleft(), self._free.pop()
            buffer.clear(unit.plan.fresh)
            spans = self._file.spans(unit.plan.kept)
            reads = [
                self._readers.submit(self._read, unit.layer, span, buffer, self._pending(unit.layer, span))
                for span in spans
            ]
            self._filling.append(_Filling(unit, buffer, reads))
        self._changed.notify_all()

    def _pending(self, layer: int, span: list[Place]) -> list[Future[None]]:
        pages = {place.page for place in span}
        return [
            writing.done
            for writing in self._writing
            if writing.unit.layer == layer and not pages.isdisjoint(writing.pages)
        ]

    def _read(self, layer: int, span: list[Place], into: PageBuffer, after: list[Future[None]]) -> list[LostPage]:
        wait(after)
        return self._file.read(layer, span, into)

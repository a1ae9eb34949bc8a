"""Streams an image's units from disk through a ring of buffers, ahead of the thread that computes.

Units are used in one cycle, again and again: the layers of a step, its head, the layers of the next step. Reader
threads fill whichever buffer is free with the unit that comes next, across the borders of steps, a chunk each at a
time, and compare each chunk's checksum. The thread that computes takes a unit, waits where it is not there yet, and
gives its buffer back. A read that fails is told to whoever takes the unit; the next step begins anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash

from inference.background import start_in_background
from inference.errors import StoreError
from inference.memory.direct import CHUNK_BYTES, Buffer, DirectFile
from inference.memory.image import LayerImage, UnitPlace, Views


@dataclass(frozen=True, slots=True)
class StreamStats:
    """What has been streamed so far.

    bytes: read. reading_seconds: in which at least one read was under way. waited_seconds: that computing waited for a
    unit. steps: begun. bytes / reading_seconds is the rate that the disk gave; where waited_seconds is far below the
    steps' time, the disk was not what bounded them.
    """

    bytes: int = 0
    reading_seconds: float = 0.0
    waited_seconds: float = 0.0
    steps: int = 0
    copied_bytes: int = 0

    def since(self, before: StreamStats) -> StreamStats:
        """What has come to it."""
        return StreamStats(
            self.bytes - before.bytes,
            self.reading_seconds - before.reading_seconds,
            self.waited_seconds - before.waited_seconds,
            self.steps - before.steps,
            self.copied_bytes - before.copied_bytes,
        )


class _UnitFile:
    """A unit's file, opened when it is first read, and again after trouble."""

    def __init__(self, image: LayerImage, unit: UnitPlace) -> None:
        self.unit = unit
        self.path = image.path(unit)
        self._file: DirectFile | None = None
        self._opening = threading.Lock()

    def read_chunk(self, number: int, buffer: Buffer) -> int:
        """Read and check a chunk, to its place in the buffer; returns its bytes. Raises StoreError."""
        with self._opening:
            if self._file is None:
                self._file = DirectFile(self.path)
            file = self._file
        if number == 0 and file.is_removed:
            raise StoreError(self.path, "has been removed or replaced while it was in use")
        start = number * CHUNK_BYTES
        chunk = buffer.view[start : min(start + CHUNK_BYTES, self.unit.bytes)]
        file.read(chunk, start)
        if xxhash.xxh3_64_hexdigest(chunk) != self.unit.checksums[number]:
            raise StoreError(self.path, f"is damaged: bytes {start} to {start + len(chunk) - 1} are not those written")
        return len(chunk)

    def close(self) -> None:
        """Only while nobody reads."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_units(image: LayerImage, names: Sequence[str], readers: int) -> dict[str, Views]:
    """Units that stay: read and checked into memory of their own. Raises StoreError."""
    memories = read_flat(image, names, readers)
    return {name: image.unit(name).views(memory) for name, memory in memories.items()}


def read_flat(image: LayerImage, names: Sequence[str], readers: int) -> dict[str, torch.Tensor]:
    """The same as bytes: uint8, a unit each."""
    with ThreadPoolExecutor(max(1, readers), thread_name_prefix="inference-loading") as pool:
        return {name: _read_unit(_UnitFile(image, image.unit(name)), pool) for name in names}


def _read_unit(file: _UnitFile, pool: ThreadPoolExecutor) -> torch.Tensor:
    buffer = Buffer(file.unit.bytes)
    chunks = range(len(file.unit.checksums))
    try:
        list(pool.map(file.read_chunk, chunks, [buffer] * len(chunks)))
    finally:
        file.close()
    return buffer.tensor


class LayerRing:
    """The units that are streamed, `optional` ones (the head) only in steps that want them.

    One thread at a time begins a step and takes units. Positions count uses from the start: position p is of unit
    p % units, and lies in buffer p % ring.
    """

    def __init__(
        self, image: LayerImage, names: Sequence[str], *, ring: int, readers: int, optional: str | None = None
    ) -> None:
        """Starts to read at once, and keeps the image from being removed as outdated.

        optional: the last of the names, or None. Raises StoreError, MemoryError.
        """
        try:
            self._in_use = image.used()
        except OSError as error:
            raise StoreError(image.folder, f"cannot be used: {error.strerror}") from None
        self._files = [_UnitFile(image, image.unit(name)) for name in names]
        self._places = {name: index for index, name in enumerate(names)}
        self._optional = self._places[optional] if optional is not None else -1
        self._buffers = [Buffer(max(file.unit.bytes for file in self._files)) for _ in range(ring)]
        self.nbytes = sum(buffer.nbytes for buffer in self._buffers)
        self._views: dict[tuple[int, int], Views] = {}
        self._changed = threading.Condition()  # guards all below
        self._reading = self._chunk = 0  # the next chunk to be read, by its unit's position
        self._missing: dict[int, int] = {}  # chunks that have not arrived, by position
        self._taken = self._released = 0  # positions
        self._wants_optional: dict[int, bool] = {}  # by cycle
        self._failure: StoreError | None = None
        self._active = 0  # reads under way
        self._closed = False
        self._alive = readers
        self._bytes = self._steps = 0
        self._reading_since = self._reading_seconds = self._waited_seconds = 0.0
        self._threads = [
            threading.Thread(target=self._read, name=f"inference-reader-{index}", daemon=True)
            for index in range(readers)
        ]
        for thread in self._threads:
            start_in_background(thread, self.stop)

    def stats(self) -> StreamStats:
        with self._changed:
            reading = self._reading_seconds
            if self._active:
                reading += time.perf_counter() - self._reading_since
            return StreamStats(self._bytes, reading, self._waited_seconds, self._steps)

    def stop(self) -> None:
        """Read no more once the chunks at hand are there. Whoever waits for a unit gets a StoreError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """`stop`, and wait until that has come about."""
        self.stop()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def step(self, *, optional: bool) -> Iterator[None]:
        """A cycle: every unit is to be taken once, in order; the optional one if it is wanted."""
        count = len(self._files)
        with self._changed:
            self._check_open()
            if self._failure is not None or self._taken % count or self._taken != self._released:
                self._begin_anew()
            self._wants_optional = {self._taken // count: optional}
            self._steps += 1
            self._changed.notify_all()
        yield
        with self._changed:
            if not optional and self._optional >= 0 and self._taken % count == self._optional:
                self._taken += 1
                self._released += 1
                self._changed.notify_all()

    @contextmanager
    def unit(self, name: str) -> Iterator[Views]:
        """The next unit's arrays, until the end of the block. Raises StoreError where it could not be read."""
        with self._next_unit(name) as (index, at):
            views = self._views.get((index, at))
            if views is None:
                views = self._views[index, at] = self._files[index].unit.views(self._buffers[at].tensor)
            yield views

    @contextmanager
    def memory(self, name: str) -> Iterator[torch.Tensor]:
        """The next unit's bytes, uint8, as `unit`."""
        with self._next_unit(name) as (_, at):
            yield self._buffers[at].tensor

    def memories(self) -> list[torch.Tensor]:
        """All that `memory` may lie in."""
        return [buffer.tensor for buffer in self._buffers]

    @contextmanager
    def _next_unit(self, name: str) -> Iterator[tuple[int, int]]:
        """Which unit that is, and in which buffer it lies."""
        with self._changed:
            position = self._taken
            index = position % len(self._files)
            assert self._places[name] == index, f"{name} is used out of turn"
            if self._missing.get(position, 1):
                started = time.perf_counter()
                while self._missing.get(position, 1) and self._failure is None and not self._closed:
                    self._changed.wait()
                self._waited_seconds += time.perf_counter() - started
            self._check_open()
            if self._missing.get(position, 1):
                assert self._failure is not None
                raise StoreError(self._failure.file, self._failure.message)
            del self._missing[position]
            self._taken += 1
        yield index, position % len(self._buffers)
        with self._changed:
            self._released += 1
            self._changed.notify_all()

    def first_views(self, name: str) -> Views:
        """A unit's arrays as they will lie in the first buffer: right in everything but what they hold."""
        return self._files[self._places[name]].unit.views(self._buffers[0].tensor)

    def _begin_anew(self) -> None:
        """After a step that did not come to its end: forget what was read ahead. Called with the lock."""
        self._reading = -1  # no reader begins another chunk
        while self._active:  # those at work write into the buffers
            self._changed.wait()
        for file in self._files:
            file.close()
        self._missing.clear()
        self._wants_optional.clear()
        self._failure = None
        self._reading = self._chunk = self._taken = self._released = 0

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(self._files[0].path, "is streamed no more: the model has been closed")

    def _next(self) -> tuple[int, int] | None:
        """(position, chunk) to be read now; None where there is none. Called with the lock."""
        if self._failure is not None or self._reading < 0:
            return None
        count = len(self._files)
        while self._reading % count == self._optional:
            wanted = self._wants_optional.get(self._reading // count)
            if wanted is None:  # its step has not begun
                return None
            if wanted:
                break
            self._reading += 1
        position, chunk = self._reading, self._chunk
        if position >= self._released + len(self._buffers):
            return None
        chunks = len(self._files[position % count].unit.checksums)
        if chunk == 0:
            self._missing[position] = chunks
        self._chunk += 1
        if self._chunk == chunks:
            self._reading, self._chunk = position + 1, 0
        return position, chunk

    def _read(self) -> None:
        """What a reader thread does."""
        while True:
            with self._changed:
                while not self._closed and (task := self._next()) is None:
                    self._changed.wait()
                if self._closed:
                    self._alive -= 1
                    if not self._alive:
                        self._in_use.close()
                        for file in self._files:
                            file.close()
                    return
                assert task is not None
                if not self._active:
                    self._reading_since = time.perf_counter()
                self._active += 1
            position, chunk = task
            file, buffer = self._files[position % len(self._files)], self._buffers[position % len(self._buffers)]
            failure, read = None, 0
            try:
                read = file.read_chunk(chunk, buffer)
            except StoreError as error:
                failure = error
            except Exception as error:  # such as too little memory: it ends the step, and not the reader
                failure = StoreError(file.path, f"cannot be read: {type(error).__name__}: {error}")
            with self._changed:
                self._active -= 1
                if not self._active:
                    self._reading_seconds += time.perf_counter() - self._reading_since
                self._bytes += read
                if failure is not None:
                    self._failure = self._failure or failure
                else:
                    self._missing[position] -= 1
                if failure is not None or not self._missing[position] or not self._active:
                    self._changed.notify_all()

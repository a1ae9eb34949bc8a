"""Copies units into a ring of buffers on a device, ahead of the computing.

As `memory.ring` does from disk into the host's memory: units are used in one cycle, across the borders of layers and
steps. A thread begins the copies, because it may have to wait for the disk; the copies themselves go on a stream of
their own. The thread that computes takes a unit, and the device waits for its copy; when the unit is given back, its
buffer is written to again once the device has computed with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from inference.background import start_in_background
from inference.device.streams import CopyStream
from inference.errors import StoreError
from inference.memory.image import UnitPlace, Views

Source = Callable[[str], AbstractContextManager[torch.Tensor]]
"""A unit's bytes in the host's memory, uint8, which stay there within the block. Raises StoreError."""


class DeviceRing:
    """Units in the order of their use, `optional` ones (the head, the last) only in steps that want them.

    One thread at a time begins a step and takes units. Position p is of unit p % units, in buffer p % ring.
    copied_bytes: so far. waited_seconds: in which the thread that computes waited for a copy to begin.
    """

    def __init__(
        self,
        device: torch.device,
        units: Sequence[UnitPlace],
        source: Source,
        *,
        ring: int,
        leaves: frozenset[str] = frozenset(),
        optional: str | None = None,
    ) -> None:
        """Begins to copy at once. leaves: units whose source is to be held no longer than until they are copied."""
        self._units = list(units)
        self._places = {unit.name: index for index, unit in enumerate(units)}
        self._optional = self._places[optional] if optional is not None else -1
        self._source = source
        self._leaves = leaves
        self._stream = CopyStream(device)
        largest = max(unit.bytes for unit in units)
        self._buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(ring)]
        self._views: dict[tuple[int, int], Views] = {}
        self._free: list[torch.Event | None] = [None] * ring
        self.nbytes = largest * ring
        self.copied_bytes = 0
        self.waited_seconds = 0.0
        self._changed = threading.Condition()  # guards all that follows
        self._arrived: dict[int, torch.Event | None] = {}
        self._wants_optional: dict[int, bool] = {}
        self._failure: StoreError | None = None
        self._filling = self._held = self._closed = False
        self._filled = self._taken = self._released = 0
        self._thread = threading.Thread(target=self._fill, name="inference-device", daemon=True)
        start_in_background(self._thread, self.stop)

    def views(self, name: str) -> Views:
        """A unit's arrays as they will lie in the first buffer: right in everything but what they hold."""
        return self._units[self._places[name]].views(self._buffers[0])

    @contextmanager
    def step(self, *, optional: bool) -> Iterator[None]:
        """A cycle: every unit is to be taken once, in order; the optional one if it is wanted."""
        count = len(self._units)
        with self._changed:
            self._check_open()
            if self._failure is not None or self._taken % count or self._taken != self._released:
                self._begin_anew()
            self._wants_optional = {self._taken // count: optional}
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
        with self._changed:
            position = self._taken
            index = position % len(self._units)
            assert self._places[name] == index, f"{name} is used out of turn"
            started = time.perf_counter()
            while position not in self._arrived and self._failure is None and not self._closed:
                self._changed.wait()
            self.waited_seconds += time.perf_counter() - started
            self._check_open()
            if position not in self._arrived:
                assert self._failure is not None
                raise StoreError(self._failure.file, self._failure.message)
            arrived = self._arrived.pop(position)
            self._taken += 1
        self._stream.compute_after(arrived)
        at = position % len(self._buffers)
        views = self._views.get((index, at))
        if views is None:
            views = self._views[index, at] = self._units[index].views(self._buffers[at])
        yield views
        with self._changed:
            self._free[at] = self._stream.computed()
            self._released += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Copy no more. Whoever waits for a unit gets a StoreError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """`stop`, and wait until that has come about. What the thread waits for must have been closed before."""
        self.stop()
        self._thread.join()
        self._stream.settle()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(self._units[0].file, "is streamed no more: the model has been closed")

    def _begin_anew(self) -> None:
        """After a step that did not come to its end: forget what was copied ahead. Called with the lock."""
        self._held = True
        while self._filling:
            self._changed.wait()
        self._stream.settle()
        computed = self._stream.computed()
        self._free = [computed] * len(self._buffers)
        self._arrived.clear()
        self._wants_optional.clear()
        self._failure = None
        self._held = False
        self._filled = self._taken = self._released = 0

    def _may_fill(self) -> bool:
        """Called with the lock."""
        if self._failure is not None or self._held:
            return False
        count = len(self._units)
        while self._filled % count == self._optional:
            wanted = self._wants_optional.get(self._filled // count)
            if wanted is None:  # its step has not begun
                return False
            if wanted:
                break
            self._filled += 1
        return self._filled < self._released + len(self._buffers)

    def _fill(self) -> None:
        """What the thread does."""
        while True:
            with self._changed:
                while not self._closed and not self._may_fill():
                    self._changed.wait()
                if self._closed:
                    return
                position, self._filling = self._filled, True
                free = self._free[position % len(self._buffers)]
            unit = self._units[position % len(self._units)]
            failure, arrived = None, None
            try:
                arrived = self._copy(unit, self._buffers[position % len(self._buffers)], free)
            except StoreError as error:
                failure = error
            except Exception as error:  # such as the device's own: it ends the step, and not the thread
                failure = StoreError(unit.file, f"cannot be copied to the device: {type(error).__name__}: {error}")
            with self._changed:
                self._filling = False
                if failure is not None:
                    self._failure = failure
                else:
                    self._arrived[position] = arrived
                    self._filled = position + 1
                    self.copied_bytes += unit.bytes
                self._changed.notify_all()

    def _copy(self, unit: UnitPlace, buffer: torch.Tensor, free: torch.Event | None) -> torch.Event | None:
        with self._source(unit.name) as memory:
            with self._stream.copying(after=free):
                buffer[: unit.bytes].copy_(memory[: unit.bytes], non_blocking=True)
            arrived = self._stream.copied()
            if arrived is not None and unit.name in self._leaves:
                arrived.synchronize()
        return arrived

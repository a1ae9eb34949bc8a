"""Between the threads that submit and cancel, and the one that steps."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence as Several
from typing import NamedTuple

from inference.group import RequestGroup
from inference.sequence import Sequence


class Arrivals(NamedTuple):
    """What was submitted since it was last asked: what may run, and what may not, with the reason."""

    accepted: list[RequestGroup]
    rejected: list[tuple[RequestGroup, str]]


class Intake:
    """Requests that wait to be taken in, those that have not ended, by id, and what is to be cancelled.

    changed: guards all of it, and wakes whoever waits for work.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.due = ctypes.c_int32(0)
        """Other than 0 while requests wait to be taken in, for those who look from outside Python."""
        self._inbox: deque[RequestGroup] = deque()
        self._active: dict[str, RequestGroup] = {}
        self._cancelled: list[Sequence] = []

    @property
    def waiting(self) -> int:
        """Requests not yet taken in. A look without the lock, for those who come by again."""
        return len(self._inbox)

    def submit(self, group: RequestGroup) -> None:
        with self.changed:
            self._inbox.append(group)
            self.due.value = 1
            self.changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Before the next step; unknown and finished ids are ignored."""
        with self.changed:
            active = self._active.get(request_id)
            if active is not None:
                self._cancelled += active.running
            for group in self._inbox:
                if group.request.request_id == request_id:
                    group.cancelled = True
            self.changed.notify_all()

    def cancel_sequences(self, sequences: Several[Sequence]) -> None:
        """Before the next step."""
        with self.changed:
            self._cancelled += sequences

    def take(self) -> Arrivals:
        """Take everything in. What is accepted is known by its id until it is forgotten."""
        arrivals = Arrivals([], [])
        with self.changed:
            self.due.value = 0
            while self._inbox:
                group = self._inbox.popleft()
                reason = group.refused or self._reason_of_id(group)
                if reason is not None:
                    arrivals.rejected.append((group, reason))
                    continue
                self._active[group.request.request_id] = group
                arrivals.accepted.append(group)
                if group.cancelled:
                    self._cancelled += group.running
        return arrivals

    def take_cancelled(self) -> list[Sequence]:
        """Sequences to be ended; some may have ended already."""
        with self.changed:
            cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def forget(self, group: RequestGroup) -> None:
        """It has ended, and its id may be used again."""
        with self.changed:
            self._active.pop(group.request.request_id, None)

    def _reason_of_id(self, group: RequestGroup) -> str | None:
        request_id = group.request.request_id
        if request_id in self._active:
            return f"request_id: {request_id!r} is in use by a request that has not ended"
        return None

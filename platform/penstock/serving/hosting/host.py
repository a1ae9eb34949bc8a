"""One engine host: its name, its engines, what it is at, and whether it is asked to stop."""

import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.config import config
from penstock.serving.hosting.batch_runs import BatchRuns
from penstock.serving.hosting.engines import EnginePool

# A live request is told of for this long after its end, while its caller records it.
ENDED_LIVE_SECONDS = 30.0


@dataclass(slots=True)
class EngineHostProcess:
    """Shared by the threads of a worker process: shards, listener and heartbeat."""

    name: str = field(default_factory=socket.gethostname)
    owner: str = ""
    engines: EnginePool = field(default_factory=EnginePool)
    batch_runs: BatchRuns = field(default_factory=BatchRuns)
    stopping: threading.Event = field(default_factory=threading.Event)
    _shards: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _live: dict[str, float | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # A new identity for each start: a lease never outlives the process that took it.
        self.owner = self.owner or f"{self.name[:80]}:{os.getpid()}:{secrets.token_hex(4)}"

    @contextmanager
    def slot(self, latency_class: str) -> Iterator[bool]:
        """Whether one more shard of this class may run here; each class has slots of its own."""
        with self._lock:
            free = not self.stopping.is_set() and self._shards[latency_class] < config().worker_concurrency
            if free:
                self._shards[latency_class] += 1
        try:
            yield free
        finally:
            if free:
                with self._lock:
                    self._shards[latency_class] -= 1

    @property
    def running_shards(self) -> int:
        with self._lock:
            return sum(self._shards.values())

    @contextmanager
    def live(self, request_id: str) -> Iterator[None]:
        """Marks a single request as carried by this host."""
        with self._lock:
            self._live[request_id] = None
        try:
            yield
        finally:
            with self._lock:
                self._live[request_id] = time.monotonic()

    def live_requests(self) -> list[str]:
        """Single requests that run here, or ended so lately that their caller may still be recording them."""
        horizon = time.monotonic() - ENDED_LIVE_SECONDS
        with self._lock:
            self._live = {key: ended for key, ended in self._live.items() if ended is None or ended > horizon}
            return list(self._live)


_current: EngineHostProcess | None = None


def set_current_host(host: EngineHostProcess | None) -> None:
    global _current
    _current = host


def current_host() -> EngineHostProcess | None:
    """This process's host; None in any process but a worker."""
    return _current

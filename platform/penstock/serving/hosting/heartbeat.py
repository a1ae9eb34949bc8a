"""Tells the database every few seconds that the host lives, and prolongs its leases, from a thread of its own."""

import logging
import os
import threading
from dataclasses import dataclass, field
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.db.models.functions import Now

from penstock.config import config
from penstock.serving import leases
from penstock.serving.hosting.host import EngineHostProcess
from penstock.serving.hosting.runs import end_runs_of
from penstock.serving.models import EngineHost

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0


@dataclass(slots=True)
class Heartbeat:
    host: EngineHostProcess
    url: str
    facts: dict[str, Any]
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    enrolled: bool = False

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends it with a last word: a host that left is told from one that fell silent."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join(timeout=HEARTBEAT_SECONDS)

    def beat(self) -> None:
        """Writes the host's row and prolongs its leases. Raises DatabaseError, InterfaceError."""
        leases.renew(self.host.owner)
        written = {"url": self.url, "facts": self.facts, "state": self.state(), "heartbeat_at": Now()}
        self.host.engines.measure()
        self.host.batch_runs.measure()
        if not self.enrolled:
            end_runs_of(host=self.host.engines.host, but=self.host.engines.run_ids())
            leases.end_leases_of_the_dead(self.host.name)
            EngineHost.objects.update_or_create(name=self.host.name, defaults={**written, "started_at": Now()})
            self.enrolled = True
        else:
            EngineHost.objects.filter(name=self.host.name).update(**written)

    def state(self) -> dict[str, Any]:
        engines = self.host.engines.state()
        return {
            "status": "stopped" if self.ended.is_set() else "stopping" if self.host.stopping.is_set() else "running",
            "pid": os.getpid(),
            "engines": engines,
            "releases": [engine["release"] for engine in engines],
            "loading": self.host.engines.being_loaded,
            "trouble": self.host.engines.trouble(),
            "memory_budget_bytes": self.host.engines.budget_bytes,
            "running": sum(engine["running"] for engine in engines),
            "waiting": sum(engine["waiting"] for engine in engines),
            "shards": self.host.running_shards,
            "live_requests": self.host.live_requests(),
        }

    def _run(self) -> None:
        every = min(HEARTBEAT_SECONDS, config().lease_seconds / 3)
        while True:
            last = self.ended.is_set()
            try:
                close_old_connections()
                self.beat()
            except (DatabaseError, InterfaceError) as error:
                logger.warning("no heartbeat, the database is away: %s", error)
                connection.close()
            if last:
                connection.close()
                return
            self.ended.wait(every)

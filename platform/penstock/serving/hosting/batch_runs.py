"""What an engine does while it holds rows of a batch: recorded for each batch, since an engine serves many."""

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.db import DatabaseError, InterfaceError, connection
from django.db.models.functions import Now

from penstock.serving.hosting.runs import measured
from penstock.serving.models import BatchRun, EngineRun

if TYPE_CHECKING:
    from inference.engine import Engine
    from inference.engine.stats import EngineStats

logger = logging.getLogger(__name__)

# The next shard of a batch that comes so soon after the last goes on with the same run.
PAUSE_SECONDS = 5.0
# Going through many steps takes a while, during which Python computes nothing else: at most so much of the time.
MEASURING_SHARE = 0.02


@dataclass(slots=True)
class Held:
    """A batch's rows on an engine; `before` is what the engine had done by then."""

    batch_id: str
    engine: "weakref.ref[Engine]"  # its memory is wanted as soon as it is given up
    before: "EngineStats"
    pk: int
    holders: int = 1
    left_at: float = 0.0
    measure_at: float = 0.0


class BatchRuns:
    """Thread-safe. Figures that the database does not take are left out; rows never wait for them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Held] = {}
        self._lock = threading.Lock()

    @contextmanager
    def holding(self, batch_id: str, run_id: int, engine: "Engine") -> Iterator[None]:
        """Counts the steps within the block, and until the last of several such blocks at a time, for the batch."""
        held = self._begin(batch_id, run_id, engine)
        try:
            yield
        finally:
            if held is not None:
                self._leave(held)

    def measure(self) -> None:
        """Writes what is known so far of the batches whose rows are held. Raises DatabaseError, InterfaceError."""
        now = time.monotonic()
        with self._lock:
            self._held = {
                key: held for key, held in self._held.items() if held.holders or now - held.left_at < PAUSE_SECONDS
            }
            due = [held for held in self._held.values() if held.holders and held.measure_at <= now]
        for held in due:
            self._write(held, over=False)

    def _begin(self, batch_id: str, run_id: int, engine: "Engine") -> Held | None:
        key = (batch_id, run_id)
        with self._lock:
            held = self._held.get(key)
            if held is not None and (held.holders or time.monotonic() - held.left_at < PAUSE_SECONDS):
                held.holders += 1
                return held
            before = engine.stats()
            try:
                if not EngineRun.objects.filter(pk=run_id).exists():
                    return None  # somebody has removed the engine's own row
                row = BatchRun.objects.create(
                    batch_id=batch_id, engine_run_id=run_id, first_step=before.steps, began_at=Now()
                )
            except (DatabaseError, InterfaceError) as error:
                logger.warning("the run of %s is not recorded: %s", batch_id, error)
                connection.close()
                return None
            self._held[key] = Held(batch_id, weakref.ref(engine), before, row.pk)
            return self._held[key]

    def _leave(self, held: Held) -> None:
        with self._lock:
            held.holders -= 1
            held.left_at = time.monotonic()
            over = held.holders == 0
        if over:
            try:
                self._write(held, over=True)
            except (DatabaseError, InterfaceError) as error:
                logger.warning("the end of the run of %s is not recorded: %s", held.batch_id, error)
                connection.close()

    def _write(self, held: Held, *, over: bool) -> None:
        engine = held.engine()
        if engine is None:
            return
        started = time.monotonic()
        figures = measured(engine, before=held.before)
        held.measure_at = time.monotonic() + (time.monotonic() - started) / MEASURING_SHARE
        row = BatchRun.objects.filter(pk=held.pk)
        if over:
            row.update(measured=figures, measured_at=Now(), ended_at=Now())
        else:
            row.update(measured=figures, measured_at=Now(), ended_at=None)

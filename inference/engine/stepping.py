"""The background thread that steps whenever there is work."""

from __future__ import annotations

import logging
import threading

from inference.background import start_in_background
from inference.engine.intake import Intake
from inference.engine.running import RunningBatch

logger = logging.getLogger(__name__)


class StepThread:
    """None until it is started, and again when it has been stopped."""

    def __init__(self, batch: RunningBatch, intake: Intake) -> None:
        self._batch = batch
        self._intake = intake  # its lock guards what follows
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()  # of that thread alone: another may be started before it has come to it

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        with self._intake.changed:
            if self._thread is not None:
                return
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stopping,), name="inference-engine", daemon=True
            )
            start_in_background(self._thread, self._ask_to_stop)

    def stop(self) -> None:
        """After the step at hand. Every request that has not ended ends as cancelled; before this returns, unless it is
        called out of that step."""
        with self._intake.changed:
            thread, self._thread = self._thread, None
            self._ask_to_stop()
        if thread is threading.current_thread():
            return  # it ends them itself, once it has come out of the step
        if thread is not None:
            thread.join()
        self._batch.end_all("cancelled")

    def _ask_to_stop(self) -> None:
        with self._intake.changed:
            self._stopping.set()
            self._intake.changed.notify_all()

    def _run(self, stopping: threading.Event) -> None:
        changed = self._intake.changed
        while not stopping.is_set():
            with changed:
                while not (stopping.is_set() or self._intake.waiting or self._batch.scheduler.has_work):
                    changed.wait()
            if stopping.is_set():
                break
            try:
                self._batch.step()
            except Exception as error:
                # Not foreseen, and nobody knows whose it was; but those who come later must find an engine that runs.
                logger.exception("a step failed outside of the model")
                self._batch.end_all("error", f"the step failed: {type(error).__name__}: {error}")
        self._batch.end_all("cancelled")

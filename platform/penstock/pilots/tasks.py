"""What Celery calls for pilots. Each is safe to run twice and at any time: the rows decide what there is to do."""

import threading
from typing import Any

from celery import shared_task, signals
from django.db import close_old_connections

from penstock.pilots import measuring
from penstock.pilots.services import wake_measuring

_stopping = threading.Event()


def _stop(**_: Any) -> None:
    # From a thread: Celery sends this from its signal handler, where taking a lock could deadlock.
    threading.Thread(target=_stopping.set, daemon=True).start()


signals.worker_shutting_down.connect(_stop, weak=False)


def _measure_baseline(run_id: int) -> None:
    """Runs on an engine host's queue; see `measuring`."""
    close_old_connections()  # a pool's thread lives for ever, its connection may not
    try:
        measuring.measure(run_id, stopping=_stopping)
    finally:
        close_old_connections()


def _sweep() -> None:
    """Runs on the control queue, every 30 seconds."""
    close_old_connections()
    try:
        measuring.sweep(wake_measuring)
    finally:
        close_old_connections()


measure_baseline = shared_task(name="pilots.measure_baseline")(_measure_baseline)
sweep = shared_task(name="pilots.sweep")(_sweep)

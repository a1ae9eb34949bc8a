"""What Celery calls for pilots. Each is safe to run twice and at any time: the rows decide what there is to do."""

from celery import shared_task
from django.db import close_old_connections

from penstock.pilots import measuring
from penstock.pilots.services import wake_measuring


def _measure_baseline(run_id: int) -> None:
    """Runs on an engine host's queue; see `measuring`."""
    close_old_connections()  # a pool's thread lives for ever, its connection may not
    try:
        measuring.measure(run_id)
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

"""What Celery calls for pilots."""

from celery import shared_task
from django.db import close_old_connections

from penstock.pilots import measuring
from penstock.pilots.services import wake_measuring


@shared_task(name="pilots.measure_baseline", ignore_result=True)
def measure_baseline(run_id: int) -> None:
    """Runs on an engine host's queue; see `measuring`."""
    close_old_connections()  # a pool's thread lives for ever, its connection may not
    try:
        measuring.measure(run_id)
    finally:
        close_old_connections()


@shared_task(name="pilots.sweep", ignore_result=True)
def sweep() -> None:
    """Runs on the control queue, every 30 seconds."""
    close_old_connections()
    try:
        measuring.sweep(wake_measuring)
    finally:
        close_old_connections()

"""Wakes workers through Celery. A message carries an identifier; a lost one is sent again by the sweep."""

import logging

from penstock.celery import app
from penstock.registry.models import LatencyClass

logger = logging.getLogger(__name__)

CONTROL_QUEUE = "control"
SHARD_QUEUES = tuple(LatencyClass.values)


def wake_intake(batch_id: str) -> bool:
    return _send("serving.intake", batch_id, queue=CONTROL_QUEUE)


def wake_finalize(batch_id: str) -> bool:
    return _send("serving.finalize", batch_id, queue=CONTROL_QUEUE)


def wake_close(batch_id: str) -> bool:
    return _send("serving.close", batch_id, queue=CONTROL_QUEUE)


def wake_shard(shard_id: int, latency_class: str) -> bool:
    return _send("serving.run_shard", shard_id, queue=latency_class)


def _send(name: str, subject: str | int, *, queue: str) -> bool:
    """Whether the broker took the message. No broker is no error: what it would have carried is in the rows."""
    try:
        # Not retried: a caller, perhaps a web request, would wait for a broker that is away.
        app.send_task(name, args=[subject], queue=queue, retry=False)
    except Exception as error:
        # kombu raises the transport's own errors too (redis, OSError), which have no common base.
        logger.warning("no broker for %s(%s): %s; the sweep will send it", name, subject, error)
        return False
    return True

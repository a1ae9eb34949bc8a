"""Celery's way in. Each task is safe to run twice and at any time: the rows decide what there is to do."""

import logging
from collections.abc import Callable
from typing import ParamSpec, cast

from celery import shared_task

from penstock.serving import closing, finalizing, sweeping
from penstock.serving import intake as intaking
from penstock.serving.hosting import shards
from penstock.serving.hosting.host import current_host
from penstock.serving.sequencing import sequence_and_sign

logger = logging.getLogger(__name__)

P = ParamSpec("P")


def task(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A Celery task. Celery's own support for Django gives each run a connection of its own."""
    return cast(Callable[[Callable[P, None]], Callable[P, None]], shared_task(name=name))


@task("serving.intake")
def intake(batch_id: str) -> None:
    """Reads and checks a batch's file, and sends its shards out."""
    intaking.intake(batch_id)


@task("serving.run_shard")
def run_shard(shard_id: int) -> None:
    """Runs a shard on this process's engine host."""
    host = current_host()
    if host is None:
        logger.error("shard %s came to a process that hosts no engine; the sweep will send it again", shard_id)
        return
    shards.run_shard(shard_id, host=host)


@task("serving.close")
def close(batch_id: str) -> None:
    """Ends what waits in a cancelled or expired batch, and finalises it if that was all."""
    closing.close_batch(batch_id)
    finalizing.finalize(batch_id)


@task("serving.finalize")
def finalize(batch_id: str) -> None:
    """Writes the files of a batch whose requests are all over."""
    finalizing.finalize(batch_id)


@task("serving.sweep")
def sweep() -> None:
    """Has done what lost messages left undone."""
    sweeping.sweep()


@task("serving.sequence_ledger")
def sequence_ledger() -> None:
    """Turns recorded events into leaves, and signs the head when it is due."""
    sequence_and_sign()

"""The end of a batch: its output and error files, written from the rows, then its last state.

Nothing of it is kept in memory between tries. A full disk, or a kill at any point, leaves the batch `finalizing`; the
sweep tries again, with growing pauses.
"""

import itertools
import logging
from collections.abc import Iterator
from datetime import timedelta

from django.db import DatabaseError, connection, transaction
from django.db.models import Count, Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.ledger.services import record
from inference.json_lines import json_line
from penstock.serving import blobs
from penstock.serving.bodies import EMBEDDINGS
from penstock.serving.completion import OPEN
from penstock.serving.models import Batch, File, Request
from penstock.serving.services.files import create_output_file
from penstock.serving.shapes import batch_line

logger = logging.getLogger(__name__)

ROWS_A_READ = 500
ROWS_OF_VECTORS_A_READ = 20
FIRST_PAUSE = timedelta(seconds=5)
LONGEST_PAUSE = timedelta(minutes=10)


def finalize(batch_id: str) -> bool:
    """Finalises a batch whose requests all have an outcome; whether it is over now.

    Does nothing while a request is open, and leaves the work to whoever is at it already.
    """
    if not _begin(batch_id):
        return False
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            # An advisory lock, not the row's: files take a while to write, and cancelling must not wait for them.
            cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [f"finalize {batch_id}"])
            if not cursor.fetchone()[0]:
                return False
            return _finish(batch_id)
    except (OSError, DatabaseError) as error:
        _put_off(batch_id, error)
        return False


def _begin(batch_id: str) -> bool:
    """Moves a batch to `finalizing` when its last request is over; a cancelled one keeps `cancelling` to the end."""
    with transaction.atomic():
        batch = Batch.objects.select_for_update().filter(pk=batch_id).first()
        if batch is None or batch.status not in (
            Batch.Status.IN_PROGRESS,
            Batch.Status.CANCELLING,
            Batch.Status.FINALIZING,
        ):
            return False
        if Request.objects.filter(batch=batch, status__in=OPEN).exists():
            return False
        if batch.status == Batch.Status.IN_PROGRESS:
            batch.status = Batch.Status.FINALIZING
        if batch.finalizing_at is None:
            batch.finalizing_at = timezone.now()
        batch.save(update_fields=["status", "finalizing_at"])
    return True


def _finish(batch_id: str) -> bool:
    batch = Batch.objects.select_related("team", "task").get(pk=batch_id)
    if batch.status not in (Batch.Status.CANCELLING, Batch.Status.FINALIZING):
        return batch.status in Batch.TERMINAL
    rows = Request.objects.filter(batch=batch).select_related("model_release", "embedding").order_by("line")
    output = _write(rows.filter(status=Request.Status.SUCCEEDED))
    errors = _write(rows.exclude(status=Request.Status.SUCCEEDED))
    counts = rows.order_by().aggregate(
        **{status.value: Count("pk", filter=Q(status=status)) for status in Request.FINISHED}
    )
    batch = Batch.objects.select_for_update().select_related("team", "task").get(pk=batch_id)
    if batch.status not in (Batch.Status.CANCELLING, Batch.Status.FINALIZING):
        return batch.status in Batch.TERMINAL
    batch.output_file = _file(batch, output, "output")
    batch.error_file = _file(batch, errors, "error")
    now = timezone.now()
    if batch.cancelling_at is not None:
        batch.status, batch.cancelled_at, kind = Batch.Status.CANCELLED, now, "batch.cancelled"
    elif counts["expired"]:
        batch.status, batch.expired_at, kind = Batch.Status.EXPIRED, now, "batch.expired"
    else:
        batch.status, batch.completed_at, kind = Batch.Status.COMPLETED, now, "batch.completed"
    batch.finalize_error, batch.finalize_after = "", None
    batch.save(
        update_fields=[
            "status", "output_file", "error_file", "cancelled_at", "expired_at", "completed_at", "finalize_error",
            "finalize_after",
        ]
    )  # fmt: skip
    record(
        kind=kind,
        subject=batch.pk,
        payload={
            "task": batch.task.name,
            "task_version": batch.task_version,
            "total": batch.total,
            **counts,
            # Lets the verifier show that no finished request was left out of a bundle.
            "request_leaves": sum(counts.values()),
            "output_sha256": output.sha256 if output else None,
            "error_sha256": errors.sha256 if errors else None,
        },
        actor=batch.cancelled_by if kind == "batch.cancelled" else "system",
    )
    return True


def _write(rows: QuerySet[Request]) -> blobs.Blob | None:
    """The rows' lines in the blob store; None where there are none, for an empty file is no file."""
    lines = _lines(rows)
    first = next(lines, None)
    return None if first is None else blobs.store(itertools.chain([first], lines))


def _lines(rows: QuerySet[Request]) -> Iterator[bytes]:
    # A request's vectors may be megabytes.
    embeds = rows.filter(endpoint=EMBEDDINGS).exists()
    for row in rows.iterator(chunk_size=ROWS_OF_VECTORS_A_READ if embeds else ROWS_A_READ):
        yield json_line(batch_line(row))


def _file(batch: Batch, blob: blobs.Blob | None, kind: str) -> File | None:
    return create_output_file(batch=batch, filename=f"{batch.pk}_{kind}.jsonl", blob=blob) if blob else None


def _put_off(batch_id: str, error: Exception) -> None:
    """Remembers what went wrong, and when to try again: after a pause that doubles with each try."""
    logger.error("batch %s could not be finalised and will be tried again: %s", batch_id, error)
    with transaction.atomic():
        batch = Batch.objects.select_for_update().get(pk=batch_id)
        pause = min(FIRST_PAUSE * 2 ** min(batch.finalize_attempts, 10), LONGEST_PAUSE)
        batch.finalize_attempts += 1
        batch.finalize_after = timezone.now() + pause
        batch.finalize_error = _("The files could not be written: %(why)s") % {"why": error}
        batch.save(update_fields=["finalize_attempts", "finalize_after", "finalize_error"])

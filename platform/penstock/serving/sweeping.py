"""The sweep: every few seconds it looks at the rows for what a lost message left undone, and has it done.

With the broker empty and nothing but the sweep, every batch comes to its end.
"""

import logging
from datetime import timedelta

from django.db.models import Exists, F, OuterRef, Q
from django.db.models.functions import Now

from penstock.serving import closing, dispatch
from penstock.serving.completion import OPEN
from penstock.serving.models import Batch, EngineHost, Request, Shard

logger = logging.getLogger(__name__)

INTAKE_FIRST = timedelta(seconds=5)
DISPATCH_AGAIN = timedelta(seconds=30)
SHARDS_A_SWEEP = 50
LIVE_SECONDS = 60.0
HOST_SILENT = timedelta(seconds=20)


def sweep() -> None:
    """One pass. Each part stands alone: what fails in one does not keep the others from their work."""
    for part in (wake_intakes, close_ended, wake_shards, wake_finalizing, close_lost_live):
        try:
            part()
        except Exception:
            logger.exception("the sweep's part %s failed; the next sweep tries again", part.__name__)


def wake_intakes() -> None:
    """Batches that wait for intake: its message was lost, or it was killed."""
    for pk in Batch.objects.filter(status=Batch.Status.VALIDATING, created_at__lt=Now() - INTAKE_FIRST).values_list(
        "pk", flat=True
    ):
        dispatch.wake_intake(pk)


def close_ended() -> None:
    """Batches that are cancelled, or whose window is over."""
    ended = Q(status=Batch.Status.CANCELLING) | Q(status=Batch.Status.IN_PROGRESS, expires_at__lte=Now())
    for pk in Batch.objects.filter(ended).values_list("pk", flat=True):
        closing.close_batch(pk)


def wake_shards() -> None:
    """Shards that nobody works at: never sent, sent long ago, or held by a worker that let its lease run out."""
    lost = Q(status=Shard.Status.QUEUED) & (Q(dispatched_at=None) | Q(dispatched_at__lt=Now() - DISPATCH_AGAIN))
    lost |= Q(status=Shard.Status.LEASED, lease_expires_at__lt=Now()) & (
        Q(dispatched_at=None) | Q(dispatched_at__lt=F("lease_expires_at")) | Q(dispatched_at__lt=Now() - DISPATCH_AGAIN)
    )
    shards = (
        Shard.objects.filter(lost, batch__status=Batch.Status.IN_PROGRESS, batch__expires_at__gt=Now())
        .order_by("batch__expires_at", "batch_id", "number")
        .values_list("pk", "batch__latency_class")[:SHARDS_A_SWEEP]
    )
    for pk, latency_class in list(shards):
        if not dispatch.wake_shard(pk, latency_class):
            return
        Shard.objects.filter(pk=pk).update(dispatched_at=Now())


def wake_finalizing() -> None:
    """Batches whose requests are all over, unless a failed try at their files is still to rest."""
    open_rows = Request.objects.filter(batch=OuterRef("pk"), status__in=OPEN)
    due = (
        Batch.objects.filter(
            Q(finalize_after=None) | Q(finalize_after__lte=Now()),
            status__in=[Batch.Status.IN_PROGRESS, Batch.Status.CANCELLING, Batch.Status.FINALIZING],
        )
        .filter(~Exists(open_rows))
        .values_list("pk", flat=True)
    )
    for pk in due:
        dispatch.wake_finalize(pk)


def close_lost_live() -> None:
    """Single requests whose web process died: no living host carries them."""
    carried: set[str] = set()
    for state in EngineHost.objects.filter(heartbeat_at__gt=Now() - HOST_SILENT).values_list("state", flat=True):
        carried.update(state.get("live_requests", ()))
    closing.close_interrupted(carried=carried, older_than_seconds=LIVE_SECONDS)

"""Ends the requests that will not run: of a batch that is cancelled or whose window is over, and of lost callers.

What a worker holds is left to that worker, which looks at its batch every second; once its lease has run out the
shard is taken from it, by raising the fence, and closed here.
"""

from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from penstock.serving.completion import OPEN, Result, record_results
from penstock.serving.expiry import EXPIRED_CODE, expired_message
from penstock.serving.models import Batch, Request, Shard

ROWS_A_TRANSACTION = 500


def close_batch(batch_id: str) -> None:
    """Ends what waits in a batch that is cancelled or over its window. Does nothing to any other."""
    batch = Batch.objects.filter(pk=batch_id).first()
    if batch is None:
        return
    if batch.status == Batch.Status.CANCELLING:
        status, code = Request.Status.CANCELLED, "batch_cancelled"
        message = _("The batch was cancelled before this request ran.")
    elif batch.status == Batch.Status.IN_PROGRESS and batch.expires_at <= timezone.now():
        status, code, message = Request.Status.EXPIRED, EXPIRED_CODE, expired_message()
    else:
        return
    _take_back_lost_shards(batch_id)
    while True:
        with transaction.atomic():
            waiting = list(
                Request.objects.select_for_update(skip_locked=True)
                .filter(batch_id=batch_id, status=Request.Status.QUEUED)
                .order_by("pk")
                .values_list("pk", flat=True)[:ROWS_A_TRANSACTION]
            )
            now = timezone.now()
            record_results(
                [
                    Result(request_id=pk, status=status, finished_at=now, error_code=code, error_message=message)
                    for pk in waiting
                ]
            )
        if len(waiting) < ROWS_A_TRANSACTION:
            break
    Shard.objects.filter(batch_id=batch_id, status=Shard.Status.QUEUED).exclude(requests__status__in=OPEN).update(
        status=Shard.Status.DONE
    )


def close_interrupted(*, carried: set[str], older_than_seconds: float) -> int:
    """Fails single requests that no engine host carries any more: the web process that asked has died."""
    horizon = Now() - timedelta(seconds=older_than_seconds)
    lost = list(
        Request.objects.filter(batch=None, status=Request.Status.LEASED, created_at__lt=horizon)
        .exclude(pk__in=carried)
        .values_list("pk", flat=True)[:ROWS_A_TRANSACTION]
    )
    now = timezone.now()
    message = _("The web process ended while it carried this request.")
    return len(
        record_results(
            [
                Result(
                    request_id=pk,
                    status=Request.Status.FAILED,
                    finished_at=now,
                    http_status=500,
                    error_code="interrupted",
                    error_message=message,
                )
                for pk in lost
            ]
        )
    )


def _take_back_lost_shards(batch_id: str) -> None:
    """Shards whose worker let the lease run out wait again; the worker, should it live, is fenced off."""
    with transaction.atomic():
        lost = list(
            Shard.objects.select_for_update(skip_locked=True)
            .filter(Q(lease_expires_at__lt=Now()), batch_id=batch_id, status=Shard.Status.LEASED)
            .values_list("pk", flat=True)
        )
        Shard.objects.filter(pk__in=lost).update(
            status=Shard.Status.QUEUED, fence=F("fence") + 1, lease_owner="", lease_expires_at=None
        )
        Request.objects.filter(shard_id__in=lost, status=Request.Status.LEASED).update(status=Request.Status.QUEUED)

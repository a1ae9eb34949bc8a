"""Leases of shards: claimed by one worker at a time, renewed while it lives, fenced by a number that only grows.

All times are the database's: the clocks of hosts need not agree.
"""

from dataclasses import dataclass
from datetime import timedelta

import psutil
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from penstock.config import config
from penstock.serving.completion import OPEN, Lease, Result, record_results
from penstock.serving.models import Batch, Request, Shard

MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Claim:
    """A shard that this worker holds, and the requests of it that have no outcome yet."""

    shard: Shard
    lease: Lease
    requests: list[Request]


def claim(shard_id: int, *, owner: str) -> Claim | None:
    """Leases a shard that waits, or whose lease ran out; None if it is held, done, or its batch does not run.

    Each claim counts as an attempt. Past MAX_ATTEMPTS the shard's open requests fail: something in it, or near it,
    keeps ending the worker.
    """
    with transaction.atomic():
        shard = (
            Shard.objects.select_for_update(skip_locked=True, of=("self",))
            .select_related("batch__model_release")
            .filter(_free, pk=shard_id, batch__status=Batch.Status.IN_PROGRESS, batch__expires_at__gt=Now())
            .first()
        )
        if shard is None:
            return None
        exhausted = shard.attempts >= MAX_ATTEMPTS
        Shard.objects.filter(pk=shard_id).update(
            status=Shard.Status.LEASED,
            fence=F("fence") + 1,
            attempts=F("attempts") + 1,
            lease_owner=owner,
            lease_expires_at=_lease_end(),
        )
        shard.refresh_from_db(fields=["status", "fence", "attempts", "lease_owner", "lease_expires_at"])
        lease = Lease(shard.pk, shard.fence)
        # Locked, for closing a cancelled batch may end some of them at this moment.
        requests = list(Request.objects.select_for_update().filter(shard=shard, status__in=OPEN).order_by("line"))
        if exhausted or not requests:
            record_results([_exhausted(request) for request in requests], lease=lease)
            return None
        Request.objects.filter(pk__in=[request.pk for request in requests]).update(status=Request.Status.LEASED)
    return Claim(shard, lease, requests)


def renew(owner: str) -> int:
    """Prolongs every lease of a worker; returns how many it still holds.

    A lease that ran out while the database was away is taken up again, unless another worker has claimed the shard.
    """
    return Shard.objects.filter(lease_owner=owner, status=Shard.Status.LEASED).update(lease_expires_at=_lease_end())


def release(lease: Lease, *, again_in_a_while: bool = False, attempt_counts: bool = False) -> bool:
    """Hands a shard back for another worker, its open requests waiting again; False if it was no longer held.

    The attempt is taken back, unless it counts: the worker lives, so the shard did not end it. With `again_in_a_while`
    the sweep lets the usual pause pass before it sends the shard out again.
    """
    with transaction.atomic():
        held = Shard.objects.filter(pk=lease.shard_id, fence=lease.fence, status=Shard.Status.LEASED).update(
            status=Shard.Status.QUEUED,
            attempts=F("attempts") if attempt_counts else F("attempts") - 1,
            lease_owner="",
            lease_expires_at=None,
            dispatched_at=Now() if again_in_a_while else None,
        )
        if held:
            Request.objects.filter(shard=lease.shard_id, status=Request.Status.LEASED).update(
                status=Request.Status.QUEUED
            )
    return bool(held)


def end_leases_of_the_dead(host_name: str) -> int:
    """Ends the leases of workers of this machine that were killed, so that none is waited for; returns how many.

    Were one alive after all (in another container under the same name), the fence keeps its results out.
    """
    ended = 0
    held = Shard.objects.filter(status=Shard.Status.LEASED, lease_owner__startswith=f"{host_name[:80]}:")
    for owner in held.order_by().values_list("lease_owner", flat=True).distinct():
        pid = owner.split(":")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            ended += Shard.objects.filter(lease_owner=owner, status=Shard.Status.LEASED).update(
                lease_expires_at=Now() - timedelta(seconds=1), dispatched_at=None
            )
    return ended


_free = Q(status=Shard.Status.QUEUED) | Q(status=Shard.Status.LEASED, lease_expires_at__lt=Now())


def _lease_end() -> object:
    return Now() + timedelta(seconds=config().lease_seconds)


def _exhausted(request: Request) -> Result:
    return Result(
        request_id=request.pk,
        status=Request.Status.FAILED,
        finished_at=timezone.now(),
        http_status=500,
        error_code="attempts_exhausted",
        error_message=_("The worker ended %(count)d times while it ran this request and its neighbours.")
        % {"count": MAX_ATTEMPTS},
    )

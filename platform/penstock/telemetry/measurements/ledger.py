"""Figures of the log itself: what is in it, when it was signed, what is missing."""

from collections.abc import Mapping

from django.db.models import Exists, Max, OuterRef, Q, QuerySet

from governance.controls.sources import Measurement
from governance.ledger import selectors
from governance.ledger.events import EVIDENCE_EXPORTED, REQUEST_FINISHED
from governance.ledger.models import Leaf, OutboxEntry
from penstock.serving.models import Batch
from penstock.telemetry.measurements.window import Figure, Window


def leaves(key: str, window: Window) -> Measurement:
    """Entries of the window about the scope's tasks, their batches and requests."""
    rows = _leaves(window)
    count = rows.count()
    newest = rows.aggregate(newest=Max("occurred_at"))["newest"]
    return window.measured(
        key, count, "count", count=count, at=newest or window.end, query=window.requests_query() if count else None
    )


def checkpoint_age_seconds(key: str, window: Window) -> Measurement:
    """`count` is the number of entries that the newest signed head covers."""
    checkpoint = selectors.latest_checkpoint()
    if checkpoint is None:
        return window.measured(key, None, "seconds", count=0, at=window.end)
    age = max(0.0, (window.end - checkpoint.created_at).total_seconds())
    return window.measured(
        key, age, "seconds", count=checkpoint.size, at=window.end, signed_at=checkpoint.created_at.isoformat()
    )


def requests_without_leaf(key: str, window: Window) -> Measurement:
    """Finished requests of which the log knows nothing. Those recorded but not yet sequenced, a matter of seconds,
    are counted apart (`pending`): their entry can no longer be lost without the result."""
    finished = window.requests
    in_tree = Leaf.objects.filter(kind=REQUEST_FINISHED, subject=OuterRef("pk"))
    in_outbox = OutboxEntry.objects.filter(kind=REQUEST_FINISHED, subject=OuterRef("pk"))
    unsequenced = finished.filter(~Exists(in_tree))
    missing = unsequenced.filter(~Exists(in_outbox))
    count, number = finished.count(), missing.count()
    return window.measured(
        key,
        number if count else None,
        "count",
        count=count,
        query=window.requests_query(),
        pending=unsequenced.count() - number,
        missing=list(missing.order_by("pk").values_list("pk", flat=True)[:100]) or None,
    )


def evidence_exports(key: str, window: Window) -> Measurement:
    rows = _leaves(window).filter(kind=EVIDENCE_EXPORTED)
    count = rows.count()
    newest = rows.aggregate(newest=Max("occurred_at"))["newest"]
    return window.measured(key, count, "count", count=count, at=newest or window.end)


def _leaves(window: Window) -> QuerySet[Leaf]:
    rows = selectors.entries(since=window.start, until=window.end).order_by()
    if window.batch:
        return rows.filter(Q(batch=window.batch.pk) | Q(subject=window.batch.pk, kind__startswith="batch."))
    if window.is_narrowed:
        names = window.task_names
        batches = Batch.objects.filter(task__in=window.tasks).values("pk")
        # Events about a task itself carry its name as their subject, most others as a reference; an export of a
        # batch refers to the batch alone.
        about = Q(task__in=names) | Q(subject__in=names, kind__startswith="task.")
        rows = rows.filter(about | Q(kind=EVIDENCE_EXPORTED, batch__in=batches))
    return rows


LEDGER_FIGURES: Mapping[str, Figure] = {
    "ledger.leaves": leaves,
    "ledger.checkpoint_age_seconds": checkpoint_age_seconds,
    "ledger.requests_without_leaf": requests_without_leaf,
    "evidence.exports": evidence_exports,
}

"""What the ledger holds about a thing, as rows for a page."""

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from governance.ledger import selectors
from governance.ledger.models import Leaf, OutboxEntry

KINDS: dict[str, Promise] = {
    "task.created": _("Task created"),
    "task.updated": _("Task changed"),
    "task.submitted": _("Task submitted"),
    "task.activated": _("Task activated"),
    "task.suspended": _("Task suspended"),
    "task.retired": _("Task retired"),
    "thresholds.changed": _("Fairness thresholds changed"),
    "release.imported": _("Release imported"),
    "release.evaluated": _("Release evaluated"),
    "release.approved": _("Release approved"),
    "release.withdrawn": _("Release withdrawn"),
    "release.loaded": _("Release loaded on a host"),
    "batch.created": _("Batch created"),
    "batch.started": _("Batch started"),
    "batch.cancelled": _("Batch cancelled"),
    "batch.cancelling": _("Cancelling asked for"),
    "batch.completed": _("Batch completed"),
    "batch.failed": _("Batch failed"),
    "batch.expired": _("Batch expired"),
    "request.finished": _("Request finished"),
    "file.created": _("File stored"),
    "file.deleted": _("File deleted"),
    "key.created": _("API key created"),
    "key.revoked": _("API key revoked"),
    "person.created": _("Person added"),
    "password.changed": _("Password changed"),
    "team.created": _("Team added"),
    "role.granted": _("Role granted"),
    "role.revoked": _("Role taken away"),
    "rate_card.changed": _("Rate card changed"),
    "pilot.created": _("Pilot created"),
    "pilot.baseline_started": _("Baseline started"),
    "pilot.baseline_measured": _("Baseline measured"),
    "pilot.trial_started": _("Trial started"),
    "pilot.decided": _("Pilot decided"),
    "evidence.exported": _("Evidence exported"),
    "control.applicability_set": _("Applicability decided"),
}


PAGES = {
    "task": ("task", "name"),
    "release": ("release", "name"),
    "batch": ("batch", "batch_id"),
    "request": ("request", "request_id"),
    "pilot": ("pilot", "name"),
}


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """An event; `index` is None while it waits for its place in the tree."""

    index: int | None
    when: dt.datetime
    kind: str
    label: str
    subject: str
    actor: str
    detail: str

    @property
    def url(self) -> str:
        """The page of what the event is about; empty where there is none."""
        room = self.kind.partition(".")[0]
        if room in PAGES and self.subject:
            name, argument = PAGES[room]
            return reverse(f"dashboard:{name}", kwargs={argument: self.subject})
        return ""


def label_of(kind: str) -> str:
    return str(KINDS.get(kind, kind))


def history(subject: str, *, limit: int = 30) -> list[HistoryRow]:
    """The newest events about `subject`, newest first."""
    waiting = [
        HistoryRow(None, row.occurred_at, row.kind, label_of(row.kind), row.subject, row.actor, detail(row.payload))
        for row in OutboxEntry.objects.filter(subject=subject).order_by("-id")[:limit]
    ]
    leaves = selectors.entries(subject=subject).order_by("-index")[: limit - len(waiting)]
    return [*waiting, *(row_of(leaf) for leaf in leaves)]


def row_of(leaf: Leaf) -> HistoryRow:
    entry = json.loads(leaf.canonical)
    return HistoryRow(
        leaf.index,
        leaf.occurred_at,
        leaf.kind,
        label_of(leaf.kind),
        leaf.subject,
        str(entry.get("actor", "")),
        detail(entry.get("payload", {})),
    )


def detail(payload: dict[str, Any]) -> str:
    """What a person looks for first: the reason, what changed, the version."""
    parts = []
    if payload.get("reason"):
        parts.append(str(payload["reason"]))
    if isinstance(payload.get("changed"), list):
        parts.append(", ".join(map(str, payload["changed"])))
    if payload.get("version"):
        parts.append(str(_("version %(n)s") % {"n": payload["version"]}))
    if payload.get("role"):
        parts.append(f"{payload['role']} · {payload.get('team', '')}")
    if "streams" in payload:
        parts.append(str(_("layers read from disk") if payload["streams"] else _("whole in memory")))
    return "; ".join(parts)

"""Writes of the ledger: record into the outbox, sequence into the tree, sign the head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from governance.ledger import selectors, tree
from governance.ledger.checkpoint import TreeHead, sign_checkpoint_note
from governance.ledger.events import REQUEST_FINISHED, Event, canonical_entry
from governance.ledger.keys import LedgerKey, load_or_create_key
from governance.ledger.models import Checkpoint, Leaf, Node, OutboxEntry

SEQUENCER_LOCK = 0x50_656E_7374_6F63_6B  # "Penstock": one sequencer at a time, whichever process it runs in
_ROWS_A_STATEMENT = 1000


class DuplicateEventError(Exception):
    """A request that already has its leaf was recorded as finished again."""


class LedgerCorruptError(Exception):
    """The stored tree contradicts a head that was signed before; nothing more is signed."""


def ledger_key() -> LedgerKey:
    """The installation's key, made on first use in `settings.LEDGER_KEY_DIR`. Raises `KeyFileError`."""
    return load_or_create_key(settings.LEDGER_KEY_DIR, settings.LEDGER_ORIGIN)


def record(
    *,
    kind: str,
    subject: str,
    payload: Mapping[str, Any],
    actor: str = "",
    occurred_at: datetime | None = None,
) -> None:
    """Puts an event in the outbox, in the caller's transaction: it is true when what it tells is.

    Raises `EventError` for a payload that the ledger does not take, `DuplicateEventError` or `IntegrityError`
    for a request that is recorded as finished twice.
    """
    moment = occurred_at or timezone.now()
    record_many(events=[Event(kind=kind, subject=subject, payload=payload, actor=actor, occurred_at=moment)])


def record_many(*, events: Iterable[Event]) -> None:
    """Puts many events in the outbox, in order and all or none. Errors as for `record`."""
    rows = [
        OutboxEntry(
            event_id=event.event_id,
            occurred_at=event.occurred_at,
            kind=event.kind,
            subject=event.subject,
            actor=event.actor,
            payload=event.payload,
        )
        for event in events
    ]
    if not rows:
        return
    finished = [row.subject for row in rows if row.kind == REQUEST_FINISHED]
    with transaction.atomic():
        OutboxEntry.objects.bulk_create(rows, batch_size=_ROWS_A_STATEMENT)
        # Asked after the insert: the outbox's own constraint has by then waited for a sequencer that holds the
        # earlier event, so a leaf that it has just made is seen here.
        if finished:
            known = Leaf.objects.filter(kind=REQUEST_FINISHED, subject__in=finished).first()
            if known is not None:
                raise DuplicateEventError(f"request {known.subject} already has its leaf, number {known.index}")


def sequence(*, limit: int = 5000) -> int:
    """Moves up to `limit` events from the outbox into the tree, oldest first; returns how many.

    Leaves, nodes and the emptied outbox rows become visible together or not at all; an advisory lock admits one
    sequencer at a time. Call again until it returns 0 to drain the outbox.
    """
    with transaction.atomic():
        _lock_sequencer()
        rows = list(OutboxEntry.objects.order_by("id")[:limit])
        if not rows:
            return 0
        frontier = tree.Frontier.load(selectors.tree_size(), selectors.read_nodes)
        leaves, nodes = [], []
        for row in rows:
            entry = canonical_entry(
                event_id=row.event_id,
                occurred_at=row.occurred_at,
                kind=row.kind,
                subject=row.subject,
                actor=row.actor,
                payload=row.payload,
            )
            leaf_hash = tree.leaf_hash(entry)
            leaves.append(
                Leaf(
                    index=frontier.size,
                    event_id=row.event_id,
                    occurred_at=row.occurred_at,
                    kind=row.kind,
                    subject=row.subject,
                    canonical=entry.decode(),
                    leaf_hash=leaf_hash,
                )
            )
            nodes += [
                Node(level=node.level, index=node.position, hash=node_hash)
                for node, node_hash in frontier.append(leaf_hash)
            ]
        Leaf.objects.bulk_create(leaves, batch_size=_ROWS_A_STATEMENT)
        Node.objects.bulk_create(nodes, batch_size=_ROWS_A_STATEMENT)
        OutboxEntry.objects.filter(id__in=[row.id for row in rows]).delete()
        return len(leaves)


def sign_checkpoint(*, key: LedgerKey) -> Checkpoint | None:
    """Signs the head if the tree grew since the last one; None if it did not.

    Raises `LedgerCorruptError` instead of signing over a history that differs from the last signed head.
    """
    with transaction.atomic():
        _lock_sequencer()
        size = selectors.tree_size()
        last = selectors.latest_checkpoint()
        if last is not None:
            _check_against(last, size)
        if size == (last.size if last else 0):
            return None
        head = TreeHead(key.name, size, tree.root(size, selectors.read_nodes))
        return Checkpoint.objects.create(
            size=size, root=head.root, note=sign_checkpoint_note(head, key), created_at=timezone.now()
        )


def drain_and_sign(*, key: LedgerKey) -> Checkpoint | None:
    """Sequences everything recorded so far and returns the head over it; None while the ledger is empty."""
    while sequence():
        pass
    return sign_checkpoint(key=key) or selectors.latest_checkpoint()


def _check_against(last: Checkpoint, size: int) -> None:
    if size < last.size:
        raise LedgerCorruptError(f"the tree has {size} leaves, but a head over {last.size} was signed")
    try:
        root = tree.root(last.size, selectors.read_nodes)
    except tree.MissingNodeError as error:
        raise LedgerCorruptError(f"the tree is incomplete: {error}") from error
    if root != bytes(last.root):
        raise LedgerCorruptError(f"the first {last.size} leaves no longer have the root that was signed")


def _lock_sequencer() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [SEQUENCER_LOCK])

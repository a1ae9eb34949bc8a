"""Tables of the ledger. The triggers are a guard against slips; the tree is the proof."""

from __future__ import annotations

import pgtrigger
from django.db import models
from django.db.models import F, Func, Q
from django.db.models.lookups import Exact

from governance.ledger.events import MAX_NAME_CHARACTERS, REQUEST_FINISHED
from governance.ledger.tree import HASH_BYTES


def _append_only() -> list[pgtrigger.Trigger]:
    return [
        pgtrigger.Protect(name="append_only", operation=pgtrigger.Update | pgtrigger.Delete),
        pgtrigger.Trigger(
            name="no_truncate",
            level=pgtrigger.Statement,
            when=pgtrigger.Before,
            operation=pgtrigger.Truncate,
            func="RAISE EXCEPTION 'pgtrigger: Cannot truncate rows from % table', TG_TABLE_NAME;",
        ),
    ]


def _is_hash(field: str) -> Exact:
    length = Func(F(field), function="OCTET_LENGTH", output_field=models.IntegerField())
    return Exact(length, HASH_BYTES)


def _reference(name: str) -> models.GeneratedField:
    """A payload reference as a column. PostgreSQL computes it from the entry, so the two cannot differ."""
    return models.GeneratedField(
        expression=Func(
            F("canonical"),
            template="((%(expressions)s)::jsonb #>> '{payload," + name + "}')",
            output_field=models.TextField(),
        ),
        output_field=models.TextField(null=True),
        db_persist=True,
    )


class OutboxEntry(models.Model):
    """An event on its way into the tree, written in the transaction of what it tells."""

    id = models.BigAutoField(primary_key=True)
    event_id = models.UUIDField(unique=True)
    occurred_at = models.DateTimeField()
    kind = models.CharField(max_length=MAX_NAME_CHARACTERS)
    subject = models.CharField(max_length=MAX_NAME_CHARACTERS)
    actor = models.CharField(max_length=MAX_NAME_CHARACTERS, blank=True)
    payload = models.JSONField()

    class Meta:
        ordering = ("id",)
        verbose_name_plural = "outbox entries"
        constraints = [
            # With the same constraint on Leaf: a request has one result, and one leaf.
            models.UniqueConstraint(
                fields=["subject"], condition=Q(kind=REQUEST_FINISHED), name="outbox_request_finished_once"
            ),
        ]


class Leaf(models.Model):
    """An entry of the tree. `canonical` is the very text that was hashed (UTF-8, RFC 8785)."""

    index = models.BigIntegerField(primary_key=True)
    event_id = models.UUIDField(unique=True)
    occurred_at = models.DateTimeField()
    kind = models.CharField(max_length=MAX_NAME_CHARACTERS)
    subject = models.CharField(max_length=MAX_NAME_CHARACTERS)
    canonical = models.TextField()
    leaf_hash = models.BinaryField(max_length=HASH_BYTES)
    batch = _reference("batch")
    task = _reference("task")

    class Meta:
        ordering = ("index",)
        verbose_name_plural = "leaves"
        triggers = _append_only()
        constraints = [
            models.CheckConstraint(condition=Q(index__gte=0), name="leaf_index_from_zero"),
            models.CheckConstraint(condition=_is_hash("leaf_hash"), name="leaf_hash_is_sha256"),
            models.UniqueConstraint(
                fields=["subject"], condition=Q(kind=REQUEST_FINISHED), name="leaf_request_finished_once"
            ),
        ]
        indexes = [
            # Evidence of a batch or a task: what was recorded about it.
            models.Index(fields=["subject", "index"], name="leaf_subject"),
            # Evidence of a batch: its requests.
            models.Index(fields=["batch", "index"], condition=Q(batch__isnull=False), name="leaf_batch"),
            # Evidence of a task: its requests and batches.
            models.Index(fields=["task", "index"], condition=Q(task__isnull=False), name="leaf_task"),
            # A rule counts the events of a kind over a window.
            models.Index(fields=["kind", "occurred_at"], name="leaf_kind_when"),
        ]

    def __str__(self) -> str:
        return f"{self.index} {self.kind} {self.subject}"


class Node(models.Model):
    """The root of a complete subtree of two leaves or more; level 0 is the leaves themselves."""

    pk = models.CompositePrimaryKey("level", "index")
    level = models.PositiveSmallIntegerField()
    index = models.BigIntegerField()
    hash = models.BinaryField(max_length=HASH_BYTES)

    class Meta:
        triggers = _append_only()
        constraints = [
            models.CheckConstraint(condition=Q(level__gte=1, index__gte=0), name="node_above_the_leaves"),
            models.CheckConstraint(condition=_is_hash("hash"), name="node_hash_is_sha256"),
        ]


class Checkpoint(models.Model):
    """A signed head: the tree had `size` leaves and this root when it was signed."""

    size = models.BigIntegerField(primary_key=True)
    root = models.BinaryField(max_length=HASH_BYTES)
    note = models.TextField()
    created_at = models.DateTimeField()

    class Meta:
        ordering = ("size",)
        triggers = _append_only()
        constraints = [
            models.CheckConstraint(condition=Q(size__gte=1), name="checkpoint_of_a_grown_tree"),
            models.CheckConstraint(condition=_is_hash("root"), name="checkpoint_root_is_sha256"),
        ]

    def __str__(self) -> str:
        return f"{self.size} {bytes(self.root).hex()}"

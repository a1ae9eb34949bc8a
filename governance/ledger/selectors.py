"""Every read of the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from django.db.models import Q, QuerySet

from governance.ledger import tree
from governance.ledger.models import Checkpoint, Leaf, Node, OutboxEntry
from governance.ledger.tree import NodeId


def entries(
    *,
    kind: str | None = None,
    subject: str | None = None,
    batch: str | None = None,
    task: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> QuerySet[Leaf]:
    """Leaves in the order of the tree, narrowed by what is given; the window is `[since, until)`."""
    leaves = Leaf.objects.order_by("index")
    if kind is not None:
        leaves = leaves.filter(kind=kind)
    if subject is not None:
        leaves = leaves.filter(subject=subject)
    if batch is not None:
        leaves = leaves.filter(batch=batch)
    if task is not None:
        leaves = leaves.filter(task=task)
    if since is not None:
        leaves = leaves.filter(occurred_at__gte=since)
    if until is not None:
        leaves = leaves.filter(occurred_at__lt=until)
    return leaves


def tree_size() -> int:
    """Number of leaves."""
    last = Leaf.objects.order_by("-index").values_list("index", flat=True).first()
    return 0 if last is None else last + 1


def pending_count() -> int:
    """Events that are recorded but not in the tree yet."""
    return OutboxEntry.objects.count()


def latest_checkpoint() -> Checkpoint | None:
    """The newest signed head, or None before the first."""
    return Checkpoint.objects.order_by("-size").first()


def read_nodes(wanted: Sequence[NodeId], /) -> Mapping[NodeId, bytes]:
    """The `NodeReader` of the stored tree: two queries, whatever is asked for."""
    by_level: dict[int, list[int]] = {}
    for node in wanted:
        by_level.setdefault(node.level, []).append(node.position)
    found: dict[NodeId, bytes] = {}
    leaves = by_level.pop(0, None)
    if leaves:
        for index, leaf_hash in Leaf.objects.filter(index__in=leaves).values_list("index", "leaf_hash"):
            found[NodeId(0, index)] = bytes(leaf_hash)
    if by_level:
        condition = Q()
        for level, positions in by_level.items():
            condition |= Q(level=level, index__in=positions)
        for level, index, node_hash in Node.objects.filter(condition).values_list("level", "index", "hash"):
            found[NodeId(level, index)] = bytes(node_hash)
    return found


def inclusion_proof(*, index: int, size: int) -> list[bytes]:
    """Audit path of leaf `index` in the tree of `size` leaves."""
    return tree.inclusion_proof(index, size, read_nodes)


def consistency_proof(*, old_size: int, new_size: int) -> list[bytes]:
    """Proof that the tree of `old_size` leaves is a prefix of that of `new_size`."""
    return tree.consistency_proof(old_size, new_size, read_nodes)

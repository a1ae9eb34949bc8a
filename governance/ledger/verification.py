"""The database held against itself: every leaf hashed again, every node and head recomputed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db.models import F, Q
from django.db.models.expressions import Combinable, CombinedExpression
from django.utils.translation import gettext as _

from governance.ledger import events, selectors, tree
from governance.ledger.checkpoint import CheckpointError, NoteError, verify_checkpoint_note
from governance.ledger.keys import VerifierKey
from governance.ledger.models import Checkpoint, Leaf, Node
from governance.ledger.tree import NodeId

_LEAVES_A_READ = 4096
_MAX_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class LedgerProblem:
    """One thing that is wrong; `index` is the leaf it is about, or the first of the 2**`level` under the node."""

    index: int | None
    message: str
    level: int = 0


@dataclass(slots=True)
class LedgerVerification:
    """What was checked and what was found. `root` is recomputed from the leaves, in hex."""

    leaves: int = 0
    nodes: int = 0
    checkpoints: int = 0
    root: str = tree.EMPTY_ROOT.hex()
    problems: list[LedgerProblem] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        return not self.problems

    @property
    def first_bad_index(self) -> int | None:
        """The first bad leaf; where only nodes are bad, the first leaf under the narrowest of them."""
        places = [(p.level, p.index) for p in self.problems if p.index is not None]
        return min(places)[1] if places else None

    def add(self, index: int | None, message: str, level: int = 0) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(LedgerProblem(index, message, level))


def verify_database(*, key: VerifierKey | None = None) -> LedgerVerification:
    """Reads the whole ledger once. With `key`, the signatures of all heads are checked too.

    It may run while the ledger grows: what it reads is bounded by the size found at the start, and below that
    nothing may change.
    """
    result = LedgerVerification()
    heads = list(Checkpoint.objects.order_by("size"))
    size = selectors.tree_size()
    frontier = tree.Frontier()
    for leaves in _in_chunks(size):
        first = frontier.size
        made: dict[NodeId, bytes] = {}
        for leaf in leaves:
            if leaf.index != frontier.size:
                result.add(frontier.size, _("Leaf %(index)d is missing.") % {"index": frontier.size})
                return result  # without it nothing after can be recomputed
            _check_leaf(leaf, result)
            # The tree is rebuilt from the stored hashes, so that a changed entry is named alone, without all
            # the nodes above it.
            made.update(frontier.append(bytes(leaf.leaf_hash)))
            while heads and heads[0].size == frontier.size:
                _check_head(heads.pop(0), frontier.root(), key, result)
        _check_nodes(made, first, frontier.size, result)
    result.leaves = frontier.size
    result.root = frontier.root().hex()
    for head in heads:
        result.checkpoints += 1
        result.add(
            frontier.size,
            _("A head over %(size)d leaves was signed, but there are only %(leaves)d.")
            % {"size": head.size, "leaves": frontier.size},
        )
    # Nodes may have been added meanwhile: only those over the leaves that were there at the start are counted.
    end = CombinedExpression(F("index") + 1, Combinable.BITLEFTSHIFT, F("level"))
    stored = Node.objects.annotate(end=end).filter(end__lte=size).count()
    if stored != result.nodes:
        result.add(
            None,
            _("There are %(stored)d inner nodes; a tree of this size has %(right)d.")
            % {"stored": stored, "right": result.nodes},
        )
    return result


def _in_chunks(size: int) -> Iterator[list[Leaf]]:
    chunk: list[Leaf] = []
    for leaf in Leaf.objects.filter(index__lt=size).order_by("index").iterator(chunk_size=_LEAVES_A_READ):
        chunk.append(leaf)
        if len(chunk) == _LEAVES_A_READ:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _check_leaf(leaf: Leaf, result: LedgerVerification) -> None:
    """The stored hash must be the entry's, and the columns that queries use must say what the entry says."""
    if tree.leaf_hash(leaf.canonical.encode()) != bytes(leaf.leaf_hash):
        result.add(
            leaf.index,
            _("Leaf %(index)d: the entry does not have the hash that is stored beside it.") % {"index": leaf.index},
        )
    try:
        entry: Any = json.loads(leaf.canonical)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        result.add(leaf.index, _("Leaf %(index)d: the entry is not JSON.") % {"index": leaf.index})
        return
    columns = {
        "event_id": str(leaf.event_id),
        "occurred_at": events.timestamp(leaf.occurred_at),
        "kind": leaf.kind,
        "subject": leaf.subject,
    }
    for name, value in columns.items():
        if entry.get(name) != value:
            result.add(
                leaf.index,
                _("Leaf %(index)d: the column %(column)s differs from the entry.")
                % {"index": leaf.index, "column": name},
            )


def _check_nodes(made: dict[NodeId, bytes], first: int, end: int, result: LedgerVerification) -> None:
    """Nodes finished by the leaves `[first, end)` against those stored."""
    result.nodes += len(made)
    condition = Q(pk__in=[])
    for level in {node.level for node in made}:
        condition |= Q(level=level, index__gte=(first >> level), index__lt=(end >> level))
    stored = {
        NodeId(level, index): bytes(node_hash)
        for level, index, node_hash in Node.objects.filter(condition).values_list("level", "index", "hash")
    }
    for node in sorted(made, key=lambda node: node.position << node.level):
        leaf = node.position << node.level
        values = {"level": node.level, "position": node.position, "leaf": leaf}
        if node not in stored:
            result.add(leaf, _("Node %(level)d/%(position)d, over the leaves from %(leaf)d, is missing.") % values)
        elif stored[node] != made[node]:
            result.add(
                leaf,
                _("Node %(level)d/%(position)d does not follow from the leaves from %(leaf)d.") % values,
                node.level,
            )


def _check_head(head: Checkpoint, root: bytes, key: VerifierKey | None, result: LedgerVerification) -> None:
    result.checkpoints += 1
    values = {"size": head.size}
    if bytes(head.root) != root:
        result.add(None, _("The head over %(size)d leaves was signed for another root than they have now.") % values)
    if key is None:
        return
    try:
        signed = verify_checkpoint_note(head.note, key)
    except (NoteError, CheckpointError) as error:
        result.add(
            None,
            _("The head over %(size)d leaves is not validly signed: %(reason)s.") % {**values, "reason": error},
        )
        return
    if (signed.size, signed.root) != (head.size, root):
        result.add(None, _("The signed text of the head over %(size)d leaves differs.") % values)

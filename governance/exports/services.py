"""Exports evidence: brings the ledger up to date, chooses the entries, writes the bundle, and records that it did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.exports.bundle import BundleLeaf, BundleSummary, EarlierHead, write_bundle
from governance.ledger import selectors, tree
from governance.ledger.events import EVIDENCE_EXPORTED
from governance.ledger.models import Checkpoint, Leaf
from governance.ledger.services import drain_and_sign, ledger_key, record

_FOLLOWED = ("task", "release")
_LEAVES_A_READ = 500
_EARLIER_EXPORTS = 50


class NothingToExportError(Exception):
    """The ledger holds nothing about what was asked for."""


class UnknownCheckpointError(Exception):
    """No head of the size given was ever signed."""


def export_bundle(
    *,
    destination: Path,
    measurements: Sequence[Mapping[str, Any]],
    extra_files: Mapping[str, bytes],
    batch_id: str | None = None,
    task_id: str | None = None,
    since_size: int | None = None,
    actor: str = "",
) -> BundleSummary:
    """Writes the evidence of a batch, of a task, or (given neither) of everything, and records the export.

    The ids are the subjects that events name. Entries about the tasks and model releases concerned come along. Proofs
    are included that the heads of earlier exports, and the one of `since_size` leaves, are beginnings of this log.
    Call it outside a transaction, since it drains the outbox, and for a person whose right to export was checked.

    Raises `NothingToExportError`, `UnknownCheckpointError`, `BundleError`, `LedgerCorruptError` or `KeyFileError`.
    """
    if batch_id is not None and task_id is not None:
        raise ValueError("give a batch or a task, not both")
    key = ledger_key()
    head = drain_and_sign(key=key)
    if head is None:
        raise NothingToExportError(_("The ledger is empty: nothing has been recorded yet."))
    indexes = _select(head.size, batch_id, task_id)
    if not indexes:
        raise NothingToExportError(_("The ledger has no entry about %(subject)s.") % {"subject": batch_id or task_id})
    selection = {name: value for name, value in (("batch", batch_id), ("task", task_id)) if value is not None}
    destination.parent.mkdir(parents=True, exist_ok=True)
    summary = write_bundle(
        destination=destination,
        key=key,
        checkpoint=head.note,
        leaves=_leaves(indexes, head.size),
        measurements=measurements,
        extra_files=extra_files,
        earlier_heads=_earlier_heads(head.size, since_size),
        selection=selection,
        created_at=timezone.now(),
    )
    record(
        kind=EVIDENCE_EXPORTED,
        subject=batch_id or task_id or key.name,
        payload={
            **selection,
            "bundle_bytes": summary.size_bytes,
            "bundle_sha256": summary.sha256,
            "leaves": summary.leaf_count,
            "manifest_sha256": summary.manifest_sha256,
            "tree_size": summary.tree_size,
        },
        actor=actor,
    )
    return summary


def _select(size: int, batch_id: str | None, task_id: str | None) -> list[int]:
    """Indexes below `size` of what is asked for and of the tasks and releases that it refers to, in order."""
    if batch_id is not None:
        wanted = Q(batch=batch_id) | Q(subject=batch_id, kind__startswith="batch.")
    elif task_id is not None:
        wanted = Q(task=task_id) | Q(subject=task_id, kind__startswith="task.")
    else:
        return list(range(size))
    found: set[int] = set()
    followed: dict[str, set[str]] = {reference: set() for reference in _FOLLOWED}
    while wanted:
        references: dict[str, set[str]] = {reference: set() for reference in _FOLLOWED}
        leaves = Leaf.objects.filter(wanted, index__lt=size).values_list("index", "canonical")
        for index, canonical in leaves.iterator(chunk_size=_LEAVES_A_READ):
            found.add(index)
            payload = json.loads(canonical)["payload"]
            for reference in _FOLLOWED:
                if payload.get(reference) is not None:
                    references[reference].add(payload[reference])
        wanted = Q()
        for reference, subjects in references.items():
            if new := subjects - followed[reference]:
                followed[reference] |= new
                wanted |= Q(subject__in=new, kind__startswith=f"{reference}.")
    return sorted(found)


def _leaves(indexes: Sequence[int], size: int) -> Iterator[BundleLeaf]:
    for start in range(0, len(indexes), _LEAVES_A_READ):
        part = indexes[start : start + _LEAVES_A_READ]
        proofs = tree.inclusion_proofs(part, size, selectors.read_nodes)
        entries = dict(Leaf.objects.filter(index__in=part).values_list("index", "canonical"))
        for index, proof in zip(part, proofs, strict=True):
            yield BundleLeaf(index, entries[index], proof)


def _earlier_heads(size: int, since_size: int | None) -> Iterator[EarlierHead]:
    """Heads that an auditor may hold from an earlier bundle, each with its proof."""
    exports = Leaf.objects.filter(kind=EVIDENCE_EXPORTED, index__lt=size).order_by("-index")[:_EARLIER_EXPORTS]
    sizes = {int(json.loads(leaf.canonical)["payload"]["tree_size"]) for leaf in exports}
    if since_size is not None:
        sizes.add(since_size)
    notes = dict(Checkpoint.objects.filter(size__in=sizes, size__lt=size).values_list("size", "note"))
    if since_size is not None and since_size != size and since_size not in notes:
        raise UnknownCheckpointError(
            _("No head over %(size)d entries was signed; give the size that a checkpoint names.") % {"size": since_size}
        )
    for old_size, note in sorted(notes.items()):
        yield EarlierHead(old_size, note, tree.consistency_proof(old_size, size, selectors.read_nodes))

"""Verifies the evidence of some requests again, now, against the ledger as it is stored, and says what was checked.

It trusts nothing that was checked before: leaves are hashed again, each one's inclusion is proved up to the signed
head, the head's signature is verified, and the request rows are held against what their leaves say.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from governance.ledger import selectors, tree
from governance.ledger.checkpoint import CheckpointError, NoteError, TreeHead, verify_checkpoint_note
from governance.ledger.events import REQUEST_FINISHED, timestamp
from governance.ledger.keys import VerifierKey
from governance.ledger.models import Checkpoint, Leaf, OutboxEntry
from governance.ledger.services import ledger_key
from inference.errors import InvalidRequest
from penstock.serving.bodies import EMBEDDINGS
from penstock.serving.completion import leaf_payload
from penstock.serving.digests import embedding_digest, output_digest, prompt_digest
from penstock.serving.models import Request
from penstock.serving.rejection import Rejected

CHUNK = 2000
DIGESTED = ("prompt_digest", "output_digest")
SHOWN_PROBLEMS = 20


@dataclass(slots=True)
class Check:
    """One thing that was checked: how it came out, and the first of what was wrong."""

    said: str
    problems: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def shown(self) -> list[str]:
        return self.problems[:SHOWN_PROBLEMS]

    @property
    def not_shown(self) -> int:
        return max(0, len(self.problems) - SHOWN_PROBLEMS)


@dataclass(slots=True)
class Verification:
    """What was checked, in order. `notes` are no faults: what waits for its leaf or for the next head."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    leaves: int = 0

    @property
    def holds(self) -> bool:
        return bool(self.checks) and all(check.holds for check in self.checks)


def verify_requests(requests: QuerySet[Request], leaves: QuerySet[Leaf]) -> Verification:
    """Verifies `leaves`, the events of finished requests, against the signed head, and `requests` against them."""
    result = Verification(checkpoint=selectors.latest_checkpoint())
    if result.checkpoint is None:
        result.notes.append(_("No head has been signed yet; it is, seconds after the first event."))
        return result
    head, signature = check_signature(result.checkpoint, ledger_key().verifier)
    result.checks.append(signature)
    if head is None:
        return result
    hashes = Check("")
    inclusion = Check("")
    entries: dict[str, dict[str, Any]] = {}
    twice = Check("")
    beyond = 0
    for chunk in _chunks(leaves):
        within = [leaf for leaf in chunk if leaf.index < head.size]
        beyond += len(chunk) - len(within)
        result.leaves += len(within)
        for leaf in chunk:
            if leaf.subject in entries:
                twice.problems.append(_("%(id)s has more than one leaf.") % {"id": leaf.subject})
            entries[leaf.subject] = _entry_of(leaf)
        _check_inclusion(within, head, hashes, inclusion)
    hashes.said = ngettext("%(n)d leaf was hashed again.", "%(n)d leaves were hashed again.", result.leaves) % {
        "n": result.leaves
    }
    inclusion.said = ngettext(
        "The inclusion of %(n)d leaf in the signed tree of %(size)d was proved.",
        "The inclusion of %(n)d leaves in the signed tree of %(size)d was proved.",
        result.leaves,
    ) % {"n": result.leaves, "size": head.size}
    result.checks += [hashes, inclusion, *_check_rows(requests, entries, twice, result)]
    if beyond:
        result.notes.append(
            ngettext(
                "%(n)d leaf is newer than the signed head; the next head, seconds from now, takes it in.",
                "%(n)d leaves are newer than the signed head; the next head, seconds from now, takes them in.",
                beyond,
            )
            % {"n": beyond}
        )
    return result


def check_signature(checkpoint: Checkpoint, key: VerifierKey) -> tuple[TreeHead | None, Check]:
    """The signed head and how its verification came out; None where the signature does not hold."""
    check = Check(
        _("The Ed25519 signature of the head over %(size)d leaves was verified with key %(key)s.")
        % {"size": checkpoint.size, "key": key.key_hash.hex()}
    )
    try:
        head = verify_checkpoint_note(checkpoint.note, key)
    except (NoteError, CheckpointError) as error:
        check.problems.append(str(error))
        return None, check
    if (head.size, head.root) != (checkpoint.size, bytes(checkpoint.root)):
        check.problems.append(_("The signed text says another size or root than the row that keeps it."))
        return None, check
    return head, check


def _chunks(leaves: QuerySet[Leaf]) -> Iterator[list[Leaf]]:
    chunk: list[Leaf] = []
    for leaf in leaves.order_by("index").iterator(chunk_size=CHUNK):
        chunk.append(leaf)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _check_inclusion(leaves: list[Leaf], head: TreeHead, hashes: Check, inclusion: Check) -> None:
    if not leaves:
        return
    for leaf in leaves:
        computed = tree.leaf_hash(leaf.canonical.encode())
        if computed != bytes(leaf.leaf_hash):
            hashes.problems.append(
                _("Leaf %(index)d: its entry no longer has the hash stored beside it.") % {"index": leaf.index}
            )
    try:
        proofs = tree.inclusion_proofs([leaf.index for leaf in leaves], head.size, selectors.read_nodes)
    except tree.MissingNodeError:
        inclusion.problems.append(_("The stored tree lacks nodes, so that inclusion cannot be proved."))
        return
    for leaf, proof in zip(leaves, proofs, strict=True):
        computed = tree.leaf_hash(leaf.canonical.encode())
        if not tree.verify_inclusion(computed, leaf.index, head.size, proof, head.root):
            inclusion.problems.append(
                _("Leaf %(index)d is not in the tree whose head was signed.") % {"index": leaf.index}
            )


def _check_rows(
    requests: QuerySet[Request], entries: dict[str, dict[str, Any]], complete: Check, result: Verification
) -> list[Check]:
    """Each finished request has its leaf, each leaf its request, and both say the same."""
    agreement = Check("")
    count = 0
    missing = []
    without_row = dict(entries)
    rows = requests.filter(status__in=Request.FINISHED).select_related("task", "team", "model_release").order_by("pk")
    for row in rows.iterator(chunk_size=CHUNK):
        count += 1
        entry = without_row.pop(row.pk, None)
        if entry is None:
            missing.append(row.pk)
        else:
            agreement.problems += disagreements(row, entry)
    waiting = set(
        OutboxEntry.objects.filter(kind=REQUEST_FINISHED, subject__in=missing).values_list("subject", flat=True)
    )
    complete.problems += [_("%(id)s is finished and has no leaf.") % {"id": pk} for pk in missing if pk not in waiting]
    complete.problems += [_("%(id)s has a leaf, but no finished request.") % {"id": pk} for pk in without_row]
    complete.said = ngettext(
        "%(n)d finished request has exactly one leaf.", "%(n)d finished requests have exactly one leaf each.", count
    ) % {"n": count - len(waiting)}
    agreement.said = ngettext(
        "%(n)d stored prompt and output was digested again and held against its leaf.",
        "%(n)d stored prompts and outputs were digested again and held against their leaves.",
        count,
    ) % {"n": count - len(missing)}
    if waiting:
        result.notes.append(
            ngettext(
                "%(n)d request waits for its leaf, seconds from now.",
                "%(n)d requests wait for their leaves, seconds from now.",
                len(waiting),
            )
            % {"n": len(waiting)}
        )
    return [complete, agreement]


def disagreements(row: Request, entry: dict[str, Any]) -> list[str]:
    """Where a request's row says something else than its leaf. Digests are reckoned from the texts in the row."""
    found = []
    payload = entry["payload"]
    said = _payload_now(row)
    names = [name for name in said if name not in DIGESTED and said[name] != payload.get(name)]
    if row.finished_at is None or timestamp(row.finished_at) != entry["occurred_at"]:
        names.append("finished_at")
    for name in names:
        found.append(_("%(id)s: %(field)s differs from its leaf.") % {"id": row.pk, "field": name})
    if said["prompt_digest"] != payload.get("prompt_digest"):
        found.append(_("%(id)s: the stored prompt does not have the digest in its leaf.") % {"id": row.pk})
    if said["output_digest"] != payload.get("output_digest"):
        found.append(_("%(id)s: the stored output does not have the digest in its leaf.") % {"id": row.pk})
    return found


def _payload_now(row: Request) -> dict[str, Any]:
    """What the leaf would say were it written now."""
    try:
        said = leaf_payload(row)
        prompt = prompt_digest(row.salt, row.body)
        output = _output_digest(row) or None
    except (AttributeError, KeyError, TypeError, ValueError, Rejected, InvalidRequest):
        # A row that was changed into none that could ever have been run.
        said, prompt, output = {}, None, None
    return {**said, "prompt_digest": prompt, "output_digest": output}


def _output_digest(row: Request) -> str:
    kept = getattr(row, "embedding", None) if row.endpoint == EMBEDDINGS else None
    return output_digest(row.salt, row.output_texts) if kept is None else embedding_digest(row.salt, bytes(kept.data))


def _entry_of(leaf: Leaf) -> dict[str, Any]:
    """The leaf's time and payload; empty where the entry was changed into something without."""
    entry = json.loads(leaf.canonical)
    entry = entry if isinstance(entry, dict) else {}
    payload = entry.get("payload")
    return {"occurred_at": entry.get("occurred_at"), "payload": payload if isinstance(payload, dict) else {}}

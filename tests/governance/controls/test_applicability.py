"""Decisions of the Statement of Applicability: justified, versioned, and in the ledger."""

import hashlib
from typing import Any

import pytest
import rfc8785
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from governance.catalogs.loader import UnknownCatalogError, UnknownControlError, get_catalog
from governance.controls.models import Applicability
from governance.controls.selectors import applicability_of, statement_rows
from governance.controls.services import row_digest, set_applicability
from governance.ledger.models import OutboxEntry

pytestmark = pytest.mark.django_db

ISO = "iso-iec-42001-2023"
DECISION = {
    "catalog_id": ISO,
    "control_id": "A.6.2.8",
    "applicable": True,
    "justification": "Logs are required by our customers.",
    "origin": "contract",
    "implementation_status": "implemented",
    "owner_name": "Operations",
    "approver_name": "Risk officer",
    "link": "https://wiki.example.org/logging",
    "actor": "approver",
}


def decide(**changes: object) -> Applicability:
    return set_applicability(**(DECISION | changes))  # type: ignore[arg-type]


def test_a_decision_is_kept_and_recorded_in_the_ledger() -> None:
    row = decide()
    assert applicability_of(ISO, "A.6.2.8") == row
    assert (row.version, row.updated_by) == (1, "approver")
    entry = OutboxEntry.objects.get(kind="control.applicability_set")
    assert entry.subject == f"control:{ISO}:A.6.2.8"
    assert entry.actor == "approver"
    assert entry.payload == {
        "catalog_digest": get_catalog(ISO).digest,
        "applicable": True,
        "origin": "contract",
        "implementation_status": "implemented",
        "version": 1,
        "row_digest": row_digest(row),
    }


def test_the_ledger_names_no_reasons_but_pins_them() -> None:
    row = decide()
    by_hand: dict[str, Any] = {
        "approver": "Risk officer",
        "applicable": True,
        "catalog": ISO,
        "control": "A.6.2.8",
        "implementation_status": "implemented",
        "justification": "Logs are required by our customers.",
        "link": "https://wiki.example.org/logging",
        "origin": "contract",
        "owner": "Operations",
        "version": 1,
    }
    assert row_digest(row) == hashlib.sha256(rfc8785.dumps(by_hand)).hexdigest()
    row.justification = "Nobody asked for logs."
    assert row_digest(row) != hashlib.sha256(rfc8785.dumps(by_hand)).hexdigest()


def test_a_change_makes_a_new_version_and_a_new_entry() -> None:
    decide()
    row = decide(implementation_status="partial", actor="second approver")
    assert (row.version, row.updated_by) == (2, "second approver")
    assert Applicability.objects.count() == 1
    assert OutboxEntry.objects.filter(kind="control.applicability_set").count() == 2


def test_saying_the_same_again_records_nothing() -> None:
    decide()
    assert decide(justification="  Logs are required by our customers. ").version == 1
    assert OutboxEntry.objects.filter(kind="control.applicability_set").count() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"justification": "   "}, "blank"),
        ({"origin": "whim"}, "whim"),
        ({"implementation_status": "done"}, "done"),
        ({"implementation_status": "not_needed"}, "not needed"),
        ({"applicable": False}, "not needed"),
        ({"link": "javascript:alert(1)"}, "valid URL"),
        ({"actor": ""}, "blank"),
        ({"owner_name": "x" * 151}, "150"),
    ],
)
def test_a_decision_that_does_not_hold_together_changes_nothing(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        decide(**changes)
    assert not Applicability.objects.exists()
    assert not OutboxEntry.objects.exists()


def test_leaving_a_control_out_needs_a_reason_too() -> None:
    row = decide(applicable=False, implementation_status="not_needed", justification="We train no models.")
    assert row.applicable is False


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"catalog_id": "iso-27001"}, UnknownCatalogError),
        ({"control_id": "A.6.2.9"}, UnknownControlError),
    ],
)
def test_decisions_about_unknown_controls_are_refused(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        decide(**changes)


@pytest.mark.parametrize(
    "changes",
    [{"justification": ""}, {"implementation_status": "not_needed"}, {"updated_by": ""}],
)
def test_the_database_holds_the_invariants_by_itself(changes: dict[str, object]) -> None:
    row = decide()
    with pytest.raises(IntegrityError), transaction.atomic():
        Applicability.objects.filter(pk=row.pk).update(**changes)


def test_the_statement_lists_every_control_decided_or_not() -> None:
    row = decide()
    rows = statement_rows(catalog_id=ISO)
    assert [item.control.id for item in rows] == [control.id for control in get_catalog(ISO).controls]
    assert [item.decision for item in rows if item.decision is not None] == [row]
    assert all(item.evidence_count == 0 and item.evidence_newest is None for item in rows)

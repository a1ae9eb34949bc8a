"""Reads of the Statement of Applicability."""

import datetime as dt
from dataclasses import dataclass

from governance.catalogs.loader import Control, Group, get_catalog
from governance.controls.coverage import ControlCoverage
from governance.controls.models import Applicability


@dataclass(frozen=True, slots=True)
class StatementRow:
    """A control with what was decided about it (None: undecided) and the evidence that stands behind it."""

    catalog_id: str
    control: Control
    groups: tuple[Group, ...]
    decision: Applicability | None
    evidence_count: int
    evidence_newest: dt.datetime | None


def applicability_of(catalog_id: str, control_id: str) -> Applicability | None:
    """What was decided about a control; None if nothing was."""
    return Applicability.objects.filter(catalog_id=catalog_id, control_id=control_id).first()


def statement_rows(*, catalog_id: str, coverage: list[ControlCoverage] | None = None) -> list[StatementRow]:
    """Every control of a catalog, decided or not, in the catalog's order.

    `coverage` is that of the same catalog; without it no evidence is counted. Raises `UnknownCatalogError`.
    """
    catalog = get_catalog(catalog_id)
    decisions = {row.control_id: row for row in Applicability.objects.filter(catalog_id=catalog_id)}
    covered = {item.control.id: item for item in coverage or [] if item.catalog_id == catalog_id}
    rows = []
    for control in catalog.controls:
        evidence = covered.get(control.id)
        rows.append(
            StatementRow(
                catalog_id=catalog_id,
                control=control,
                groups=catalog.group_path(control),
                decision=decisions.get(control.id),
                evidence_count=len(evidence.evidence) if evidence else 0,
                evidence_newest=evidence.newest if evidence else None,
            )
        )
    return rows

"""Writes of the Statement of Applicability. The caller has checked that `actor` may decide about controls."""

import hashlib
from typing import Any

import rfc8785
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.catalogs.loader import get_catalog
from governance.controls.models import Applicability
from governance.ledger import services as ledger

APPLICABILITY_SET = "control.applicability_set"


def set_applicability(
    *,
    catalog_id: str,
    control_id: str,
    applicable: bool,
    justification: str,
    origin: str,
    implementation_status: str,
    owner_name: str = "",
    approver_name: str = "",
    link: str = "",
    actor: str,
) -> Applicability:
    """Decide whether a control applies, with the reason; record the decision in the ledger.

    `origin` and `implementation_status` are values of `Applicability.Origin` and `.Status`. Saying again what is
    already decided changes nothing and records nothing. Raises `UnknownCatalogError`, `UnknownControlError`, and
    `ValidationError` by field.
    """
    catalog = get_catalog(catalog_id)
    catalog.control(control_id)
    decision: dict[str, Any] = {
        "applicable": applicable,
        "justification": justification.strip(),
        "origin": origin,
        "implementation_status": implementation_status,
        "owner_name": owner_name.strip(),
        "approver_name": approver_name.strip(),
        "link": link.strip(),
    }
    with transaction.atomic():
        row = Applicability.objects.select_for_update().filter(catalog_id=catalog_id, control_id=control_id).first()
        if row is None:
            row = Applicability(catalog_id=catalog_id, control_id=control_id, version=0)
        elif all(getattr(row, name) == value for name, value in decision.items()):
            return row
        for name, value in decision.items():
            setattr(row, name, value)
        row.version += 1
        row.updated_at = timezone.now()
        row.updated_by = actor
        row.full_clean()
        try:
            with transaction.atomic():
                row.save()
        except IntegrityError as error:
            # Two people decided about an undecided control at the same moment; one of them must look again.
            raise ValidationError(_("Someone else has just decided about this control. Look again.")) from error
        ledger.record(
            kind=APPLICABILITY_SET,
            subject=f"control:{catalog_id}:{control_id}",
            payload={
                "catalog_digest": catalog.digest,
                "applicable": row.applicable,
                "origin": row.origin,
                "implementation_status": row.implementation_status,
                "version": row.version,
                "row_digest": row_digest(row),
            },
            actor=actor,
        )
    return row


def row_digest(row: Applicability) -> str:
    """SHA-256 of a decision as RFC 8785 JSON: lets an exported statement be held against the ledger, which names no
    reasons and no persons beside the actor."""
    return hashlib.sha256(
        rfc8785.dumps(
            {
                "catalog": row.catalog_id,
                "control": row.control_id,
                "applicable": row.applicable,
                "justification": row.justification,
                "origin": row.origin,
                "implementation_status": row.implementation_status,
                "owner": row.owner_name,
                "approver": row.approver_name,
                "link": row.link,
                "version": row.version,
            }
        )
    ).hexdigest()

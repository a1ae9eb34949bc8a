"""The Statement of Applicability: what the organization decided about each control (ISO/IEC 42001, 6.1.3 f)."""

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _


class Applicability(models.Model):
    """One row of the statement. A control without a row is undecided, and exports say so."""

    class Origin(models.TextChoices):
        """Why a control was taken in, or left out."""

        RISK = "risk", _("Risk assessment")
        IMPACT = "impact_assessment", _("Impact assessment")
        LAW = "law", _("Law or regulation")
        CONTRACT = "contract", _("Contract")
        POLICY = "policy", _("Own policy")

    class Status(models.TextChoices):
        """How far the control is put into practice, as its owner states it."""

        NOT_STARTED = "not_started", _("Not started")
        PLANNED = "planned", _("Planned")
        PARTIAL = "partial", _("Partly implemented")
        IMPLEMENTED = "implemented", _("Implemented")
        NOT_NEEDED = "not_needed", _("Not needed")

    catalog_id = models.CharField(_("catalog"), max_length=80)
    control_id = models.CharField(_("control"), max_length=40)
    applicable = models.BooleanField(_("applicable"))
    justification = models.TextField(_("justification"))
    origin = models.CharField(_("origin"), max_length=20, choices=Origin)
    implementation_status = models.CharField(_("implementation status"), max_length=20, choices=Status)
    owner_name = models.CharField(_("owner"), max_length=150, blank=True)
    approver_name = models.CharField(_("approver"), max_length=150, blank=True)
    link = models.URLField(_("link to the procedure or document"), max_length=500, blank=True)
    version = models.PositiveIntegerField(default=1)
    updated_at = models.DateTimeField()
    updated_by = models.CharField(max_length=150)

    class Meta:
        ordering = ("catalog_id", "control_id")
        verbose_name_plural = "applicabilities"
        constraints = [
            models.UniqueConstraint(fields=["catalog_id", "control_id"], name="applicability_once_a_control"),
            # 6.1.3 f asks for a reason either way.
            models.CheckConstraint(
                condition=~Q(justification=""),
                name="applicability_is_justified",
                violation_error_message=_("Give a justification, for inclusion as for exclusion."),
            ),
            models.CheckConstraint(
                condition=Q(applicable=True) ^ Q(implementation_status="not_needed"),
                name="applicability_status_fits",
                violation_error_message=_(
                    "A control that does not apply has the status “not needed”; one that applies has another."
                ),
            ),
            models.CheckConstraint(condition=~Q(updated_by=""), name="applicability_has_an_author"),
        ]

    def __str__(self) -> str:
        return f"{self.catalog_id} {self.control_id}"

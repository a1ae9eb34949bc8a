"""Forms of the evidence pages: fairness thresholds and the Statement of Applicability."""

from decimal import Decimal
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from governance.controls.models import Applicability
from penstock.dashboard.forms.base import HouseForm
from penstock.registry.contracts import FairnessPlan


class ThresholdsForm(HouseForm):
    """The screening policy of a task; none of these numbers is a legal limit."""

    group = forms.CharField(
        label=_("Compare groups by"), max_length=64, help_text=_("Metadata key of the requests, such as language.")
    )
    min_ratio = forms.DecimalField(
        label=_("Least ratio to the best group"),
        min_value=Decimal("0.001"),
        max_value=1,
        decimal_places=3,
        help_text=_(
            "0.80 is a common screening default. Outside employment law in the United States it has no standing."
        ),
    )
    min_count = forms.IntegerField(
        label=_("Requests a group needs"), min_value=1, help_text=_("With fewer, it is not judged.")
    )
    min_events = forms.IntegerField(
        label=_("Expected favourable outcomes"),
        min_value=0,
        help_text=_("At the best group's rate; with fewer, chance alone could make the ratio."),
    )
    confidence = forms.DecimalField(
        label=_("Confidence of intervals"),
        min_value=Decimal("0.501"),
        max_value=Decimal("0.999"),
        decimal_places=3,
        help_text=_("Usually 0.95."),
    )
    service_fields = {"fairness_plan": ""}

    def plan(self, present: FairnessPlan) -> FairnessPlan:
        """The plan with what was typed. Raises pydantic's ValidationError."""
        typed: dict[str, Any] = {**present.model_dump(), **self.cleaned_data}
        return FairnessPlan.model_validate(
            {**typed, "min_ratio": float(typed["min_ratio"]), "confidence": float(typed["confidence"])}
        )


class ApplicabilityForm(HouseForm):
    """What the organization decides about one control."""

    applicable = forms.TypedChoiceField(
        label=_("Does it apply?"),
        choices=(("yes", _("It applies")), ("no", _("It does not apply"))),
        coerce=lambda value: value == "yes",
    )
    justification = forms.CharField(
        label=_("Justification"),
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=_("Why it is taken in, or left out. A statement without reasons says nothing."),
    )
    origin = forms.ChoiceField(label=_("Where that comes from"), choices=Applicability.Origin.choices)
    implementation_status = forms.ChoiceField(
        label=_("Implementation status"), choices=Applicability.Status.choices, help_text=_("As its owner states it.")
    )
    owner_name = forms.CharField(label=_("Owner"), max_length=150, required=False)
    approver_name = forms.CharField(label=_("Approver"), max_length=150, required=False)
    link = forms.URLField(
        label=_("Link to the procedure or document"),
        required=False,
        max_length=500,
        assume_scheme="https",
        help_text=_("Where an auditor finds it."),
    )

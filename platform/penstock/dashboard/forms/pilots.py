"""Forms of pilots: planning one, its assumptions, the decision."""

from typing import Any

from django import forms
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from penstock.accounts.access import has_role, teams_of
from penstock.accounts.models import User
from penstock.dashboard.forms.base import HouseForm
from penstock.pilots.models import Pilot
from penstock.pilots.transitions import WRITERS
from penstock.registry.models import Task
from penstock.registry.selectors import tasks_visible_to
from penstock.serving.models import File
from penstock.serving.selectors import files_visible_to

LISTED_FILES = 50


class AssumptionsForm(HouseForm):
    """What the return is reckoned with; measurements stay what they were."""

    title = forms.CharField(label=_("Title"), max_length=160)
    items_per_month = forms.IntegerField(
        label=_("Items a month"),
        min_value=1,
        initial=10_000,
        help_text=_("How many there will be once it is introduced."),
    )
    introduction_cost = forms.DecimalField(
        label=_("Cost of introduction"),
        min_value=0,
        max_digits=14,
        decimal_places=2,
        initial=0,
        help_text=_("Once, in the rate card's currency: staff, training, set-up."),
    )
    discount_percent = forms.DecimalField(
        label=_("Discount rate, % a year"), min_value=0, max_value=999, decimal_places=2, initial=5
    )
    trial_days = forms.IntegerField(label=_("Trial, days"), min_value=1, initial=90)
    starts_on = forms.DateField(label=_("Starts on"), widget=forms.DateInput(attrs={"type": "date"}, format="%Y-%m-%d"))
    service_fields = {"discount_rate": "discount_percent"}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["starts_on"].initial = timezone.localdate

    def assumptions(self) -> dict[str, Any]:
        names = ("title", "items_per_month", "introduction_cost", "trial_days", "starts_on")
        return {
            **{name: self.cleaned_data[name] for name in names},
            "discount_rate": self.cleaned_data["discount_percent"] / 100,
        }


def assumptions_of(pilot: Pilot) -> dict[str, Any]:
    names = ("title", "items_per_month", "introduction_cost", "trial_days", "starts_on")
    return {**{name: getattr(pilot, name) for name in names}, "discount_percent": round(pilot.discount_rate * 100, 2)}


class FileChoice(forms.ModelChoiceField[File]):
    def label_from_instance(self, obj: File) -> str:
        return f"{obj.filename} · {obj.created_at:%Y-%m-%d %H:%M}"


class PilotForm(AssumptionsForm):
    """A new pilot: a task and the items that run both ways."""

    name = forms.SlugField(
        label=_("Name"), max_length=80, help_text=_("Lower-case letters, digits and hyphens; it stays.")
    )
    task = forms.ModelChoiceField(Task.objects.none(), label=_("Task"), empty_label=None, to_field_name="name")
    items_file = FileChoice(
        File.objects.none(),
        label=_("Items: a file stored already"),
        required=False,
        empty_label=_("Upload one instead"),
    )
    upload = forms.FileField(
        label=_("Items: upload a file"), required=False, help_text=_("JSONL, one request a line, as for a batch.")
    )
    sample_items = forms.IntegerField(
        label=_("Items compared"),
        min_value=1,
        initial=16,
        help_text=_("The first so many run both ways. The naive way is slow: 16 take minutes, hundreds take hours."),
    )

    field_order = ("task", "name", "title", "items_file", "upload", "sample_items")

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        teams = [team.pk for team in teams_of(user) if has_role(user, team, *WRITERS)]
        task, file = self.fields["task"], self.fields["items_file"]
        assert isinstance(task, forms.ModelChoiceField) and isinstance(file, forms.ModelChoiceField)
        task.queryset = tasks_visible_to(user).filter(status=Task.Status.ACTIVE, team__in=teams, unassigned=False)
        recent = files_visible_to(user).filter(purpose=File.Purpose.BATCH, team__in=teams, deleted_at=None)
        file.queryset = File.objects.filter(pk__in=list(recent.values_list("pk", flat=True)[:LISTED_FILES]))

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        if not data.get("items_file") and not data.get("upload") and "upload" not in self.errors:
            self.add_error("items_file", _("Choose a stored file, or upload one."))
        return data


class DecisionForm(HouseForm):
    decision = forms.ChoiceField(label=_("Decision"), choices=Pilot.Decision.choices)
    reason = forms.CharField(
        label=_("Reason"),
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=_("The next reader was not there."),
    )

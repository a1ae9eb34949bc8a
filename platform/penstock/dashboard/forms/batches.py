"""Forms of batches: the filter of the list, and uploading and starting one."""

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from penstock.accounts.access import has_role, teams_of
from penstock.accounts.models import User
from penstock.dashboard.forms.base import HouseForm
from penstock.registry.models import Task
from penstock.registry.selectors import tasks_visible_to
from penstock.serving.models import Batch
from penstock.serving.services.batches import RUNNERS


class BatchFilter(HouseForm):
    task = forms.ChoiceField(label=_("Task"), required=False)
    status = forms.ChoiceField(label=_("Status"), required=False)

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, auto_id="filter-%s", **kwargs)
        task, status = self.fields["task"], self.fields["status"]
        assert isinstance(task, forms.ChoiceField) and isinstance(status, forms.ChoiceField)
        task.choices = [("", _("All")), *((row.name, row.title) for row in tasks_visible_to(user))]
        status.choices = [("", _("Any")), ("unfinished", _("Not over yet")), *Batch.Status.choices]


class BatchForm(HouseForm):
    """A JSONL file and the active task that it runs as."""

    task = forms.ModelChoiceField(
        Task.objects.none(),
        label=_("Task"),
        empty_label=None,
        to_field_name="name",
        help_text=_("Lines that name no task of their own run as this one. Only active tasks are listed."),
    )
    file = forms.FileField(
        label=_("File of requests"),
        widget=forms.ClearableFileInput(attrs={"accept": ".jsonl,.ndjson,.txt,application/jsonl"}),
        help_text=_(
            "JSONL: a line is a request in the form of OpenAI's Batch API, or a record, which the task's prompt "
            "template turns into one."
        ),
    )
    description = forms.CharField(
        label=_("Note"), required=False, max_length=300, help_text=_("Kept with the batch, for whoever looks later.")
    )
    service_fields = {"input_file_id": "file", "purpose": "file", "metadata": "description"}

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        teams = [team.pk for team in teams_of(user) if has_role(user, team, *RUNNERS)]
        task = self.fields["task"]
        assert isinstance(task, forms.ModelChoiceField)
        task.queryset = tasks_visible_to(user).filter(status=Task.Status.ACTIVE, team__in=teams, unassigned=False)

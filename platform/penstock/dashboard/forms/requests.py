"""The filters of the list of requests: every figure elsewhere leads to one setting of them."""

import datetime as dt
from typing import Any

from django import forms
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from penstock.accounts.models import User
from penstock.dashboard.forms.base import HouseForm
from penstock.registry.selectors import tasks_visible_to
from penstock.serving.models import Request

YES_NO = (("", _("Any")), ("yes", _("Yes")), ("no", _("No")))
WINDOWS = (
    ("", _("All time")),
    ("1", _("Last 24 hours")),
    ("7", _("Last 7 days")),
    ("30", _("Last 30 days")),
    ("90", _("Last 90 days")),
)


class RequestFilter(HouseForm):
    """`group` is `key:value`, as in `language:zh-Hant`; `since` and `until` are RFC 3339 times."""

    task = forms.ChoiceField(label=_("Task"), required=False)
    status = forms.ChoiceField(label=_("Status"), required=False)
    valid = forms.ChoiceField(label=_("Valid"), required=False, choices=YES_NO)
    group = forms.CharField(
        label=_("Group"), required=False, widget=forms.TextInput(attrs={"placeholder": "language:zh-Hant"})
    )
    days = forms.CharField(label=_("Finished"), required=False, widget=forms.Select(choices=WINDOWS))
    batch = forms.CharField(label=_("Batch"), required=False, widget=forms.TextInput(attrs={"placeholder": "batch_…"}))
    error_code = forms.CharField(label=_("Error code"), required=False)
    refused = forms.ChoiceField(label=_("Refused"), required=False, choices=YES_NO)
    truncated = forms.ChoiceField(label=_("Truncated"), required=False, choices=YES_NO)
    release = forms.CharField(label=_("Model release"), required=False)
    since = forms.CharField(label=_("Finished since"), required=False)
    until = forms.CharField(label=_("Finished before"), required=False)

    FIRST = ("task", "status", "valid", "group", "days", "batch")
    MORE = ("error_code", "refused", "truncated", "release", "since", "until")

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, auto_id="filter-%s", **kwargs)
        task, status = self.fields["task"], self.fields["status"]
        assert isinstance(task, forms.ChoiceField) and isinstance(status, forms.ChoiceField)
        task.choices = [("", _("All")), *((row.name, row.title) for row in tasks_visible_to(user))]
        status.choices = [
            ("", _("Any")),
            ("finished", _("Finished")),
            ("errors", _("Failed or expired")),
            *Request.Status.choices,
        ]

    def first_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.FIRST]

    def more_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.MORE]

    @property
    def more_in_use(self) -> bool:
        return any(self.data.get(name) for name in self.MORE)

    def clean_group(self) -> tuple[str, str] | None:
        text: str = self.cleaned_data["group"].strip()
        if not text:
            return None
        key, separator, value = text.partition(":")
        if not separator or not key.strip():
            raise forms.ValidationError(_("Write a key and a value, such as language:zh-Hant."))
        return key.strip(), value.strip()

    def clean_days(self) -> int | None:
        text: str = self.cleaned_data["days"].strip()
        if not text:
            return None
        if not text.isdecimal() or not 1 <= int(text) <= 36_500:
            raise forms.ValidationError(_("A whole number of days."))
        return int(text)

    def clean_since(self) -> dt.datetime | None:
        return self._moment("since")

    def clean_until(self) -> dt.datetime | None:
        return self._moment("until")

    def _moment(self, name: str) -> dt.datetime | None:
        # A plus sign in a query string arrives as a space.
        text: str = self.cleaned_data[name].strip().replace(" ", "+")
        if not text:
            return None
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError as error:
            raise forms.ValidationError(_("Write a time such as 2026-11-30T14:00:00Z.")) from error
        return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)

    def apply(self, rows: QuerySet[Request]) -> QuerySet[Request]:
        """The rows that the filters let through; none where a filter is not valid."""
        if not self.is_valid():
            return rows.none()
        data = self.cleaned_data
        if data["task"]:
            rows = rows.filter(task__name=data["task"])
        if data["status"] == "finished":
            rows = rows.filter(status__in=Request.FINISHED)
        elif data["status"] == "errors":
            rows = rows.filter(status__in=[Request.Status.FAILED, Request.Status.EXPIRED])
        elif data["status"]:
            rows = rows.filter(status=data["status"])
        for name in ("valid", "refused", "truncated"):
            if data[name]:
                rows = rows.filter(**{name: data[name] == "yes"})
        if data["group"]:
            key, value = data["group"]
            rows = rows.filter(groups__contains={key: value}) if value else rows.exclude(groups__has_key=key)
        if data["batch"]:
            rows = rows.filter(batch_id=data["batch"].strip())
        if data["error_code"]:
            rows = rows.filter(error_code=data["error_code"].strip())
        if data["release"]:
            rows = rows.filter(model_release__name=data["release"].strip())
        if data["days"]:
            rows = rows.filter(finished_at__gte=timezone.now() - dt.timedelta(days=data["days"]))
        if data["since"]:
            rows = rows.filter(finished_at__gte=data["since"])
        if data["until"]:
            rows = rows.filter(finished_at__lt=data["until"])
        return rows

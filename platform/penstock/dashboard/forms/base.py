"""What the dashboard's forms share: how an error of a service finds its field."""

from collections.abc import Mapping
from typing import Any

from django import forms
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError


class HouseForm(forms.Form):
    """`service_fields` says which field an error belongs to that a service calls otherwise."""

    service_fields: Mapping[str, str] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("label_suffix", "")
        super().__init__(*args, **kwargs)

    def field_for(self, name: str, problem: str) -> tuple[str, str]:
        """The field that a service's error on `name` belongs to, and the error as it reads there."""
        return self.service_fields.get(name, name), problem


def add_service_errors(form: forms.BaseForm, error: ValidationError) -> None:
    """Puts each error beside its field; above the form, with the name in front, what has no field here."""
    by_field = error.message_dict if hasattr(error, "error_dict") else {NON_FIELD_ERRORS: error.messages}
    for name, problems in by_field.items():
        for problem in problems:
            field, text = form.field_for(name, problem) if isinstance(form, HouseForm) else (name, problem)
            if field in form.fields:
                form.add_error(field, text)
            else:
                form.add_error(None, text if name == NON_FIELD_ERRORS else f"{name}: {text}")


class ReasonForm(HouseForm):
    """Confirms a consequential act, with a reason for the record."""

    reason = forms.CharField(required=False, max_length=500, widget=forms.Textarea(attrs={"rows": 2}))


class ConfirmForm(HouseForm):
    """Confirms an act that needs no reason."""

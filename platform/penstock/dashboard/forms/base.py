"""What the dashboard's forms share: how an error of a service finds its field."""

from collections.abc import Mapping
from typing import Any

from django import forms
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError


class HouseForm(forms.Form):
    """Errors of a service go beside the field that `service_fields` names for them, or above the form."""

    service_fields: Mapping[str, str] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("label_suffix", "")
        super().__init__(*args, **kwargs)

    def add_service_errors(self, error: ValidationError) -> None:
        by_field = error.message_dict if hasattr(error, "error_dict") else {NON_FIELD_ERRORS: error.messages}
        for name, problems in by_field.items():
            field = self.service_fields.get(name, name)
            for problem in problems:
                if field in self.fields:
                    self.add_error(field, problem)
                else:
                    self.add_error(None, problem if name == NON_FIELD_ERRORS else f"{name}: {problem}")


class ReasonForm(HouseForm):
    """Confirms a consequential act, with a reason for the record."""

    reason = forms.CharField(required=False, max_length=500, widget=forms.Textarea(attrs={"rows": 2}))


class ConfirmForm(HouseForm):
    """Confirms an act that needs no reason."""

"""The way of every consequential act on a page: asked about first, done by a service, told afterwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from penstock.dashboard.forms.base import ConfirmForm, HouseForm, add_service_errors
from penstock.registry.transitions import TransitionError
from penstock.serving.rejection import Rejected

Crumbs = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Act:
    """What the confirmation says and does. `perform` gets the form's data and returns what to tell afterwards."""

    heading: str
    consequences: Sequence[str]
    button: str
    crumbs: Crumbs
    back: str
    perform: Callable[[Mapping[str, Any]], str]
    form: type[HouseForm] = ConfirmForm
    labels: Mapping[str, str] = field(default_factory=dict)
    dangerous: bool = False


def confirm(request: HttpRequest, act: Act) -> HttpResponse:
    """GET asks; POST performs and goes back, or shows beside the form why it could not be done."""
    form = act.form(request.POST if request.method == "POST" else None)
    for name, label in act.labels.items():
        form.fields[name].label = label
    if request.method == "POST" and form.is_valid():
        try:
            told = act.perform(form.cleaned_data)
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(request, told)
            return redirect(act.back)
    context = {
        "heading": act.heading,
        "consequences": act.consequences,
        "button": act.button,
        "crumbs": act.crumbs,
        "back": act.back,
        "dangerous": act.dangerous,
        "form": form,
    }
    return render(request, "dashboard/confirm.html", context, status=400 if form.errors else 200)


REFUSALS = (ValidationError, TransitionError, Rejected)


def refuse(form: forms.BaseForm, error: Exception) -> None:
    """Puts a service's refusal beside the form's field it is about, or above the form."""
    if isinstance(error, ValidationError):
        add_service_errors(form, error)
    elif isinstance(error, Rejected):
        for refusal in (error, *error.further):
            param = refusal.param or ""
            name = form.service_fields.get(param, param) if isinstance(form, HouseForm) else param
            form.add_error(name if name in form.fields else None, str(refusal))
    else:
        form.add_error(None, str(error))

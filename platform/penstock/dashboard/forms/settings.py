"""Forms of the settings pages: rate card, keys, people."""

import datetime as dt
from typing import Any

from django import forms
from django.forms.models import fields_for_model
from django.utils.translation import gettext_lazy as _

from penstock.accounts.access import has_role, teams_of
from penstock.accounts.models import Role, Team, User
from penstock.dashboard.forms.base import HouseForm
from penstock.registry.selectors import tasks_visible_to
from penstock.telemetry.models import RateCard
from penstock.telemetry.rates import FIELDS


class RateCardForm(HouseForm):
    """The rates in force, with the model's fields; the service checks them and keeps them as a new card."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields.update(fields_for_model(RateCard, fields=FIELDS))
        self.fields["hardware_price"].help_text = _("What the host cost, new, in the currency above.")
        self.fields["power_watts"].help_text = _("Measured at the wall while a batch runs, if you can.")
        self.fields["electricity_price_per_kwh"].help_text = _("In the currency above.")
        self.fields["carbon_kg_per_kwh"].help_text = _("Of your grid; your supplier or the authority publishes it.")


class KeyForm(HouseForm):
    """A new API key."""

    name = forms.CharField(label=_("Name"), max_length=120, help_text=_("Which program uses it, and where."))
    team = forms.ModelChoiceField(Team.objects.none(), label=_("Team"), empty_label=None)
    task_name = forms.ChoiceField(
        label=_("Task"), required=False, help_text=_("Requests that name no task count for this one.")
    )
    expires_on = forms.DateField(
        label=_("Expires on"),
        required=False,
        widget=forms.DateInput(attrs={"type": "date"}),
        help_text=_("Empty: it stays valid until it is revoked."),
    )
    service_fields = {"expires_at": "expires_on"}

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        makers = (Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER)
        teams = [team.pk for team in teams_of(user) if has_role(user, team, *makers)]
        team = self.fields["team"]
        assert isinstance(team, forms.ModelChoiceField)
        team.queryset = Team.objects.filter(pk__in=teams)
        task = self.fields["task_name"]
        assert isinstance(task, forms.ChoiceField)
        tasks = tasks_visible_to(user).filter(team__in=teams, unassigned=False)
        task.choices = [("", _("None")), *((row.name, row.title) for row in tasks)]

    def expires_at(self) -> dt.datetime | None:
        """The end of the chosen day, UTC."""
        day: dt.date | None = self.cleaned_data["expires_on"]
        return None if day is None else dt.datetime.combine(day, dt.time(23, 59, 59), tzinfo=dt.UTC)


class PersonForm(HouseForm):
    """A new person."""

    username = forms.CharField(label=_("Name for signing in"), max_length=150)
    first_name = forms.CharField(label=_("Given name"), max_length=150, required=False)
    last_name = forms.CharField(label=_("Family name"), max_length=150, required=False)
    email = forms.EmailField(label=_("E-mail"), required=False)
    password = forms.CharField(
        label=_("First password"),
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text=_("At least 12 characters. Give it to the person; they change it after signing in."),
    )
    team = forms.ModelChoiceField(Team.objects.none(), label=_("Team"), required=False, empty_label=_("None yet"))
    role = forms.ChoiceField(label=_("Role"), choices=Role.choices, initial=Role.OPERATOR)
    administrator = forms.BooleanField(label=_("Administers the whole installation"), required=False)

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        team = self.fields["team"]
        assert isinstance(team, forms.ModelChoiceField)
        team.queryset = teams_of(user)


class RoleForm(HouseForm):
    """A role of a person in a team."""

    team = forms.ModelChoiceField(Team.objects.none(), label=_("Team"), empty_label=None)
    role = forms.ChoiceField(label=_("Role"), choices=Role.choices)

    def __init__(self, *args: Any, user: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        team = self.fields["team"]
        assert isinstance(team, forms.ModelChoiceField)
        teams = [row.pk for row in teams_of(user) if has_role(user, row, Role.ADMINISTRATOR)]
        team.queryset = Team.objects.filter(pk__in=teams)


class TeamForm(HouseForm):
    """A new team."""

    name = forms.CharField(label=_("Name"), max_length=120)
    slug = forms.SlugField(label=_("Short name"), max_length=60, help_text=_("Lower-case letters, digits and hyphens."))


class PasswordForm(HouseForm):
    """One's own new password."""

    current = forms.CharField(
        label=_("Present password"), widget=forms.PasswordInput(attrs={"autocomplete": "current-password"})
    )
    password = forms.CharField(
        label=_("New password"),
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text=_("At least 12 characters."),
    )

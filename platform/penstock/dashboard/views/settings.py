"""Settings: what an hour costs, which programs hold keys, who the people are."""

from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from penstock.accounts import services
from penstock.accounts.access import has_role, is_administrator
from penstock.accounts.models import Role
from penstock.accounts.selectors import keys_visible_to, people_visible_to, teams_visible_to
from penstock.dashboard.access import viewer
from penstock.dashboard.acts import REFUSALS, Act, confirm, refuse
from penstock.dashboard.forms.settings import (
    KeyForm,
    PasswordForm,
    PersonForm,
    RateCardForm,
    RoleForm,
    TeamForm,
)
from penstock.telemetry.models import RateCard
from penstock.telemetry.rates import (
    FIELDS,
    current_rate_card,
    hardware_cost_per_second,
    host_cost_per_second,
    power_cost_per_second,
    set_rate_card,
)

SECONDS_AN_HOUR = 3600


def rates(request: HttpRequest) -> HttpResponse:
    """The card in force, what an hour costs by it, and the form that puts another in force."""
    user = viewer(request)
    card = current_rate_card()
    may_change = has_role(user, None, Role.OPERATOR, Role.PILOT_MANAGER, Role.ADMINISTRATOR)
    # A copy: a model form writes what was typed into its instance, and the page shows the card that is in force.
    form = RateCardForm(
        request.POST if request.method == "POST" else None, initial={name: getattr(card, name) for name in FIELDS}
    )
    if request.method == "POST" and form.is_valid():
        try:
            set_rate_card(user=user, **{name: form.cleaned_data[name] for name in FIELDS})
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(request, _("In force. Figures recorded before keep the rates they were reckoned with."))
            return redirect("dashboard:rates")
    context = {
        "card": card,
        "form": form,
        "may_change": may_change,
        "hour": host_cost_per_second(card) * SECONDS_AN_HOUR,
        "hour_hardware": hardware_cost_per_second(card) * SECONDS_AN_HOUR,
        "hour_power": power_cost_per_second(card) * SECONDS_AN_HOUR,
        "is_example": card.created_by == "system",
        "cards": RateCard.objects.all()[:20],
    }
    return render(request, "dashboard/settings/rates.html", context, status=400 if form.errors else 200)


@require_safe
def keys(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    rows = [
        (key, key.revoked_at is None and (key.user_id == user.pk or has_role(user, key.team, Role.ADMINISTRATOR)))
        for key in keys_visible_to(user)
    ]
    context = {
        "rows": rows,
        "now": timezone.now(),
        "may_create": has_role(user, None, Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER),
        "base_url": request.build_absolute_uri("/v1"),
    }
    return render(request, "dashboard/settings/keys.html", context)


@never_cache
def create_key(request: HttpRequest) -> HttpResponse:
    """The key itself stands on the answer to this POST and nowhere else, ever."""
    user = viewer(request)
    form = KeyForm(request.POST if request.method == "POST" else None, user=user)
    crumbs = ((_("API keys"), reverse("dashboard:keys")), (_("New key"), ""))
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        try:
            key, secret = services.create_key(
                user=user,
                team=data["team"],
                name=data["name"],
                task_name=data["task_name"],
                expires_at=form.expires_at(),
            )
        except REFUSALS as error:
            refuse(form, error)
        else:
            context = {
                "key": key,
                "secret": secret,
                "crumbs": crumbs,
                "base_url": request.build_absolute_uri("/v1"),
            }
            return render(request, "dashboard/settings/key_made.html", context)
    context = {"form": form, "crumbs": crumbs}
    return render(request, "dashboard/settings/key_form.html", context, status=400 if form.errors else 200)


def revoke_key(request: HttpRequest, prefix: str) -> HttpResponse:
    user = viewer(request)
    key = get_object_or_404(keys_visible_to(user), prefix=prefix)
    back = reverse("dashboard:keys")

    def perform(data: object) -> str:
        services.revoke_key(user=user, key=key)
        return _("Revoked: “%(name)s” opens nothing any more.") % {"name": key.name}

    return confirm(
        request,
        Act(
            heading=_("Revoke the key “%(name)s”") % {"name": key.name},
            consequences=[
                _("Programs that use pk_%(prefix)s… get 401 from the next request on. It cannot be taken back.")
                % {"prefix": key.prefix}
            ],
            button=_("Revoke"),
            crumbs=((_("API keys"), back), (key.name, "")),
            back=back,
            perform=perform,
            dangerous=True,
        ),
    )


@require_safe
def people(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    context = {
        "rows": people_visible_to(user).prefetch_related("memberships__team").order_by("username"),
        "teams": teams_visible_to(user),
        "may_add": is_administrator(user),
        "may_grant": has_role(user, None, Role.ADMINISTRATOR),
        "roles": [(role.label, MEANINGS[role]()) for role in Role],
    }
    return render(request, "dashboard/settings/people.html", context)


MEANINGS = {
    Role.OPERATOR: lambda: _("registers tasks, runs batches, makes keys"),
    Role.TASK_OWNER: lambda: _("answers for a task: edits, submits, runs and retires it"),
    Role.APPROVER: lambda: _("approves model releases, activates tasks"),
    Role.AUDITOR: lambda: _("reads everything of the team, changes nothing, exports evidence"),
    Role.PILOT_MANAGER: lambda: _("runs pilots and proves, or disproves, their return"),
    Role.ADMINISTRATOR: lambda: _("gives roles, and may do all of the above"),
}


def create_person(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    form = PersonForm(request.POST if request.method == "POST" else None, user=user)
    if request.method == "POST" and form.is_valid():
        data = dict(form.cleaned_data)
        team, role = data.pop("team"), data.pop("role")
        try:
            with transaction.atomic():
                person = services.create_person(actor=user, **data)
                if team is not None:
                    services.grant_role(actor=user, user=person, team=team, role=Role(role))
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(request, _("%(name)s can sign in now.") % {"name": person.username})
            return redirect("dashboard:people")
    crumbs = ((_("People"), reverse("dashboard:people")), (_("New person"), ""))
    context = {"form": form, "crumbs": crumbs, "heading": _("New person"), "button": _("Add the person")}
    return render(request, "dashboard/settings/form.html", context, status=400 if form.errors else 200)


def grant_role(request: HttpRequest, username: str) -> HttpResponse:
    user = viewer(request)
    person = get_object_or_404(people_visible_to(user), username=username)
    form = RoleForm(request.POST if request.method == "POST" else None, user=user)
    if request.method == "POST" and form.is_valid():
        team, role = form.cleaned_data["team"], Role(form.cleaned_data["role"])
        try:
            if request.POST.get("take") == "yes":
                services.revoke_role(actor=user, user=person, team=team, role=role)
                told = _("%(name)s no longer has the role %(role)s in %(team)s.")
            else:
                services.grant_role(actor=user, user=person, team=team, role=role)
                told = _("%(name)s has the role %(role)s in %(team)s now.")
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(request, told % {"name": person.username, "role": role.label, "team": team.name})
            return redirect("dashboard:people")
    crumbs = ((_("People"), reverse("dashboard:people")), (person.username, ""))
    context = {
        "form": form,
        "person": person,
        "memberships": person.memberships.filter(team__in=teams_visible_to(user)).select_related("team"),
        "crumbs": crumbs,
    }
    return render(request, "dashboard/settings/role_form.html", context, status=400 if form.errors else 200)


def create_team(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    form = TeamForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            team = services.create_team(actor=user, **form.cleaned_data)
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(request, _("The team “%(name)s” exists now.") % {"name": team.name})
            return redirect("dashboard:people")
    crumbs = ((_("People"), reverse("dashboard:people")), (_("New team"), ""))
    context = {"form": form, "crumbs": crumbs, "heading": _("New team"), "button": _("Add the team")}
    return render(request, "dashboard/settings/form.html", context, status=400 if form.errors else 200)


def change_password(request: HttpRequest) -> HttpResponse:
    """One's own password."""
    user = viewer(request)
    form = PasswordForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        if not user.check_password(form.cleaned_data["current"]):
            form.add_error("current", _("This is not your present password."))
        else:
            try:
                services.set_password(actor=user, user=user, password=form.cleaned_data["password"])
            except REFUSALS as error:
                refuse(form, error)
            else:
                update_session_auth_hash(request, user)
                messages.success(request, _("Your password is changed."))
                return redirect("dashboard:people")
    crumbs = ((_("People"), reverse("dashboard:people")), (_("Change my password"), ""))
    context = {"form": form, "crumbs": crumbs, "heading": _("Change my password"), "button": _("Change it")}
    return render(request, "dashboard/settings/form.html", context, status=400 if form.errors else 200)

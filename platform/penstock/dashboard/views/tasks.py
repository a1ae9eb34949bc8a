"""Tasks: the list, one task with what is known about it, creating, changing and moving it on."""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from django.contrib import messages
from django.db.models import Count, Max
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from penstock.accounts.access import has_role
from penstock.accounts.models import Role, User
from penstock.dashboard.access import viewer
from penstock.dashboard.acts import REFUSALS, Act, confirm, refuse
from penstock.dashboard.evidence_bundle import bundle
from penstock.dashboard.forms.base import ReasonForm
from penstock.dashboard.forms.tasks import TaskForm, objective_label
from penstock.dashboard.history import history
from penstock.registry import services
from penstock.registry.models import ModelRelease, Task
from penstock.registry.selectors import (
    releases_visible_to,
    task_versions_visible_to,
    tasks_visible_to,
    transitions_open_to,
)
from penstock.serving.models import Request
from penstock.serving.selectors import batches_visible_to, progress, requests_visible_to
from penstock.telemetry.evidence import EXPORTERS
from penstock.telemetry.objectives import judge
from penstock.telemetry.rates import current_rate_card
from penstock.telemetry.summary import summarize

WINDOW_DAYS = 30


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    tasks = tasks_visible_to(user).annotate(batch_count=Count("batches"), last_batch_at=Max("batches__created_at"))
    status = request.GET.get("status", "")
    if status in Task.Status.values:
        tasks = tasks.filter(status=status)
    context = {
        "tasks": tasks,
        "status": status,
        "statuses": Task.Status.choices,
        "may_create": has_role(user, None, Role.OPERATOR, Role.TASK_OWNER),
        "has_release": releases_visible_to(user).exclude(status=ModelRelease.Status.WITHDRAWN).exists(),
    }
    return render(request, "dashboard/tasks/index.html", context)


@require_safe
def detail(request: HttpRequest, name: str) -> HttpResponse:
    user = viewer(request)
    task = get_object_or_404(tasks_visible_to(user), name=name)
    requests = requests_visible_to(user).filter(task=task)
    since = timezone.now() - dt.timedelta(days=WINDOW_DAYS)
    recent = requests.filter(status__in=Request.FINISHED, finished_at__gte=since)
    month = timezone.now().astimezone(dt.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    context = {
        "task": task,
        "summary": summarize(recent, per="active"),
        "month": summarize(requests.filter(finished_at__gte=month), per="active") if task.budget_amount else None,
        "window_days": WINDOW_DAYS,
        "objectives": [(objective_label(row.objective.metric), row) for row in judge(task=task, requests=recent)],
        "contract": contract_lines(task),
        "versions": task_versions_visible_to(user).filter(task=task)[:20],
        "batch_rows": [
            (batch, progress(batch))
            for batch in batches_visible_to(user).filter(task=task).select_related("input_file")[:8]
        ],
        "history": history(task.name),
        "transitions": [(act, STEPS[act].label()) for act in transitions_open_to(user, task)],
        "may_export": has_role(user, task.team, *EXPORTERS),
        "may_edit": may_edit(user, task),
        "may_run": task.status == Task.Status.ACTIVE and has_role(user, task.team, *RUNNERS),
    }
    return render(request, "dashboard/tasks/detail.html", context)


RUNNERS = (Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER)


def may_edit(user: User, task: Task) -> bool:
    editors = (Role.OPERATOR, Role.TASK_OWNER, Role.APPROVER)
    return task.status != Task.Status.RETIRED and has_role(user, task.team, *editors)


def contract_lines(task: Task) -> list[tuple[str, str]]:
    """The output contract as rows that a person reads."""
    contract = task.output_contract
    lines: list[tuple[str, str]] = []
    if contract.get("language_from"):
        lines.append((_("Language"), _("as the request's “%(key)s” says") % {"key": contract["language_from"]}))
    if contract.get("min_characters"):
        lines.append((_("Length, at least"), _("%(n)d characters") % {"n": contract["min_characters"]}))
    if contract.get("max_characters"):
        lines.append((_("Length, at most"), _("%(n)d characters") % {"n": contract["max_characters"]}))
    if contract.get("must_be_json"):
        lines.append((_("Form"), _("one JSON text")))
    if contract.get("json_schema"):
        lines.append((_("JSON schema"), contract["json_schema"]))
    if contract.get("repetition_limit"):
        lines.append((_("Repetition"), _("at most %(n).0f %%") % {"n": contract["repetition_limit"] * 100}))
    if contract.get("copy_limit"):
        lines.append((_("Copied from the prompt"), _("at most %(n).0f %%") % {"n": contract["copy_limit"] * 100}))
    if contract.get("forbidden_phrases"):
        lines.append((_("Forbidden phrases"), ", ".join(contract["forbidden_phrases"])))
    lines.append((_("Refusal"), _("can be right") if contract.get("allow_refusal") else _("counts as not valid")))
    known = {"language_from", "min_characters", "max_characters", "must_be_json", "repetition_limit"}
    known |= {"json_schema", "forbidden_phrases", "allow_refusal", "copy_limit"}
    lines += [(key, str(value)) for key, value in contract.items() if key not in known]
    return lines if contract else []


def create(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    form = TaskForm(
        request.POST if request.method == "POST" else None, user=user, currency=current_rate_card().currency
    )
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        try:
            task = services.create_task(user=user, team=data["team"], name=data["name"], **form.content())
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(
                request,
                _("“%(title)s” is a draft now. Submit it, and an approver can activate it.") % {"title": task.title},
            )
            return redirect("dashboard:task", name=task.name)
    context = {"form": form, "crumbs": ((_("Tasks"), reverse("dashboard:tasks")), (_("New task"), ""))}
    return render(request, "dashboard/tasks/form.html", context, status=400 if form.errors else 200)


def edit(request: HttpRequest, name: str) -> HttpResponse:
    user = viewer(request)
    task = get_object_or_404(tasks_visible_to(user), name=name)
    form = TaskForm(
        request.POST if request.method == "POST" else None,
        user=user,
        task=task,
        currency=current_rate_card().currency,
    )
    if request.method == "POST" and form.is_valid():
        try:
            changed = services.update_task(user=user, task=task, **form.content())
        except REFUSALS as error:
            refuse(form, error)
        else:
            if changed.version == task.version:
                messages.info(request, _("Nothing was different, so there is no new version."))
            else:
                messages.success(request, _("Saved as version %(n)d.") % {"n": changed.version})
            return redirect("dashboard:task", name=task.name)
    crumbs = (
        (_("Tasks"), reverse("dashboard:tasks")),
        (task.title, reverse("dashboard:task", args=[task.name])),
        (_("Edit"), ""),
    )
    context = {"form": form, "task": task, "crumbs": crumbs}
    return render(request, "dashboard/tasks/form.html", context, status=400 if form.errors else 200)


class TaskService(Protocol):
    def __call__(self, *, user: User, task: Task, reason: str) -> Task: ...


@dataclass(frozen=True, slots=True)
class Step:
    """A change of state: its button, what it means, what is told afterwards, its service."""

    label: Callable[[], str]
    meaning: Callable[[], str]
    told: Callable[[], str]
    service: TaskService


STEPS: dict[str, Step] = {
    "submit": Step(
        lambda: _("Submit"),
        lambda: _("An approver then decides whether it may run. A later change takes it back to draft."),
        lambda: _("Submitted: an approver can activate it now."),
        services.submit_task,
    ),
    "activate": Step(
        lambda: _("Activate"),
        lambda: _("Programs and people of the team can then run it. Your name and the reason go into the ledger."),
        lambda: _("Active: requests are taken now."),
        services.activate_task,
    ),
    "suspend": Step(
        lambda: _("Suspend"),
        lambda: _("It takes no new requests until an approver activates it again. Batches that run already go on."),
        lambda: _("Suspended: no new requests are taken."),
        services.suspend_task,
    ),
    "retire": Step(
        lambda: _("Retire"),
        lambda: _("It ends for good and cannot be changed or activated again. All records stay."),
        lambda: _("Retired."),
        services.retire_task,
    ),
}


def act(request: HttpRequest, name: str, act: str) -> HttpResponse:
    """Submit, activate, suspend or retire, after asking."""
    user = viewer(request)
    task = get_object_or_404(tasks_visible_to(user), name=name)
    if act not in STEPS:
        raise Http404
    step = STEPS[act]
    label = step.label()
    here = reverse("dashboard:task", args=[task.name])

    def perform(data: object) -> str:
        assert isinstance(data, dict)
        step.service(user=user, task=task, reason=data["reason"])
        return step.told()

    return confirm(
        request,
        Act(
            heading=_("%(act)s: %(title)s") % {"act": label, "title": task.title},
            consequences=[step.meaning()],
            button=label,
            crumbs=((_("Tasks"), reverse("dashboard:tasks")), (task.title, here), (label, "")),
            back=here,
            perform=perform,
            form=ReasonForm,
            labels={"reason": _("Reason, for the record")},
            dangerous=act in ("suspend", "retire"),
        ),
    )


@require_POST
def export(request: HttpRequest, name: str) -> HttpResponseBase:
    """The task's evidence as a bundle that verifies offline."""
    user = viewer(request)
    task = get_object_or_404(tasks_visible_to(user), name=name)
    return bundle(user=user, filename=f"evidence-{task.name}.zip", task=task)

"""Fairness of service: every task's verdicts, one task's groups, its thresholds."""

from dataclasses import replace

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe
from pydantic import ValidationError as PlanError

from governance.fairness import outcomes
from governance.fairness.wording import explain, favourable_label
from penstock.accounts.access import has_role
from penstock.accounts.models import Role
from penstock.dashboard import charts
from penstock.dashboard.access import viewer
from penstock.dashboard.acts import REFUSALS, refuse
from penstock.dashboard.forms.governance import ThresholdsForm
from penstock.registry.contracts import parse_fairness_plan
from penstock.registry.models import Task
from penstock.registry.selectors import tasks_visible_to
from penstock.serving.selectors import batches_visible_to
from penstock.telemetry.fairness import FairnessReport, fairness_report, set_thresholds

WINDOW_DAYS = 90


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    tasks = tasks_visible_to(user).exclude(status__in=[Task.Status.DRAFT, Task.Status.SUBMITTED])
    rows = [(task, fairness_report(user=user, task=task, window_days=WINDOW_DAYS)) for task in tasks]
    return render(request, "dashboard/fairness/index.html", {"rows": rows, "window_days": WINDOW_DAYS})


def detail(request: HttpRequest, name: str) -> HttpResponse:
    user = viewer(request)
    task = get_object_or_404(tasks_visible_to(user), name=name)
    batch_id = request.GET.get("batch", "")
    batch = get_object_or_404(batches_visible_to(user), pk=batch_id, task=task) if batch_id else None
    present = parse_fairness_plan(task.fairness_plan)
    form = ThresholdsForm(request.POST if request.method == "POST" else None, initial=present.model_dump())
    if request.method == "POST" and form.is_valid():
        try:
            set_thresholds(user=user, task=task, plan=form.plan(present))
        except PlanError as error:
            for problem in error.errors():
                field = str(problem["loc"][0]) if problem["loc"] else ""
                form.add_error(field if field in form.fields else None, problem["msg"])
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(
                request, _("Saved. The verdicts below are by the new thresholds; the change is in the ledger.")
            )
            return redirect("dashboard:fairness-task", name=task.name)
    report = fairness_report(user=user, task=task, batch=batch, window_days=WINDOW_DAYS)
    outcome = favourable_label(report.favourable)
    labelled = with_labels(report)
    context = {
        "task": task,
        "batch": batch,
        "plan": present,
        "report": report,
        "outcome": outcome,
        "sentences": [(group, explain(group, labelled)) for group in labelled.groups],
        "chart": charts.fairness(labelled, outcome=outcome),
        "batches": batches_visible_to(user).filter(task=task)[:12],
        "window_days": WINDOW_DAYS,
        "form": form,
        "may_change": task.status != Task.Status.RETIRED
        and has_role(user, task.team, Role.OPERATOR, Role.TASK_OWNER, Role.APPROVER),
        "crumbs": ((_("Fairness"), reverse("dashboard:fairness")), (task.title, "")),
    }
    return render(request, "dashboard/fairness/detail.html", context, status=400 if form.errors else 200)


def with_labels(report: FairnessReport) -> outcomes.FairnessReport:
    """The report with its groups called as people call them: Traditional Chinese instead of zh-Hant."""
    labels = {name: service.label for name, service in report.services.items()}
    return outcomes.FairnessReport(
        thresholds=report.thresholds,
        favourable=report.favourable,
        reference=labels.get(report.reference) if report.reference else None,
        groups=tuple(replace(group, group=labels[group.group]) for group in report.groups),
        count=report.count,
        without_group=report.without_group,
    )

"""The first page: what runs, what it costs, which promises are kept and what needs a look."""

import datetime as dt

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from governance.catalogs.loader import load_catalogs
from governance.controls.coverage import CoverageSummary, coverage_of_all
from governance.controls.coverage import summarize as count_controls
from governance.ledger import selectors as ledger
from penstock.accounts.access import has_role
from penstock.accounts.models import Role, User
from penstock.accounts.selectors import keys_visible_to
from penstock.dashboard import charts
from penstock.dashboard.access import viewer
from penstock.dashboard.forms.tasks import objective_label
from penstock.dashboard.scopes import scope_of
from penstock.dashboard.views.batches import UNFINISHED
from penstock.registry.models import ModelRelease, Task
from penstock.registry.selectors import releases_visible_to, tasks_visible_to
from penstock.serving.models import EngineHost, Request
from penstock.serving.selectors import batches_visible_to, engine_hosts, is_alive, progress, requests_visible_to
from penstock.telemetry.fairness import FairnessReport, fairness_report
from penstock.telemetry.objectives import ObjectiveResult, judge
from penstock.telemetry.summary import daily, summarize

WINDOW_DAYS = 30
SHOWN_TASKS = 20


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    now = timezone.now()
    month = now.astimezone(dt.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    finished = requests_visible_to(user).filter(status__in=Request.FINISHED)
    days = daily(user, days=WINDOW_DAYS)
    tasks = list(tasks_visible_to(user).filter(status=Task.Status.ACTIVE)[:SHOWN_TASKS])
    context = {
        **batch_table(user),
        "month": summarize(finished.filter(finished_at__gte=month), per="active"),
        "window": summarize(finished.filter(finished_at__gte=now - dt.timedelta(days=WINDOW_DAYS)), per="active"),
        "window_days": WINDOW_DAYS,
        "objectives": objectives(user, tasks, now),
        "fairness": fairness(user, tasks),
        "hosts": hosts(),
        "coverage": coverage(user, request.LANGUAGE_CODE, now),
        "checkpoint": ledger.latest_checkpoint(),
        "pending": ledger.pending_count(),
        "charts": [chart for chart in (charts.daily_tokens(days), charts.daily_cost(days)) if chart]
        if any(day.finished for day in days)
        else [],
        "steps": first_steps(user),
    }
    return render(request, "dashboard/overview.html", context)


@require_safe
def batches(request: HttpRequest) -> HttpResponse:
    """The part of the page that moves, by itself: it asks for no coverage and no figures of a month."""
    return render(request, "dashboard/overview_batches.html", batch_table(viewer(request)))


def batch_table(user: User) -> dict[str, object]:
    rows = batches_visible_to(user).select_related("task", "input_file")
    running = list(rows.filter(status__in=UNFINISHED)[:10])
    recent = list(rows.exclude(status__in=UNFINISHED)[:6])
    return {
        "running": running,
        "recent": recent,
        "batch_rows": [(batch, progress(batch)) for batch in (*running, *recent)],
    }


def objectives(user: User, tasks: list[Task], now: dt.datetime) -> list[tuple[Task, list[tuple[str, ObjectiveResult]]]]:
    since = now - dt.timedelta(days=WINDOW_DAYS)
    found = []
    for task in tasks:
        if not task.objectives:
            continue
        rows = requests_visible_to(user).filter(task=task, status__in=Request.FINISHED, finished_at__gte=since)
        judged = judge(task=task, requests=rows)
        found.append((task, [(objective_label(result.objective.metric), result) for result in judged]))
    return found


def fairness(user: User, tasks: list[Task]) -> list[tuple[Task, FairnessReport]]:
    """Tasks whose groups differ more than their thresholds allow."""
    reports = ((task, fairness_report(user=user, task=task)) for task in tasks if task.fairness_plan)
    return [(task, report) for task, report in reports if report.failing]


def hosts() -> list[tuple[EngineHost, bool]]:
    """Each host, and whether it reports."""
    return [(host, is_alive(host)) for host in engine_hosts()]


def coverage(user: User, language: str, now: dt.datetime) -> list[tuple[str, str, CoverageSummary]]:
    covered = coverage_of_all(scope=scope_of(user), window_days=90, now=now)
    catalogs = load_catalogs()
    return [(key, catalogs[key].title.in_language(language), count_controls(rows)) for key, rows in covered.items()]


def first_steps(user: User) -> list[tuple[str, bool]]:
    """Name and whether it is done, until everything is; then nothing."""
    steps = [
        ("release", releases_visible_to(user).filter(status=ModelRelease.Status.APPROVED).exists()),
        ("task", tasks_visible_to(user).filter(status=Task.Status.ACTIVE).exists()),
        ("batch", batches_visible_to(user).exists()),
        ("key", keys_visible_to(user).exists()),
    ]
    writer = has_role(user, None, Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER)
    return steps if writer and not all(done for name, done in steps if name != "key") else []

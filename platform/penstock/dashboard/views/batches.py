"""Batches: the list, starting one, one batch while it runs and after, its evidence."""

import datetime as dt

from django.contrib import messages
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from governance.ledger import selectors as ledger
from governance.ledger.events import REQUEST_FINISHED
from governance.ledger.services import ledger_key
from penstock.accounts.access import has_role
from penstock.dashboard import charts
from penstock.dashboard.access import viewer
from penstock.dashboard.acts import REFUSALS, Act, confirm, refuse
from penstock.dashboard.downloads import download
from penstock.dashboard.engine_runs import shown_of_batch
from penstock.dashboard.evidence_bundle import bundle
from penstock.dashboard.evidence_check import verify_requests
from penstock.dashboard.forms.batches import BatchFilter, BatchForm
from penstock.dashboard.history import history
from penstock.dashboard.paging import page_of
from penstock.registry.models import Task
from penstock.registry.selectors import tasks_visible_to
from penstock.serving.blobs import BlobMissing, open_blob
from penstock.serving.models import Batch, Request
from penstock.serving.records import endpoint_of, request_lines
from penstock.serving.selectors import (
    Progress,
    batches_visible_to,
    files_visible_to,
    hosts_loading,
    hosts_that_cannot_load,
    progress,
    requests_visible_to,
)
from penstock.serving.services import cancel_batch, create_batch, create_file
from penstock.serving.services.batches import RUNNERS
from penstock.telemetry.evidence import EXPORTERS
from penstock.telemetry.fairness import fairness_report
from penstock.telemetry.summary import summarize, timeline

LISTED_ERRORS = 100
UNFINISHED = [status for status in Batch.Status if status not in Batch.TERMINAL]
CANCELLABLE = (Batch.Status.VALIDATING, Batch.Status.IN_PROGRESS)
HTMX_STOP_POLLING = 286


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    form = BatchFilter(request.GET, user=user)
    rows = batches_visible_to(user)
    if form.is_valid():
        task, status = form.cleaned_data["task"], form.cleaned_data["status"]
        rows = rows.filter(task__name=task) if task else rows
        if status == "unfinished":
            rows = rows.filter(status__in=UNFINISHED)
        elif status:
            rows = rows.filter(status=status)
    else:
        rows = rows.none()
    page = page_of(request, rows.select_related("task", "input_file"))
    context = {
        "form": form,
        "page": page,
        "rows": [(batch, progress(batch)) for batch in page.rows],
        "filtered": any(request.GET.get(name) for name in form.fields),
        "may_run": has_role(user, None, *RUNNERS),
        "can_run": tasks_visible_to(user).filter(status=Task.Status.ACTIVE).exists(),
    }
    return render(request, "dashboard/batches/index.html", context)


def create(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    form = BatchForm(
        request.POST if request.method == "POST" else None,
        request.FILES if request.method == "POST" else None,
        user=user,
        initial={"task": request.GET.get("task")},
    )
    if request.method == "POST" and form.is_valid():
        task, upload = form.cleaned_data["task"], form.cleaned_data["file"]
        note = form.cleaned_data["description"]
        try:
            with transaction.atomic():
                file = create_file(
                    user=user,
                    team=task.team,
                    filename=upload.name,
                    purpose="batch",
                    chunks=request_lines(upload, task=task),
                )
                batch = create_batch(
                    user=user,
                    team=task.team,
                    input_file=file,
                    endpoint=endpoint_of(file),
                    metadata={"description": note} if note else None,
                    task=task,
                )
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(request, _("Started. Every line is checked first, then it runs."))
            return redirect("dashboard:batch", batch_id=batch.pk)
    crumbs = ((_("Batches"), reverse("dashboard:batches")), (_("New batch"), ""))
    context = {"form": form, "crumbs": crumbs, "has_tasks": form.fields["task"].queryset.exists()}  # type: ignore[attr-defined]
    return render(request, "dashboard/batches/form.html", context, status=400 if form.errors else 200)


@require_safe
def detail(request: HttpRequest, batch_id: str) -> HttpResponse:
    user = viewer(request)
    batch = get_object_or_404(
        batches_visible_to(user).select_related("task", "model_release", "input_file"), pk=batch_id
    )
    rows = requests_visible_to(user).filter(batch=batch)
    over = batch.status in Batch.TERMINAL
    leaves = ledger.entries(kind=REQUEST_FINISHED, batch=batch.pk)
    runs, of_the_batch = shown_of_batch(batch)
    report = fairness_report(user=user, task=batch.task, batch=batch) if over and batch.total else None
    context = {
        **live_context(batch),
        **chart_context(rows, over),
        "errors": validation_errors(batch),
        "row_errors": rows.filter(status__in=[Request.Status.FAILED, Request.Status.EXPIRED]).order_by("line")[
            :LISTED_ERRORS
        ],
        "listed_errors": LISTED_ERRORS,
        "summary": summarize(rows),
        "report": report,
        "leaf_count": leaves.count(),
        "checkpoint": ledger.latest_checkpoint(),
        "key": ledger_key().verifier,
        "history": history(batch.pk),
        "runs": runs,
        "runs_of_the_batch": of_the_batch,
        "may_export": has_role(user, batch.team, *EXPORTERS),
        "may_cancel": batch.status in CANCELLABLE and has_role(user, batch.team, *RUNNERS),
    }
    return render(request, "dashboard/batches/detail.html", context)


def validation_errors(batch: Batch) -> list[dict[str, object]]:
    found = batch.errors.get("data", []) if isinstance(batch.errors, dict) else (batch.errors or [])
    return list(found)


def live_context(batch: Batch) -> dict[str, object]:
    now = progress(batch)
    over = batch.status in Batch.TERMINAL
    end = ended_at(batch) or timezone.now()
    return {
        "batch": batch,
        "progress": now,
        "over": over,
        "done": now.finished,
        "elapsed_seconds": (end - (batch.in_progress_at or batch.created_at)).total_seconds(),
        "deadline_seconds": (batch.expires_at - timezone.now()).total_seconds(),
        "parts": progress_parts(now),
        "loading": [] if over else hosts_loading(batch.model_release),
        "trouble": [] if over else hosts_that_cannot_load(batch.model_release),
        "news": news(batch, now),
    }


def ended_at(batch: Batch) -> dt.datetime | None:
    return batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at


def progress_parts(now: Progress) -> list[tuple[str, str, int, float]]:
    """Style, label, count and width in per cent of each part of the bar."""
    parts = [
        ("succeeded", _("succeeded"), now.succeeded),
        ("failed", _("failed"), now.failed),
        ("over", _("expired or cancelled"), now.expired + now.cancelled),
        ("running", _("running"), now.running),
        ("queued", _("queued"), now.queued),
    ]
    return [(style, label, count, 100 * count / now.total if now.total else 0.0) for style, label, count in parts]


def news(batch: Batch, now: Progress) -> str:
    """How far it is, for a screen reader: changes at every tenth only."""
    if batch.status in Batch.TERMINAL:
        return _("The batch is over: %(status)s.") % {"status": batch.get_status_display()}
    if not now.total:
        return _("The batch is being checked.")
    return _("%(percent)d%% done.") % {"percent": 10 * (10 * now.finished // now.total)}


def chart_context(rows: QuerySet[Request], over: bool) -> dict[str, object]:
    points = timeline(rows, buckets=60)
    return {
        "throughput_chart": charts.throughput(points) if points else None,
        "cost_chart": charts.cost(points) if points else None,
        "over": over,
    }


@require_safe
def live(request: HttpRequest, batch_id: str) -> HttpResponse:
    """The part of the page that moves. Once the batch is over, the answer stops the polling and reloads the page."""
    batch = get_object_or_404(batches_visible_to(viewer(request)), pk=batch_id)
    response = render(request, "dashboard/batches/live.html", live_context(batch))
    if batch.status in Batch.TERMINAL:
        response.status_code = HTMX_STOP_POLLING
        response["HX-Refresh"] = "true"
    return response


@require_safe
def live_charts(request: HttpRequest, batch_id: str) -> HttpResponse:
    """The charts of a batch that runs."""
    user = viewer(request)
    batch = get_object_or_404(batches_visible_to(user), pk=batch_id)
    rows = requests_visible_to(user).filter(batch=batch)
    context = {"batch": batch, **chart_context(rows, batch.status in Batch.TERMINAL)}
    response = render(request, "dashboard/batches/charts.html", context)
    if batch.status in Batch.TERMINAL:
        response.status_code = HTMX_STOP_POLLING
    return response


def cancel(request: HttpRequest, batch_id: str) -> HttpResponse:
    user = viewer(request)
    batch = get_object_or_404(batches_visible_to(user), pk=batch_id)
    here = reverse("dashboard:batch", args=[batch.pk])

    def perform(data: object) -> str:
        cancel_batch(user=user, batch=batch)
        return _("Cancelling: what runs now still finishes, the rest does not start.")

    now = progress(batch)
    return confirm(
        request,
        Act(
            heading=_("Cancel this batch"),
            consequences=[
                _("%(n)d requests have not started and will not run. What is finished is kept and handed out.")
                % {"n": now.queued}
            ],
            button=_("Cancel the batch"),
            crumbs=((_("Batches"), reverse("dashboard:batches")), (batch.pk, here), (_("Cancel"), "")),
            back=here,
            perform=perform,
            dangerous=True,
        ),
    )


@require_POST
def verify(request: HttpRequest, batch_id: str) -> HttpResponse:
    """Verifies the batch's evidence now, and says what was checked."""
    user = viewer(request)
    batch = get_object_or_404(batches_visible_to(user), pk=batch_id)
    result = verify_requests(
        requests_visible_to(user).filter(batch=batch), ledger.entries(kind=REQUEST_FINISHED, batch=batch.pk)
    )
    context = {"result": result, "now": timezone.now()}
    if getattr(request, "htmx", False):
        return render(request, "dashboard/parts/verification.html", context)
    context |= {"back": reverse("dashboard:batch", args=[batch.pk]), "heading": batch.pk}
    return render(request, "dashboard/verification.html", context)


@require_POST
def export(request: HttpRequest, batch_id: str) -> HttpResponseBase:
    """The batch's evidence as a bundle that verifies offline."""
    user = viewer(request)
    batch = get_object_or_404(batches_visible_to(user), pk=batch_id)
    return bundle(user=user, filename=f"evidence-{batch.pk}.zip", batch=batch)


@require_safe
def file_content(request: HttpRequest, file_id: str) -> HttpResponseBase:
    """A stored file's content, to people of its team."""
    file = get_object_or_404(files_visible_to(viewer(request)), pk=file_id)
    try:
        stream = open_blob(file.sha256)
    except BlobMissing as error:
        raise Http404 from error
    return download(stream, filename=file.filename, size_bytes=file.size_bytes, content_type="application/jsonl")

"""Requests: the list that every figure leads to, and one request with its evidence."""

import json

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_POST, require_safe

from governance.ledger import selectors as ledger
from governance.ledger.events import REQUEST_FINISHED
from penstock.dashboard.access import viewer
from penstock.dashboard.evidence_check import verify_requests
from penstock.dashboard.forms.requests import RequestFilter
from penstock.dashboard.paging import page_of
from penstock.serving.models import Request
from penstock.serving.selectors import embedding_of, requests_visible_to
from penstock.telemetry.models import Usage


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    form = RequestFilter(request.GET, user=user)
    rows = form.apply(requests_visible_to(user).select_related("task", "model_release", "usage"))
    context = {
        "form": form,
        "page": page_of(request, rows, by_line=form.is_valid() and bool(form.cleaned_data["batch"])),
        "count": rows.count(),
        "filtered": any(value for key, value in request.GET.items() if key in form.fields),
    }
    return render(request, "dashboard/requests/index.html", context, status=400 if form.errors else 200)


@require_safe
def detail(request: HttpRequest, request_id: str) -> HttpResponse:
    user = viewer(request)
    row = get_object_or_404(
        requests_visible_to(user).select_related("task", "model_release", "batch", "api_key", "team"), pk=request_id
    )
    leaf = ledger.entries(kind=REQUEST_FINISHED, subject=row.pk).first()
    checkpoint = ledger.latest_checkpoint()
    proof = []
    if leaf is not None and checkpoint is not None and leaf.index < checkpoint.size:
        proof = ledger.inclusion_proof(index=leaf.index, size=checkpoint.size)
    crumbs = [(_("Requests"), reverse("dashboard:requests"))]
    if row.batch is not None:
        crumbs = [
            (_("Batches"), reverse("dashboard:batches")),
            (row.batch.pk, reverse("dashboard:batch", args=[row.batch.pk])),
        ]
    context = {
        "row": row,
        "turns": turns(row),
        "embedding": embedding_of(row),
        "sampling": {key: row.body[key] for key in SAMPLING if row.body.get(key) is not None},
        "usage": Usage.objects.filter(request=row).select_related("rate_card").first(),
        "leaf": leaf,
        "leaf_hash": bytes(leaf.leaf_hash).hex() if leaf else "",
        "entry": json.dumps(json.loads(leaf.canonical), indent=2, ensure_ascii=False) if leaf else "",
        "checkpoint": checkpoint,
        "proof": [node.hex() for node in proof],
        "crumbs": [*crumbs, (row.custom_id or row.pk, "")],
    }
    return render(request, "dashboard/requests/detail.html", context)


SAMPLING = (
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "response_format",
    "encoding_format", "dimensions",
)  # fmt: skip
SHOWN_INPUTS = 20


def turns(row: Request) -> list[tuple[str, str]]:
    """Who said what in the prompt."""
    names = {"system": _("System"), "user": _("User"), "assistant": _("Assistant"), "developer": _("Developer")}
    if "input" in row.body:
        return inputs(row.body["input"])
    if "messages" not in row.body:
        return [(_("Prompt"), str(row.body.get("prompt", "")))]
    found = []
    for message in row.body["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        found.append((names.get(message.get("role", ""), str(message.get("role", ""))), str(content or "")))
    return found


def inputs(given: object) -> list[tuple[str, str]]:
    """The texts of a request for embeddings, or their token ids."""
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    texts = [str(one) for one in given] if several and isinstance(given, list) else [str(given)]
    shown = [(_("Text %(n)d") % {"n": number}, text) for number, text in enumerate(texts[:SHOWN_INPUTS], start=1)]
    if len(texts) > SHOWN_INPUTS:
        more = len(texts) - SHOWN_INPUTS
        shown.append((_("And more"), ngettext("%(n)d further text", "%(n)d further texts", more) % {"n": more}))
    return shown


@require_POST
def verify(request: HttpRequest, request_id: str) -> HttpResponse:
    """Verifies this one request's evidence now."""
    user = viewer(request)
    row = get_object_or_404(requests_visible_to(user), pk=request_id)
    result = verify_requests(
        requests_visible_to(user).filter(pk=row.pk), ledger.entries(kind=REQUEST_FINISHED, subject=row.pk)
    )
    context = {"result": result, "now": timezone.now()}
    if getattr(request, "htmx", False):
        return render(request, "dashboard/parts/verification.html", context)
    context |= {"back": reverse("dashboard:request", args=[row.pk]), "heading": row.custom_id or row.pk}
    return render(request, "dashboard/verification.html", context)

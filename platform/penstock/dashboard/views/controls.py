"""Controls: what evidence stands behind each, and what the organization decided about it. No score, no verdict."""

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from governance.catalogs.loader import (
    Catalog,
    Control,
    UnknownCatalogError,
    UnknownControlError,
    get_catalog,
    load_catalogs,
)
from governance.controls.coverage import ControlCoverage, ControlState, coverage, coverage_of_all, summarize
from governance.controls.models import Applicability
from governance.controls.selectors import applicability_of, statement_rows
from governance.controls.services import set_applicability
from governance.exports.workbook import MEDIA_TYPE, control_matrix, statement_of_applicability
from penstock.accounts.access import has_role, require_role
from penstock.accounts.models import Role, User
from penstock.dashboard.access import viewer
from penstock.dashboard.acts import REFUSALS, refuse
from penstock.dashboard.forms.governance import ApplicabilityForm
from penstock.dashboard.history import history
from penstock.dashboard.scopes import scope_of

WINDOW_DAYS = 90
STATES = tuple(ControlState)


def catalog_or_404(catalog_id: str) -> Catalog:
    try:
        return get_catalog(catalog_id)
    except UnknownCatalogError as error:
        raise Http404 from error


def control_or_404(catalog: Catalog, control_id: str) -> Control:
    try:
        return catalog.control(control_id)
    except UnknownControlError as error:
        raise Http404 from error


def covered(user: User, catalog: Catalog) -> list[ControlCoverage]:
    return coverage(catalog_id=catalog.id, scope=scope_of(user), window_days=WINDOW_DAYS, now=timezone.now())


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    return redirect("dashboard:controls-catalog", catalog_id=next(iter(sorted(load_catalogs(), key=_iso_first))))


def _iso_first(catalog_id: str) -> tuple[bool, str]:
    return (not catalog_id.startswith("iso"), catalog_id)


@require_safe
def catalog(request: HttpRequest, catalog_id: str) -> HttpResponse:
    """The coverage page of a catalog."""
    user = viewer(request)
    chosen = catalog_or_404(catalog_id)
    language = request.LANGUAGE_CODE
    rows = covered(user, chosen)
    decisions = {row.control.id: row.decision for row in statement_rows(catalog_id=chosen.id)}
    state = request.GET.get("state", "")
    shown = [row for row in rows if row.state == state] if state in STATES else rows
    counts = {found: sum(1 for row in rows if row.state == found) for found in STATES}
    sections: list[tuple[str, list[dict[str, object]]]] = []
    for row in shown:
        heading = " · ".join(group.title.in_language(language) for group in row.groups)
        if not sections or sections[-1][0] != heading:
            sections.append((heading, []))
        sections[-1][1].append(
            {
                "coverage": row,
                "title": row.control.title.in_language(language),
                "text": row.control.text.in_language(language),
                "decision": decisions.get(row.control.id),
                "next_question": next((text.in_language(language) for text in row.next_questions), ""),
            }
        )
    context = {
        "catalogs": [
            (key, found.title.in_language(language))
            for key, found in sorted(load_catalogs().items(), key=lambda pair: _iso_first(pair[0]))
        ],
        "catalog": chosen,
        "title": chosen.title.in_language(language),
        "text_source": chosen.text_source.in_language(language),
        "summary": summarize(rows),
        "states": [(found, found.label, counts[found]) for found in STATES],
        "state": state,
        "sections": sections,
        "window_days": WINDOW_DAYS,
    }
    return render(request, "dashboard/controls/catalog.html", context)


def control(request: HttpRequest, catalog_id: str, control_id: str) -> HttpResponse:
    """One control: its evidence with where each figure comes from, and the decision about it."""
    user = viewer(request)
    chosen = catalog_or_404(catalog_id)
    wanted = control_or_404(chosen, control_id)
    decision = applicability_of(chosen.id, wanted.id)
    may_decide = has_role(user, None, Role.APPROVER)
    form = ApplicabilityForm(request.POST if request.method == "POST" else None, initial=initial_of(decision))
    if request.method == "POST":
        require_role(user, None, Role.APPROVER)
        if form.is_valid():
            try:
                set_applicability(catalog_id=chosen.id, control_id=wanted.id, actor=user.actor, **form.cleaned_data)
            except REFUSALS as error:
                refuse(form, error)
            else:
                messages.success(request, _("Saved; the decision's digest is in the ledger."))
                return redirect("dashboard:control", catalog_id=chosen.id, control_id=wanted.id)
    language = request.LANGUAGE_CODE
    row = next(row for row in covered(user, chosen) if row.control.id == wanted.id)
    context = {
        "catalog": chosen,
        "coverage": row,
        "title": wanted.title.in_language(language),
        "text": wanted.text.in_language(language),
        "groups": [group.title.in_language(language) for group in row.groups],
        "text_source": chosen.text_source.in_language(language),
        "items": [
            {
                "item": item,
                "title": item.definition.title.in_language(language),
                "shows": item.rule.shows.in_language(language),
                "next_question": item.rule.next_question.in_language(language),
            }
            for item in row.items
        ],
        "decision": decision,
        "form": form,
        "may_decide": may_decide,
        "history": history(f"control:{chosen.id}:{wanted.id}"),
        "window_days": WINDOW_DAYS,
        "crumbs": (
            (_("Controls"), reverse("dashboard:controls")),
            (chosen.title.in_language(language), reverse("dashboard:controls-catalog", args=[chosen.id])),
            (wanted.id, ""),
        ),
    }
    return render(request, "dashboard/controls/control.html", context, status=400 if form.errors else 200)


def initial_of(decision: Applicability | None) -> dict[str, object]:
    if decision is None:
        return {}
    names = ("justification", "origin", "implementation_status", "owner_name", "approver_name", "link")
    return {"applicable": "yes" if decision.applicable else "no", **{name: getattr(decision, name) for name in names}}


@require_safe
def matrix(request: HttpRequest) -> HttpResponse:
    """The control matrix of all catalogs as a workbook."""
    user = viewer(request)
    found = coverage_of_all(scope=scope_of(user), window_days=WINDOW_DAYS, now=timezone.now())
    return workbook(control_matrix(found, request.LANGUAGE_CODE), "control-matrix.xlsx")


@require_safe
def statement(request: HttpRequest, catalog_id: str) -> HttpResponse:
    """The Statement of Applicability of a catalog as a workbook."""
    user = viewer(request)
    chosen = catalog_or_404(catalog_id)
    rows = statement_rows(catalog_id=chosen.id, coverage=covered(user, chosen))
    return workbook(
        statement_of_applicability(rows, request.LANGUAGE_CODE), f"statement-of-applicability-{chosen.id}.xlsx"
    )


def workbook(content: bytes, filename: str) -> HttpResponse:
    return HttpResponse(
        content, content_type=MEDIA_TYPE, headers={"Content-Disposition": f'attachment; filename="{filename}"'}
    )

"""Pilots: planning, measuring both ways, the return, the decision, the report."""

from collections.abc import Callable
from dataclasses import dataclass

from django.contrib import messages
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from penstock.accounts.access import has_role
from penstock.accounts.models import User
from penstock.dashboard import charts
from penstock.dashboard.access import viewer
from penstock.dashboard.acts import REFUSALS, Act, confirm, refuse
from penstock.dashboard.forms.base import ConfirmForm, HouseForm
from penstock.dashboard.forms.pilots import AssumptionsForm, DecisionForm, PilotForm, assumptions_of
from penstock.dashboard.history import history
from penstock.dashboard.templatetags import figures
from penstock.pilots import services
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.report import report_pdf
from penstock.pilots.returns import Returns, Way, returns
from penstock.pilots.selectors import acts_open_to, latest_run, pilots_visible_to
from penstock.pilots.transitions import WRITERS
from penstock.serving.models import Batch
from penstock.serving.records import request_lines
from penstock.serving.selectors import progress
from penstock.serving.services import create_file
from penstock.telemetry.rates import current_rate_card

REPORT_LANGUAGES = {"en": "en", "zh-hant": "zh-Hant"}
OPEN_RUNS = (BaselineRun.Status.QUEUED, BaselineRun.Status.RUNNING)
HTMX_STOP_POLLING = 286


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    context = {"pilots": pilots_visible_to(user), "may_create": has_role(user, None, *WRITERS)}
    return render(request, "dashboard/pilots/index.html", context)


def create(request: HttpRequest) -> HttpResponse:
    user = viewer(request)
    posted = request.method == "POST"
    form = PilotForm(request.POST if posted else None, request.FILES if posted else None, user=user)
    if posted and form.is_valid():
        data = form.cleaned_data
        try:
            pilot = _create(user, form)
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(
                request, _("Planned over %(n)d items. Measure the baseline first.") % {"n": pilot.sample_items}
            )
            return redirect("dashboard:pilot", name=data["name"])
    crumbs = ((_("Pilots"), reverse("dashboard:pilots")), (_("New pilot"), ""))
    context = {"form": form, "crumbs": crumbs, "card": current_rate_card()}
    return render(request, "dashboard/pilots/form.html", context, status=400 if form.errors else 200)


@transaction.atomic
def _create(user: User, form: PilotForm) -> Pilot:
    data = form.cleaned_data
    file = data["items_file"]
    if file is None:
        upload = data["upload"]
        lines = request_lines(upload, task=data["task"])
        file = create_file(user=user, team=data["task"].team, filename=upload.name, purpose="batch", chunks=lines)
    return services.create_pilot(
        user=user,
        task=data["task"],
        items_file=file,
        name=data["name"],
        sample_items=data["sample_items"],
        **form.assumptions(),
    )


@require_safe
def detail(request: HttpRequest, name: str) -> HttpResponse:
    user = viewer(request)
    pilot = get_object_or_404(pilots_visible_to(user), name=name)
    acts = acts_open_to(user, pilot)
    found = returns(pilot)
    context = {
        **live_context(pilot),
        "returns": found,
        "comparison": comparison(pilot, found),
        "how": [(label, found.how[key]) for key, label in how_labels().items() if key in found.how],
        "chart": charts.sensitivity(found),
        "card": pilot.rate_card,
        "acts": [(act, LABELS[act]()) for act in acts if act in LABELS],
        "may_edit": "update" in acts,
        "history": history(pilot.name),
        "crumbs": ((_("Pilots"), reverse("dashboard:pilots")), (pilot.title, "")),
    }
    return render(request, "dashboard/pilots/detail.html", context)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A figure of both ways; `query` lists the requests behind the trial's."""

    label: str
    baseline: str
    trial: str
    how: str
    query: str


def comparison(pilot: Pilot, found: Returns) -> list[ComparisonRow]:
    """Both ways, figure by figure, each with how it was measured."""
    currency = found.currency
    rows: list[tuple[str, str, Callable[[Way], str], str]] = [
        (_("Items"), "items", lambda way: figures.integer(way.delivered), "items"),
        (_("Seconds"), "seconds", lambda way: figures.duration(way.seconds), ""),
        (_("Items a second"), "items_per_second", lambda way: figures.number(way.items_per_second), "items_per_second"),
        (_("Output tokens"), "output_tokens", lambda way: figures.integer(way.output_tokens), "output_tokens"),
        (
            _("Output tokens a second"),
            "rate",
            lambda way: figures.rate(way.output_tokens_per_second),
            "items_per_second",
        ),
        (_("Valid outputs"), "valid_rate", valid_text, "valid_rate"),
        (_("Cost per item"), "cost", lambda way: figures.money(way.cost_per_item, currency), "cost_per_item"),
        (
            _("Cost per valid item"),
            "cost_valid",
            lambda way: figures.money(way.cost_per_valid_item, currency),
            "cost_per_valid_item",
        ),
        (
            _("Machine hours a month"),
            "hours",
            lambda way: figures.number(way.machine_hours_per_month, "h"),
            "machine_hours_per_month",
        ),
        (
            _("Energy per 1,000 items"),
            "energy",
            lambda way: figures.number(way.energy_kwh_per_1k_items, "kWh"),
            "energy_kwh_per_1k_items",
        ),
    ]
    query = f"batch={pilot.trial_batch_id}" if pilot.trial_batch_id else ""
    how = {**found.how, "": f"{found.how.get('baseline.seconds', '')} {found.how.get('trial.seconds', '')}".strip()}
    return [
        ComparisonRow(
            label=label,
            baseline=show(found.baseline) if found.baseline else figures.nothing(),
            trial=show(found.trial) if found.trial else figures.nothing(),
            how=how.get(key, ""),
            query=query if found.trial and name == "items" else "",
        )
        for label, name, show, key in rows
    ]


def valid_text(way: Way) -> str:
    shown = figures.percent(way.valid_rate)
    if way.valid_rate is None:
        return shown
    return format_html("{} {}", shown, figures.interval(way.valid_rate_low, way.valid_rate_high))


def how_labels() -> dict[str, str]:
    return {
        "throughput_multiple": _("Throughput multiple"),
        "throughput_multiple_interval": _("Its interval"),
        "token_throughput_multiple": _("By output tokens"),
        "saving_per_month": _("Saving a month"),
        "payback_months": _("Payback"),
        "npv": _("Net present value"),
    }


def live_context(pilot: Pilot) -> dict[str, object]:
    run = latest_run(pilot)
    measured = run.items.count() if run is not None else 0
    trial = pilot.trial_batch
    moving = (run is not None and run.status in OPEN_RUNS) or (trial is not None and trial.status not in Batch.TERMINAL)
    return {
        "pilot": pilot,
        "run": run,
        "measured": measured,
        "measured_percent": 100 * measured / pilot.sample_items if pilot.sample_items else 0,
        "trial": trial,
        "trial_progress": progress(trial) if trial is not None else None,
        "moving": moving,
        "news": _("%(done)d of %(total)d items of the baseline measured.")
        % {"done": measured, "total": pilot.sample_items},
    }


@require_safe
def live(request: HttpRequest, name: str) -> HttpResponse:
    """How far measuring is. Once nothing moves, the answer stops the polling and reloads the page with its figures."""
    pilot = get_object_or_404(pilots_visible_to(viewer(request)), name=name)
    context = live_context(pilot)
    response = render(request, "dashboard/pilots/live.html", context)
    if not context["moving"]:
        response.status_code = HTMX_STOP_POLLING
        response["HX-Refresh"] = "true"
    return response


def edit(request: HttpRequest, name: str) -> HttpResponse:
    user = viewer(request)
    pilot = get_object_or_404(pilots_visible_to(user), name=name)
    form = AssumptionsForm(request.POST if request.method == "POST" else None, initial=assumptions_of(pilot))
    if request.method == "POST" and form.is_valid():
        changes = form.assumptions()
        if request.POST.get("current_rates") == "yes":
            changes["rate_card"] = current_rate_card()
        try:
            services.update_pilot(user=user, pilot=pilot, **changes)
        except REFUSALS as error:
            refuse(form, error)
        else:
            messages.success(request, _("Saved; the return is reckoned anew."))
            return redirect("dashboard:pilot", name=pilot.name)
    crumbs = (
        (_("Pilots"), reverse("dashboard:pilots")),
        (pilot.title, reverse("dashboard:pilot", args=[pilot.name])),
        (_("Edit"), ""),
    )
    current = current_rate_card()
    context = {
        "form": form,
        "pilot": pilot,
        "crumbs": crumbs,
        "card": pilot.rate_card,
        "other_card": current if current.pk != pilot.rate_card_id else None,
    }
    return render(request, "dashboard/pilots/form.html", context, status=400 if form.errors else 200)


@require_safe
def report(request: HttpRequest, name: str, language: str) -> HttpResponse:
    """The report as PDF, in English or Traditional Chinese whatever the page's language is."""
    pilot = get_object_or_404(pilots_visible_to(viewer(request)), name=name)
    if language not in REPORT_LANGUAGES:
        raise Http404
    content = report_pdf(pilot=pilot, language=REPORT_LANGUAGES[language])
    filename = f"pilot-{pilot.name}-{REPORT_LANGUAGES[language]}.pdf"
    return HttpResponse(
        content, content_type="application/pdf", headers={"Content-Disposition": f'attachment; filename="{filename}"'}
    )


LABELS = {
    "start_baseline": lambda: _("Measure the baseline"),
    "start_trial": lambda: _("Start the trial"),
    "decide": lambda: _("Decide"),
    "stop": lambda: _("Stop the pilot"),
}


def act(request: HttpRequest, name: str, act: str) -> HttpResponse:
    """Measure the baseline, start the trial, decide or stop, after asking."""
    user = viewer(request)
    pilot = get_object_or_404(pilots_visible_to(user), name=name)
    if act not in LABELS:
        raise Http404
    here = reverse("dashboard:pilot", args=[pilot.name])
    label = LABELS[act]()
    crumbs = ((_("Pilots"), reverse("dashboard:pilots")), (pilot.title, here), (label, ""))

    def baseline(data: object) -> str:
        services.start_baseline(user=user, pilot=pilot)
        return _("An engine host takes it up; leave the machine alone meanwhile.")

    def trial(data: object) -> str:
        services.start_trial(user=user, pilot=pilot)
        return _("The trial batch is submitted.")

    def decide(data: object) -> str:
        assert isinstance(data, dict)
        services.decide(user=user, pilot=pilot, decision=data["decision"], reason=data["reason"])
        return _("Decided; the figures stand as they are now.")

    form: type[HouseForm]
    perform: Callable[[object], str]
    if act == "start_baseline":
        steps, form, perform = (
            [
                _("The first %(n)d items run the naive way: transformers, unquantized, one at a time.")
                % {"n": pilot.sample_items},
                _("Whatever else runs on the host meanwhile slows it down and flatters the trial; it is noted."),
            ],
            ConfirmForm,
            baseline,
        )
    elif act == "start_trial":
        steps, form, perform = [_("The same items run as a batch, with the same limits, greedily.")], ConfirmForm, trial
    else:
        steps, form, perform = (
            [_("The pilot ends. Decision, reason and assumptions go into the ledger under your name.")],
            DecisionForm,
            decide,
        )
    return confirm(
        request,
        Act(
            heading=_("%(act)s: %(title)s") % {"act": label, "title": pilot.title},
            consequences=steps,
            button=label,
            crumbs=crumbs,
            back=here,
            perform=perform,
            dangerous=act == "stop",
            form=form,
        ),
    )

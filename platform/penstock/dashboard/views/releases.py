"""Model releases: the list, the papers of one, approving and withdrawing it."""

from django.db.models import Count
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from penstock.accounts.access import has_role
from penstock.dashboard.access import viewer
from penstock.dashboard.acts import Act, confirm
from penstock.dashboard.evaluations import described, rows_of
from penstock.dashboard.history import history
from penstock.registry import services
from penstock.registry.selectors import evaluations_of, releases_visible_to, tasks_visible_to
from penstock.registry.transitions import RELEASE_TRANSITIONS


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    releases = releases_visible_to(viewer(request)).annotate(task_count=Count("tasks"))
    return render(request, "dashboard/releases/index.html", {"releases": releases})


@require_safe
def detail(request: HttpRequest, name: str) -> HttpResponse:
    user = viewer(request)
    release = get_object_or_404(releases_visible_to(user), name=name)
    evaluations = list(evaluations_of(release))
    context = {
        "release": release,
        "quantization": release.manifest.get("quantization", {}),
        "evaluations": [(evaluation, described(evaluation), rows_of(evaluation)) for evaluation in evaluations],
        "tasks": tasks_visible_to(user).filter(model_release=release),
        "history": history(release.name),
        "files": release.manifest.get("files", []),
        "config": release.manifest.get("config", {}),
        "acts": [
            (act, LABELS[act]())
            for act, transition in RELEASE_TRANSITIONS.items()
            if act in LABELS and release.status in transition.sources and has_role(user, None, *transition.roles)
        ],
    }
    return render(request, "dashboard/releases/detail.html", context)


LABELS = {"approve": lambda: _("Approve"), "withdraw": lambda: _("Withdraw")}


def act(request: HttpRequest, name: str, act: str) -> HttpResponse:
    """Approve or withdraw, after asking."""
    user = viewer(request)
    release = get_object_or_404(releases_visible_to(user), name=name)
    if act not in LABELS:
        raise Http404
    if act == "approve":
        service, told = services.approve_release, _("Approved: tasks may run on it.")
        evaluated = evaluations_of(release).exists()
        consequences = [
            _("It was measured against its reference; the figures are on its page.")
            if evaluated
            else _("It has not been evaluated: nothing shows yet what its quantization costs in quality."),
            _("Tasks may then run on exactly these weights: digest %(digest)s.") % {"digest": release.digest},
            _("Licence: %(licence)s. Source: %(source)s.")
            % {"licence": release.licence or _("not stated"), "source": release.source or _("not stated")},
        ]
    else:
        service, told = services.withdraw_release, _("Withdrawn: nothing new runs on it.")
        consequences = [_("No task can run on it from now on, for good. What ran on it stays on record.")]
    here = reverse("dashboard:release", args=[release.name])

    def perform(data: object) -> str:
        service(user=user, release=release)
        return told

    return confirm(
        request,
        Act(
            heading=_("%(act)s: %(title)s") % {"act": LABELS[act](), "title": release.name},
            consequences=consequences,
            button=LABELS[act](),
            crumbs=((_("Model releases"), reverse("dashboard:releases")), (release.name, here), (LABELS[act](), "")),
            back=here,
            perform=perform,
            dangerous=act == "withdraw",
        ),
    )

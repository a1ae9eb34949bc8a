"""One engine host: the machine, and what it has loaded."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from penstock.dashboard.engine_runs import shown
from penstock.serving.selectors import engine_hosts, is_alive, runs_of_host

SHOWN_RUNS = 20


@require_safe
def detail(request: HttpRequest, name: str) -> HttpResponse:
    host = get_object_or_404(engine_hosts(), name=name)
    context = {
        "host": host,
        "alive": is_alive(host),
        "runs": [shown(run) for run in runs_of_host(host)[:SHOWN_RUNS]],
        "most": SHOWN_RUNS,
        "crumbs": ((_("Overview"), reverse("dashboard:overview")), (host.name, "")),
    }
    return render(request, "dashboard/hosts/detail.html", context)

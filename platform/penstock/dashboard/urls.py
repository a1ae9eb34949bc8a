"""Every page. All but signing in and the theme are for people who are signed in."""

from collections.abc import Callable
from functools import wraps

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, path

from penstock.dashboard.views import (
    batches,
    controls,
    fairness,
    frame,
    hosts,
    ledger,
    overview,
    pilots,
    releases,
    requests,
    settings,
    tasks,
)
from penstock.serving.bodies import unstorable_text

app_name = "dashboard"

OPEN: list[URLPattern | URLResolver] = [
    path("sign-in/", frame.SignIn.as_view(), name="sign-in"),
    path("sign-out/", frame.SignOut.as_view(), name="sign-out"),
    path("theme/", frame.theme, name="theme"),
]

PAGES: dict[str, tuple[str, Callable[..., HttpResponseBase]]] = {
    "overview": ("", overview.index),
    "overview-batches": ("overview/batches/", overview.batches),
    "host": ("hosts/<str:name>/", hosts.detail),
    "tasks": ("tasks/", tasks.index),
    "task-new": ("new/task/", tasks.create),
    "task": ("tasks/<slug:name>/", tasks.detail),
    "task-edit": ("tasks/<slug:name>/edit/", tasks.edit),
    "task-export": ("tasks/<slug:name>/evidence/", tasks.export),
    "task-act": ("tasks/<slug:name>/<slug:act>/", tasks.act),
    "releases": ("models/", releases.index),
    "release": ("models/<slug:name>/", releases.detail),
    "release-act": ("models/<slug:name>/<slug:act>/", releases.act),
    "batches": ("batches/", batches.index),
    "batch-new": ("new/batch/", batches.create),
    "batch": ("batches/<str:batch_id>/", batches.detail),
    "batch-live": ("batches/<str:batch_id>/live/", batches.live),
    "batch-charts": ("batches/<str:batch_id>/charts/", batches.live_charts),
    "batch-cancel": ("batches/<str:batch_id>/cancel/", batches.cancel),
    "batch-verify": ("batches/<str:batch_id>/verify/", batches.verify),
    "batch-export": ("batches/<str:batch_id>/evidence/", batches.export),
    "file": ("files/<str:file_id>/", batches.file_content),
    "requests": ("requests/", requests.index),
    "request": ("requests/<str:request_id>/", requests.detail),
    "request-verify": ("requests/<str:request_id>/verify/", requests.verify),
    "fairness": ("fairness/", fairness.index),
    "fairness-task": ("fairness/<slug:name>/", fairness.detail),
    "controls": ("controls/", controls.index),
    "controls-matrix": ("controls/matrix.xlsx", controls.matrix),
    "controls-catalog": ("controls/<str:catalog_id>/", controls.catalog),
    "controls-statement": ("controls/<str:catalog_id>/statement.xlsx", controls.statement),
    "control": ("controls/<str:catalog_id>/<str:control_id>/", controls.control),
    "ledger": ("ledger/", ledger.index),
    "ledger-verify": ("ledger/verify/", ledger.verify),
    "pilots": ("pilots/", pilots.index),
    "pilot-new": ("new/pilot/", pilots.create),
    "pilot": ("pilots/<slug:name>/", pilots.detail),
    "pilot-edit": ("pilots/<slug:name>/edit/", pilots.edit),
    "pilot-live": ("pilots/<slug:name>/live/", pilots.live),
    "pilot-report": ("pilots/<slug:name>/report-<slug:language>.pdf", pilots.report),
    "pilot-act": ("pilots/<slug:name>/<slug:act>/", pilots.act),
    "rates": ("settings/rates/", settings.rates),
    "keys": ("settings/keys/", settings.keys),
    "key-new": ("settings/keys/new/", settings.create_key),
    "key-revoke": ("settings/keys/<slug:prefix>/revoke/", settings.revoke_key),
    "people": ("settings/people/", settings.people),
    "person-new": ("settings/people/new/", settings.create_person),
    "person-team": ("settings/people/new-team/", settings.create_team),
    "person-password": ("settings/people/password/", settings.change_password),
    "person-role": ("settings/people/<str:username>/role/", settings.grant_role),
}


def storable(view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """The view, for addresses of text that PostgreSQL can compare; nothing is kept under any other."""

    @wraps(view)
    def guarded(request: HttpRequest, **parts: str) -> HttpResponseBase:
        if unstorable_text(parts):
            raise Http404
        return view(request, **parts)

    return guarded


urlpatterns = [
    *OPEN,
    *(path(route, login_required(storable(view)), name=name) for name, (route, view) in PAGES.items()),
]

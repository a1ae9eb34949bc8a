"""/v1/models: what may be named as `model`: approved releases, and the team's active tasks."""

from datetime import datetime
from typing import Any

from django.http import HttpResponseBase, JsonResponse
from django.utils.translation import gettext as _

from penstock.openai_api.door import Call
from penstock.openai_api.errors import not_found
from penstock.openai_api.files import unix
from penstock.registry.models import ModelRelease
from penstock.registry.selectors import releases_visible_to, tasks_usable_by_team


def index(call: Call) -> HttpResponseBase:
    return JsonResponse({"object": "list", "data": _usable(call)})


def retrieve(call: Call, name: str) -> HttpResponseBase:
    for model in _usable(call):
        if model["id"] == name:
            return JsonResponse(model)
    raise not_found(_("model"), name, param="model")


def _usable(call: Call) -> list[dict[str, Any]]:
    releases = releases_visible_to(call.user).filter(status=ModelRelease.Status.APPROVED)
    tasks = tasks_usable_by_team(call.team)
    return [
        *(_model(release.name, release.imported_at, release.supplier or "penstock") for release in releases),
        *(_model(task.name, task.created_at, call.team.slug) for task in tasks),
    ]


def _model(name: str, created: datetime, owned_by: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": unix(created), "owned_by": owned_by}

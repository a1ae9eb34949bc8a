"""Figures over requests, as JSON: the summary of telemetry, and the objectives of the task."""

import datetime as dt
from decimal import Decimal
from typing import Any, Literal

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter
from pydantic import BaseModel
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request as ApiRequest

from penstock.registry.contracts import Metric
from penstock.registry.models import Task
from penstock.serving.models import Request
from penstock.telemetry.json_values import plain
from penstock.telemetry.objectives import judge
from penstock.telemetry.summary import Per, Summary, summarize

DEFAULT_DAYS = 30
MAX_DAYS = 3650
WINDOW = OpenApiParameter(
    "days", int, default=DEFAULT_DAYS, description=f"Requests finished within so many days, 1 to {MAX_DAYS}."
)


class JudgedObjective(BaseModel):
    """`value` is null where there was nothing to measure."""

    metric: Metric
    target: Decimal
    unit: str
    value: Decimal | None
    verdict: Literal["met", "not_met", "no_data"]


class Measurements(BaseModel):
    """`window_start` is null for a batch, all of whose requests count. Amounts and targets are decimal text."""

    window_start: dt.datetime | None
    window_end: dt.datetime
    summary: Summary
    objectives: list[JudgedObjective]


def measure(task: Task, requests: QuerySet[Request], *, per: Per, days: int | None = None) -> dict[str, Any]:
    """`Measurements` as plain JSON, over the requests finished in the last `days`, or over all."""
    now = timezone.now()
    since = None if days is None else now - dt.timedelta(days=days)
    if since is not None:
        requests = requests.filter(finished_at__gte=since, finished_at__lte=now)
    return {
        "window_start": since and since.isoformat(),
        "window_end": now.isoformat(),
        "summary": summarize(requests, per=per).as_json(),
        "objectives": [
            {
                "metric": result.objective.metric,
                "target": plain(result.objective.target),
                "unit": result.unit,
                "value": plain(result.value),
                "verdict": str(result.verdict),
            }
            for result in judge(task=task, requests=requests)
        ],
    }


def window_days(request: ApiRequest) -> int:
    """Raises DRF's ValidationError unless it is a whole number within bounds."""
    text = request.query_params.get("days", str(DEFAULT_DAYS))
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_DAYS):
        raise ValidationError({"days": [_("A whole number from 1 to %(most)d.") % {"most": MAX_DAYS}]})
    return int(text)

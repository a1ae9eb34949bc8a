"""What happened over a set of requests, as figures. Exact SQL aggregates over the rows; nothing is sampled.

Definitions, the same on every page and in every export:

- Percentiles: see `aggregates`. Latencies count succeeded requests.
- Wall time: from the first request's start to the last one's finish. Active time: that part of it in which at least
  one of the requests was running. Rates over a batch use wall time; over a task, whose batches lie hours apart,
  active time (`per="active"`).
- Error rate: failed or expired, of all that succeeded, failed or expired. What a person cancelled is no error.
- Valid rate: valid, of the succeeded requests whose output could be assessed.
- Cost: what all of the requests cost, failed and cancelled ones too; so cost per successful item carries the failures.
- Where there is nothing to reckon from, the figure is None and never zero.
"""

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from django.db.models import Count, QuerySet, Sum
from django.utils import timezone

from penstock.accounts.access import visible_to
from penstock.accounts.models import User
from penstock.registry.models import Task
from penstock.serving.models import Request
from penstock.telemetry.aggregates import ERRORS, summary_aggregates
from penstock.telemetry.json_values import plain
from penstock.telemetry.series import Day, TimelinePoint, daily, timeline

__all__ = [
    "Day",
    "Money",
    "Summary",
    "TaskOverview",
    "TimelinePoint",
    "by_task",
    "daily",
    "summarize",
    "summarize_by",
    "timeline",
]

Per = Literal["wall", "active"]


@dataclass(frozen=True, slots=True)
class Money:
    amount: Decimal
    currency: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a set of requests; None where nothing was there to reckon from."""

    requests: int
    by_status: Mapping[str, int]
    errors_by_code: Mapping[str, int]
    finished: int
    succeeded: int
    error_rate: float | None
    valid_rate: float | None
    assessed: int
    valid: int
    refused: int
    truncated: int
    deadline_met_rate: float | None

    prompt_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None

    first_started_at: dt.datetime | None
    last_finished_at: dt.datetime | None
    wall_seconds: float | None
    active_seconds: float | None
    rates_per: Per
    requests_per_second: float | None
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None

    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    ttft_p99_seconds: float | None
    duration_p50_seconds: float | None
    duration_p95_seconds: float | None
    duration_p99_seconds: float | None
    queued_p50_seconds: float | None
    queued_p95_seconds: float | None

    costs: tuple[Money, ...]
    """One sum for each currency that a rate card was in; the figures below are None where there are several."""
    currency: str
    cost_total: Decimal | None
    cost_per_1k_output_tokens: Decimal | None
    cost_per_item: Decimal | None
    cost_per_successful_item: Decimal | None
    cost_per_valid_item: Decimal | None

    compute_seconds: float | None
    energy_kwh: Decimal | None
    energy_source: Literal["measured", "estimated", "mixed"] | None
    carbon_kg: Decimal | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values: amounts as text, times as RFC 3339."""
        values: dict[str, Any] = plain(self)
        return values


@dataclass(frozen=True, slots=True)
class TaskOverview:
    task: Task
    summary: Summary


def summarize(requests: QuerySet[Request], *, per: Per = "wall") -> Summary:
    """The figures of `requests`, whatever their state; `per` says which time the rates are over."""
    requests = requests.order_by()
    row = requests.aggregate(**summary_aggregates())
    errors = dict(requests.filter(ERRORS).values_list("error_code").annotate(n=Count("pk")))
    costs = _money(
        requests.filter(usage__isnull=False).values_list("usage__currency").annotate(amount=Sum("usage__cost"))
    )
    return _summary(row, errors=errors, costs=costs, per=per)


def summarize_by(requests: QuerySet[Request], field: str, *, per: Per = "active") -> dict[Any, Summary]:
    """The figures of each part of `requests` that has the same value in `field` (a field or an annotation)."""
    requests = requests.order_by()
    errors: dict[Any, dict[str, int]] = defaultdict(dict)
    for key, code, count in requests.filter(ERRORS).values_list(field, "error_code").annotate(n=Count("pk")):
        errors[key][code] = count
    amounts: dict[Any, list[tuple[str, Decimal]]] = defaultdict(list)
    paid = requests.filter(usage__isnull=False).values_list(field, "usage__currency")
    for key, currency, amount in paid.annotate(amount=Sum("usage__cost")):
        amounts[key].append((currency, amount))
    return {
        row[field]: _summary(row, errors=errors[row[field]], costs=_money(amounts[row[field]]), per=per)
        for row in requests.values(field).annotate(**summary_aggregates())
    }


def by_task(user: User, *, days: int = 30) -> list[TaskOverview]:
    """Each task that a person may see, by title, with the figures of what it finished in the last `days` days."""
    tasks = list(visible_to(user, Task.objects.select_related("team", "model_release")).order_by("title", "pk"))
    since = timezone.now() - dt.timedelta(days=days)
    finished = Request.objects.filter(task__in=[task.pk for task in tasks], finished_at__gte=since)
    summaries = summarize_by(finished, "task_id")
    return [
        TaskOverview(task, summaries.get(task.pk) or summarize(Request.objects.none(), per="active")) for task in tasks
    ]


def _summary(row: Mapping[str, Any], *, errors: dict[str, int], costs: tuple[Money, ...], per: Per) -> Summary:
    by_status = {str(status): row[f"status_{status}"] or 0 for status in Request.Status.values}
    succeeded = by_status[Request.Status.SUCCEEDED]
    error_count = by_status[Request.Status.FAILED] + by_status[Request.Status.EXPIRED]
    finished = row["finished"] or 0
    prompt, output = row["sum_prompt_tokens"], row["sum_output_tokens"]
    total = None if prompt is None and output is None else (prompt or 0) + (output or 0)
    first, last = row["first_started_at"], row["last_finished_at"]
    wall = (last - first).total_seconds() if first and last and last >= first else None
    span = wall if per == "wall" else row["active"]
    cost = costs[0] if len(costs) == 1 else None
    return Summary(
        requests=sum(by_status.values()),
        by_status=by_status,
        errors_by_code=dict(sorted(errors.items(), key=lambda item: (-item[1], item[0]))),
        finished=finished,
        succeeded=succeeded,
        error_rate=_ratio(error_count, succeeded + error_count),
        valid_rate=_ratio(row["valid_count"], row["assessed"]),
        assessed=row["assessed"] or 0,
        valid=row["valid_count"] or 0,
        refused=row["refused_count"] or 0,
        truncated=row["truncated_count"] or 0,
        deadline_met_rate=_ratio(row["within_deadline"], row["with_deadline"]),
        prompt_tokens=prompt,
        output_tokens=output,
        total_tokens=total,
        first_started_at=first,
        last_finished_at=last,
        wall_seconds=wall,
        active_seconds=row["active"],
        rates_per=per,
        requests_per_second=_ratio(succeeded, span) if finished else None,
        output_tokens_per_second=_ratio(output, span),
        total_tokens_per_second=_ratio(total, span),
        ttft_p50_seconds=row["ttft_p50"],
        ttft_p95_seconds=row["ttft_p95"],
        ttft_p99_seconds=row["ttft_p99"],
        duration_p50_seconds=row["duration_p50"],
        duration_p95_seconds=row["duration_p95"],
        duration_p99_seconds=row["duration_p99"],
        queued_p50_seconds=row["queued_p50"],
        queued_p95_seconds=row["queued_p95"],
        costs=costs,
        currency=cost.currency if cost else "",
        cost_total=cost.amount if cost else None,
        cost_per_1k_output_tokens=_each(cost, output, 1000),
        cost_per_item=_each(cost, row["used"]),
        cost_per_successful_item=_each(cost, succeeded),
        cost_per_valid_item=_each(cost, row["valid_count"]),
        compute_seconds=row["sum_compute_seconds"],
        energy_kwh=row["sum_energy_kwh"],
        energy_source=_energy_source(row),
        carbon_kg=row["sum_carbon_kg"],
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _each(cost: Money | None, count: int | None, times: int = 1) -> Decimal | None:
    return None if cost is None or not count else cost.amount * times / count


def _money(sums: Iterable[tuple[str, Decimal]]) -> tuple[Money, ...]:
    return tuple(Money(amount, currency) for currency, amount in sorted(sums))


def _energy_source(row: Mapping[str, Any]) -> Literal["measured", "estimated", "mixed"] | None:
    measured, estimated = row["measured_count"], row["estimated_count"]
    if measured and estimated:
        return "mixed"
    if measured:
        return "measured"
    return "estimated" if estimated else None

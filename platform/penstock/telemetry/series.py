"""Figures over time, for charts."""

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django.db.models import (
    Count,
    DurationField,
    ExpressionWrapper,
    F,
    FloatField,
    IntegerField,
    Max,
    Min,
    Q,
    QuerySet,
    Sum,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, Extract, Floor, Greatest, Least, TruncDate
from django.utils import timezone

from penstock.accounts.access import visible_to
from penstock.accounts.models import User
from penstock.registry.models import Task
from penstock.serving.models import Request
from penstock.telemetry.aggregates import ERRORS, FINISHED, SUCCEEDED


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """One of equally long slices of time. `output_tokens` counts each request's tokens spread evenly over the time
    that it ran, so that throughput does not jump when a request ends; `cost` counts requests by their finish and is
    None where nothing was reckoned, or in two currencies."""

    start: dt.datetime
    end: dt.datetime
    succeeded: int
    errors: int
    output_tokens: float
    output_tokens_per_second: float
    cost: Decimal | None
    cost_so_far: Decimal | None
    currency: str


@dataclass(frozen=True, slots=True)
class Day:
    """What finished on one day (UTC). Money and energy are None on a day on which nothing was used, money also on a
    day with two currencies."""

    date: dt.date
    finished: int
    succeeded: int
    errors: int
    prompt_tokens: int
    output_tokens: int
    cost: Decimal | None
    currency: str
    energy_kwh: Decimal | None


def timeline(requests: QuerySet[Request], *, buckets: int = 60) -> list[TimelinePoint]:
    """The finished requests in `buckets` slices, from the first start to the last finish; empty where none ran.

    Raises ValueError for fewer than one bucket. Tokens of requests that still run are not known yet.
    """
    if buckets < 1:
        raise ValueError(f"buckets must be at least 1, got {buckets}")
    ran = requests.order_by().filter(FINISHED, started_at__isnull=False, finished_at__isnull=False)
    ends = ran.aggregate(first=Min("started_at"), last=Max("finished_at"))
    first, last = ends["first"], ends["last"]
    if first is None or last is None:
        return []
    # Rows that start and finish in the same microsecond still get a slice to stand in.
    width = max((last - first).total_seconds(), 1e-3) / buckets
    ran = ran.annotate(
        starts=_seconds_since(first, F("started_at")),
        # A finish before the start (two hosts' clocks) is taken for the start, a span of no length for a millisecond.
        ends=Greatest(_seconds_since(first, F("finished_at")), F("starts") + 1e-3, output_field=FloatField()),
    ).annotate(rate=ExpressionWrapper(F("output_tokens") / (F("ends") - F("starts")), output_field=FloatField()))
    tokens_until = _tokens_at_edges(ran, width, buckets)

    counts: dict[int, Mapping[str, Any]] = {
        row["slot"]: row
        for row in ran.annotate(slot=_slot(F("ends"), width, buckets))
        .values("slot")
        .annotate(succeeded=Count("pk", filter=SUCCEEDED), errors=Count("pk", filter=ERRORS))
    }
    costs: dict[int, Decimal] = defaultdict(Decimal)
    paid = ran.filter(usage__isnull=False).annotate(slot=_slot(F("ends"), width, buckets))
    currencies = set()
    for slot, currency, amount in paid.values_list("slot", "usage__currency").annotate(amount=Sum("usage__cost")):
        costs[slot] += amount
        currencies.add(currency)
    # A sum over two currencies means nothing; the summary lists both.
    currency = currencies.pop() if len(currencies) == 1 else ""

    points: list[TimelinePoint] = []
    so_far = Decimal(0)
    for slot in range(buckets):
        tokens = max(tokens_until[slot + 1] - tokens_until[slot], 0.0)
        so_far += costs[slot]
        row = counts.get(slot, {})
        points.append(
            TimelinePoint(
                start=first + dt.timedelta(seconds=slot * width),
                end=first + dt.timedelta(seconds=(slot + 1) * width),
                succeeded=row.get("succeeded", 0),
                errors=row.get("errors", 0),
                output_tokens=tokens,
                output_tokens_per_second=tokens / width,
                cost=costs[slot] if currency else None,
                cost_so_far=so_far if currency else None,
                currency=currency,
            )
        )
    return points


def _seconds_since(origin: dt.datetime, moment: F) -> Combinable:
    elapsed = ExpressionWrapper(moment - origin, output_field=DurationField())
    return Cast(Extract(elapsed, "epoch"), FloatField())


def _slot(seconds: Combinable, width: float, buckets: int) -> Combinable:
    """Which slice a moment falls in; the very end belongs to the last one."""
    return Cast(Least(Floor(seconds / width), float(buckets - 1), output_field=FloatField()), IntegerField())


def _tokens_at_edges(ran: QuerySet[Request], width: float, buckets: int) -> list[float]:
    """Tokens produced by the time of each slice's edge; `buckets + 1` values.

    A request that runs from s to e at rate r has produced r*(t-s) - r*(t-e) at t >= e and r*(t-s) between. So the sum
    at t needs only, over the requests started by t, the sums of r and of r*s, less the same of those ended by t: two
    grouped scans instead of a comparison of every request with every slice. An edge is exact; within a slice the
    starts and ends are cut at it by adding what lies beyond.
    """
    edges = [0.0] * (buckets + 1)
    for field, sign in (("starts", 1.0), ("ends", -1.0)):
        rows = (
            ran.annotate(slot=_slot(F(field), width, buckets))
            .values_list("slot")
            .annotate(rate_sum=Sum("rate"), rate_by_time=Sum(F("rate") * F(field), output_field=FloatField()))
        )
        sums = {slot: (rate or 0.0, by_time or 0.0) for slot, rate, by_time in rows}
        rate_sum = rate_by_time = 0.0
        for edge in range(1, buckets + 1):
            rate, by_time = sums.get(edge - 1, (0.0, 0.0))
            rate_sum += rate
            rate_by_time += by_time
            edges[edge] += sign * (rate_sum * edge * width - rate_by_time)
    return edges


def daily(user: User, *, task: Task | None = None, days: int = 30) -> list[Day]:
    """The last `days` days, today included, oldest first, over what a person may see."""
    today = timezone.now().astimezone(dt.UTC).date()
    first = today - dt.timedelta(days=days - 1)
    since = dt.datetime.combine(first, dt.time(), tzinfo=dt.UTC)
    requests = visible_to(user, Request.objects.filter(FINISHED, finished_at__gte=since)).order_by()
    if task is not None:
        requests = requests.filter(task=task)
    requests = requests.annotate(date=TruncDate("finished_at", tzinfo=dt.UTC))
    rows: dict[dt.date, Mapping[str, Any]] = {
        row["date"]: row
        for row in requests.values("date").annotate(
            finished=Count("pk"),
            succeeded=Count("pk", filter=SUCCEEDED),
            errors=Count("pk", filter=ERRORS),
            prompt=Sum("prompt_tokens"),
            output=Sum("output_tokens"),
            energy=Sum("usage__energy_kwh"),
        )
    }
    costs: dict[dt.date, list[tuple[str, Decimal]]] = defaultdict(list)
    paid = requests.filter(Q(usage__isnull=False)).values_list("date", "usage__currency")
    for date, currency, amount in paid.annotate(amount=Sum("usage__cost")):
        costs[date].append((currency, amount))
    return [_day(first + dt.timedelta(days=n), rows, costs) for n in range(days)]


def _day(
    date: dt.date, rows: Mapping[dt.date, Mapping[str, Any]], costs: dict[dt.date, list[tuple[str, Decimal]]]
) -> Day:
    row = rows.get(date, {})
    currency, cost = costs[date][0] if len(costs.get(date, ())) == 1 else ("", None)
    return Day(
        date=date,
        finished=row.get("finished") or 0,
        succeeded=row.get("succeeded") or 0,
        errors=row.get("errors") or 0,
        prompt_tokens=row.get("prompt") or 0,
        output_tokens=row.get("output") or 0,
        cost=cost,
        currency=currency,
        energy_kwh=row.get("energy"),
    )

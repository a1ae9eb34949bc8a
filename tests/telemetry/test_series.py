"""Figures over time."""

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.serving.models import Request
from penstock.telemetry.models import RateCard
from penstock.telemetry.recorder import record_usage
from penstock.telemetry.summary import daily, timeline


def test_tokens_are_spread_over_the_time_that_a_request_ran(floor: Any) -> None:
    floor.request(start=0, seconds=10, output_tokens=100)
    floor.request(start=5, seconds=5, output_tokens=100)
    points = timeline(floor.requests(), buckets=10)
    assert [point.output_tokens_per_second for point in points] == pytest.approx([10] * 5 + [30] * 5)
    assert [point.succeeded for point in points] == [0] * 9 + [2]


def test_costs_and_errors_count_when_a_request_finishes(floor: Any, round_card: RateCard) -> None:
    rows = [
        floor.request(start=0, seconds=3, compute_seconds=2.0),
        floor.request(start=0, seconds=10, compute_seconds=4.0, status="failed"),
    ]
    record_usage(rows)
    points = timeline(floor.requests(), buckets=5)
    assert [point.cost for point in points] == [Decimal(text) for text in ("0", "0.003", "0", "0", "0.006")]
    assert points[-1].cost_so_far == Decimal("0.009")
    assert [point.errors for point in points] == [0, 0, 0, 0, 1]
    assert points[0].currency == "TWD"


def test_without_usage_a_timeline_has_no_cost(floor: Any) -> None:
    floor.request(output_tokens=1)
    assert {point.cost for point in timeline(floor.requests(), buckets=3)} == {None}


def test_where_nothing_ran_there_is_no_timeline(floor: Any) -> None:
    floor.request(status="queued", start=None)
    assert timeline(floor.requests()) == []


spans = st.tuples(st.integers(0, 500), st.integers(0, 300), st.integers(0, 1000))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(spans, min_size=1, max_size=8), buckets=st.integers(1, 24))
def test_a_timeline_equals_a_slice_by_slice_reckoning(
    floor: Any, rows: list[tuple[int, int, int]], buckets: int
) -> None:
    Request.objects.all().delete()
    for start, seconds, tokens in rows:
        floor.request(start=start, seconds=seconds, output_tokens=tokens)
    points = timeline(floor.requests(), buckets=buckets)
    origin = min(start for start, _, _ in rows)
    width = max(max(start + seconds for start, seconds, _ in rows) - origin, 1e-3) / buckets
    for slot, point in enumerate(points):
        low, high = slot * width, (slot + 1) * width
        expected = 0.0
        for start, seconds, tokens in rows:
            begin, length = start - origin, max(seconds, 1e-3)
            overlap = max(0.0, min(begin + length, high) - max(begin, low))
            if slot == buckets - 1:
                overlap = max(0.0, begin + length - max(begin, low))
            expected += tokens * overlap / length
        assert point.output_tokens == pytest.approx(expected, rel=1e-6, abs=1e-4)
    assert sum(point.output_tokens for point in points) == pytest.approx(sum(t for _, _, t in rows), abs=1e-4)
    assert sum(point.succeeded for point in points) == len(rows)


def test_days_are_in_order_with_none_left_out(floor: Any, round_card: RateCard, people: Any) -> None:
    now = timezone.now()
    yesterday = (now - dt.timedelta(days=1)).replace(hour=12)
    record_usage([floor.request(origin=yesterday, compute_seconds=2.0, output_tokens=7, prompt_tokens=3)])
    floor.request(origin=now - dt.timedelta(days=40))
    days = daily(people.operator, days=7)
    assert [day.date for day in days] == [now.date() - dt.timedelta(days=n) for n in range(6, -1, -1)]
    assert (days[-2].finished, days[-2].output_tokens, days[-2].cost) == (1, 7, Decimal("0.003"))
    assert days[-2].energy_kwh == Decimal("0.0002")
    assert (days[-1].finished, days[-1].cost, days[-1].energy_kwh) == (0, None, None)
    assert sum(day.finished for day in days) == 1


def test_days_show_ones_own_team_only(floor: Any, next_door: Any, people: Any) -> None:
    yesterday = timezone.now() - dt.timedelta(days=1)
    floor.request(origin=yesterday)
    next_door.request(origin=yesterday)
    next_door.request(origin=yesterday)
    assert sum(day.finished for day in daily(people.auditor)) == 1
    assert sum(day.finished for day in daily(people.outsider)) == 2
    assert sum(day.finished for day in daily(people.administrator)) == 3
    assert sum(day.finished for day in daily(people.auditor, task=next_door.task)) == 0

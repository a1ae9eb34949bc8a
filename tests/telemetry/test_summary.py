"""Summaries against hand-written SQL, numpy and figures worked out by hand."""

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.serving.models import Request
from penstock.telemetry.models import RateCard, Usage
from penstock.telemetry.recorder import record_usage
from penstock.telemetry.summary import by_task, summarize, summarize_by


def sql(query: str, *parameters: int | str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return cursor.fetchone()


@pytest.fixture
def mixed(floor: Any, round_card: RateCard) -> Any:
    """Ten requests of every state, worked out in the tests below."""
    rows = [
        floor.request(
            start=n,
            seconds=2 + n,
            ttft_seconds=0.1 * (n + 1),
            queued_seconds=float(n),
            prompt_tokens=10,
            output_tokens=100,
            compute_seconds=1.0,
            valid=n != 3,
            refused=n == 3,
            truncated=n == 2,
        )
        for n in range(4)
    ]
    rows.append(floor.request(start=1, seconds=1, valid=None, prompt_tokens=10, output_tokens=0, compute_seconds=0.5))
    rows += [
        floor.request(status="failed", start=0, seconds=0.5, error_code="context_length_exceeded", ttft_seconds=0.001),
        floor.request(status="failed", start=0, seconds=9.5, error_code="engine_error", compute_seconds=1.5),
        floor.request(status="expired", start=None, seconds=30, error_code="batch_expired"),
        floor.request(status="cancelled", start=2, seconds=1, compute_seconds=0.5),
    ]
    record_usage(rows)
    floor.request(status="queued", start=None)
    floor.request(status="leased", start=3)
    return floor


def test_every_request_is_counted_once_under_its_state(mixed: Any) -> None:
    summary = summarize(mixed.requests())
    assert summary.requests == 11
    assert summary.finished == 9
    assert summary.by_status == {
        "queued": 1,
        "leased": 1,
        "succeeded": 5,
        "failed": 2,
        "expired": 1,
        "cancelled": 1,
    }
    assert summary.errors_by_code == {"batch_expired": 1, "context_length_exceeded": 1, "engine_error": 1}


def test_rates_leave_out_what_could_not_be_judged(mixed: Any) -> None:
    summary = summarize(mixed.requests())
    assert summary.error_rate == 3 / 8  # the cancelled one is nobody's error
    assert summary.valid_rate == 3 / 4  # one of five was not assessed
    assert (summary.refused, summary.truncated) == (1, 1)
    assert summary.deadline_met_rate == 5 / 8


def test_throughput_is_over_the_time_from_first_start_to_last_finish(mixed: Any) -> None:
    summary = summarize(mixed.requests())
    assert summary.wall_seconds == 9.5  # the failed one ran longest; the expired one never started
    assert summary.output_tokens == 400
    assert summary.total_tokens == 450
    assert summary.output_tokens_per_second == 400 / 9.5
    assert summary.total_tokens_per_second == 450 / 9.5
    assert summary.requests_per_second == 5 / 9.5


def test_money_is_what_all_of_them_cost_over_what_came_out(mixed: Any) -> None:
    summary = summarize(mixed.requests())
    # 4 + 0.5 + 1.5 + 0.5 = 6.5 busy seconds at 0.0015
    assert (summary.cost_total, summary.currency) == (Decimal("0.00975"), "TWD")
    assert summary.cost_per_1k_output_tokens == Decimal("0.024375")
    assert summary.cost_per_item == Decimal("0.00975") / 9
    assert summary.cost_per_successful_item == Decimal("0.00195")
    assert summary.cost_per_valid_item == Decimal("0.00325")


def test_energy_and_carbon_follow_the_busy_seconds(mixed: Any) -> None:
    summary = summarize(mixed.requests())
    assert summary.energy_kwh == Decimal("0.00065")  # 360 W * 6.5 s
    assert summary.carbon_kg == Decimal("0.000325")
    assert summary.energy_source == "estimated"
    Usage.objects.filter(request__custom_id="row-0").update(energy_source="measured")
    assert summarize(mixed.requests()).energy_source == "mixed"


def test_the_figures_equal_a_hand_written_query(mixed: Any) -> None:
    summary = summarize(mixed.requests())
    expected = sql(
        """
        SELECT count(*) FILTER (WHERE r.status = 'succeeded'),
               sum(r.output_tokens),
               sum(r.output_tokens) / extract(epoch FROM max(r.finished_at) FILTER (WHERE r.started_at IS NOT NULL)
                                                         - min(r.started_at))::float8,
               percentile_cont(0.95) WITHIN GROUP (ORDER BY r.ttft_seconds) FILTER (WHERE r.status = 'succeeded'),
               percentile_cont(0.5) WITHIN GROUP (ORDER BY r.duration_seconds) FILTER (WHERE r.status = 'succeeded'),
               sum(u.cost), sum(u.cost) * 1000 / sum(r.output_tokens)
        FROM serving_request r LEFT JOIN telemetry_usage u ON u.request_id = r.id WHERE r.task_id = %s
        """,
        mixed.task.pk,
    )
    assert expected == (
        summary.succeeded,
        summary.output_tokens,
        pytest.approx(summary.output_tokens_per_second),
        summary.ttft_p95_seconds,
        summary.duration_p50_seconds,
        summary.cost_total,
        summary.cost_per_1k_output_tokens,
    )


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(min_value=0, max_value=1e4), min_size=1, max_size=30))
def test_percentiles_are_numpys_linear_ones(floor: Any, values: list[float]) -> None:
    Request.objects.all().delete()
    for value in values:
        floor.request(seconds=1, ttft_seconds=value, queued_seconds=value, duration_seconds=value)
    summary = summarize(floor.requests())
    for percent in (50, 95, 99):
        expected = pytest.approx(float(np.percentile(values, percent, method="linear")), rel=1e-9, abs=1e-12)
        assert getattr(summary, f"ttft_p{percent}_seconds") == expected
        assert getattr(summary, f"duration_p{percent}_seconds") == expected
    assert summary.queued_p95_seconds == pytest.approx(float(np.percentile(values, 95)), rel=1e-9, abs=1e-12)


def test_a_request_that_fails_at_once_is_not_a_fast_one(mixed: Any) -> None:
    assert summarize(mixed.requests()).ttft_p50_seconds == pytest.approx(0.25)


def test_nothing_measured_is_none_and_not_zero(floor: Any) -> None:
    summary = summarize(floor.requests())
    assert summary.requests == 0
    figures = {
        name: value
        for name, value in summary.as_json().items()
        if name.endswith(("_rate", "_seconds", "_tokens", "_second", "_item", "_kwh", "_kg", "_total", "_source"))
    }
    assert len(figures) > 20
    assert set(figures.values()) == {None}


def test_rates_over_active_time_leave_out_the_hours_between_batches(floor: Any) -> None:
    floor.request(start=0, seconds=10, output_tokens=50)
    floor.request(start=5, seconds=10, output_tokens=50)
    floor.request(start=36_000, seconds=5, output_tokens=100)
    summary = summarize(floor.requests(), per="active")
    assert (summary.wall_seconds, summary.active_seconds) == (36_005.0, 20.0)
    assert summary.output_tokens_per_second == 10.0


def test_two_currencies_are_listed_and_never_added(floor: Any, round_card: RateCard) -> None:
    record_usage([floor.request(compute_seconds=1.0, output_tokens=1)])
    record_usage([floor.request(compute_seconds=2.0, output_tokens=1)])
    Usage.objects.filter(compute_seconds=2.0).update(currency="EUR")
    summary = summarize(floor.requests())
    assert [(money.currency, money.amount) for money in summary.costs] == [
        ("EUR", Decimal("0.003")),
        ("TWD", Decimal("0.0015")),
    ]
    assert (summary.cost_total, summary.cost_per_item, summary.currency) == (None, None, "")


def test_summaries_by_a_field_equal_the_summaries_of_its_parts(mixed: Any, next_door: Any) -> None:
    next_door.request(compute_seconds=1.0, output_tokens=3, ttft_seconds=0.5)
    parts = summarize_by(Request.objects.all(), "task_id", per="wall")
    assert parts == {floor.task.pk: summarize(Request.objects.filter(task=floor.task)) for floor in (mixed, next_door)}


def test_the_overview_shows_ones_own_tasks_only(mixed: Any, next_door: Any, people: Any) -> None:
    long_ago = dt.timedelta(days=36_500)
    seen = {overview.task.name for overview in by_task(people.auditor)}
    assert seen == {"descriptions"}
    assert {o.task.name for o in by_task(people.outsider)} == {"next-door"}
    both = {o.task.name: o.summary for o in by_task(people.administrator, days=long_ago.days)}
    assert both["descriptions"].finished == 9
    assert both["next-door"].finished == 0
    assert both["next-door"].cost_total is None


def test_a_summary_is_plain_json_with_amounts_as_text(mixed: Any) -> None:
    import json

    plain = json.loads(json.dumps(summarize(mixed.requests()).as_json()))
    assert Decimal(plain["cost_total"]) == Decimal("0.00975")
    assert plain["first_started_at"] == "2026-11-02T12:00:00Z"

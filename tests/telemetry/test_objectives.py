"""Objectives held against what happened."""

from decimal import Decimal
from typing import Any

import pytest

from penstock.telemetry.models import RateCard
from penstock.telemetry.objectives import judge
from penstock.telemetry.recorder import record_usage


@pytest.fixture
def busy(floor: Any, round_card: RateCard) -> Any:
    rows = [
        floor.request(start=n, seconds=1, ttft_seconds=0.2, output_tokens=10, compute_seconds=1.0, valid=n != 0)
        for n in range(19)
    ]
    rows.append(floor.request(status="failed", start=19, seconds=1, compute_seconds=1.0, error_code="engine_error"))
    record_usage(rows)
    return floor


def verdicts(floor: Any, *objectives: dict[str, str]) -> list[tuple[Decimal | None, str, str]]:
    floor.task.objectives = list(objectives)
    return [(r.value, r.unit, r.verdict) for r in judge(task=floor.task, requests=floor.requests())]


def test_a_figure_that_equals_its_target_meets_it(busy: Any) -> None:
    # 1 of 20 failed, 0.0015 * 20 over 190 tokens, 190 tokens in 20 s.
    assert verdicts(
        busy,
        {"metric": "error_rate", "target": "0.05"},
        {"metric": "deadline_met_rate", "target": "0.95"},
        {"metric": "output_tokens_per_second", "target": "9.5"},
        {"metric": "ttft_p95_seconds", "target": "0.2"},
    ) == [
        (Decimal("0.05"), "ratio", "met"),
        (Decimal("0.95"), "ratio", "met"),
        (Decimal("9.5"), "tokens/s", "met"),
        (Decimal("0.2"), "s", "met"),
    ]


def test_each_metric_knows_which_way_is_better(busy: Any) -> None:
    assert [verdict for _, _, verdict in verdicts(
        busy,
        {"metric": "error_rate", "target": "0.04"},
        {"metric": "valid_rate", "target": "0.95"},
        {"metric": "duration_p95_seconds", "target": "0.5"},
        {"metric": "output_tokens_per_second", "target": "10"},
    )] == ["not_met", "not_met", "not_met", "not_met"]  # fmt: skip


def test_a_cost_in_another_currency_is_no_data(busy: Any) -> None:
    found = verdicts(busy, {"metric": "cost_per_1k_output_tokens", "target": "1", "unit": "EUR"})
    assert found == [(None, "EUR", "no_data")]
    [(value, _, verdict)] = verdicts(busy, {"metric": "cost_per_1k_output_tokens", "target": "0.2", "unit": "TWD"})
    assert (value, verdict) == (Decimal("0.03") * 1000 / 190, "met")


def test_without_requests_nothing_is_met_and_nothing_missed(floor: Any) -> None:
    assert verdicts(floor, {"metric": "error_rate", "target": "0.05"}, {"metric": "valid_rate", "target": "0.5"}) == [
        (None, "ratio", "no_data"),
        (None, "ratio", "no_data"),
    ]


def test_a_task_without_objectives_is_not_judged(busy: Any) -> None:
    assert verdicts(busy) == []

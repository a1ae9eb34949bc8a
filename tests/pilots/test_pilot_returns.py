"""What a pilot returns, against figures worked out by hand and against SQL."""

from decimal import Decimal
from typing import Any

import pytest
from django.db import connection

from penstock.pilots.returns import returns

pytestmark = pytest.mark.django_db


@pytest.fixture
def measured(make_pilot: Any, baseline_of: Any, trial_of: Any) -> Any:
    """Four items: 2 + 3 + 4 + 1 = 10 s one at a time; 2.5 s in the trial."""
    pilot = make_pilot()
    baseline_of(pilot, [2.0, 3.0, 4.0, 1.0], valid=[True, True, False, True])
    trial_of(pilot, [1.0, 2.0, 2.5, 0.5], texts=["A fine product.", "Tea.", "A cup of tea.", "A tray."])
    return pilot


def test_the_multiple_is_the_ratio_of_items_per_second(measured: Any) -> None:
    figures = returns(measured)
    assert figures.complete
    assert figures.baseline is not None and figures.trial is not None
    assert (figures.baseline.seconds, figures.trial.seconds) == (Decimal("10.0"), Decimal("2.5"))
    assert figures.baseline.items_per_second == pytest.approx(0.4)
    assert figures.trial.items_per_second == pytest.approx(1.6)
    assert figures.throughput_multiple == pytest.approx(4.0)
    assert figures.token_throughput_multiple == pytest.approx(4.0)
    assert figures.throughput_multiple_low is not None and figures.throughput_multiple_high is not None
    assert figures.throughput_multiple_low < 4.0 < figures.throughput_multiple_high


def test_costs_savings_and_payback_follow_from_seconds_and_the_rate_card(measured: Any) -> None:
    figures = returns(measured)
    assert figures.baseline is not None and figures.trial is not None
    # 10 s x 0.0102 = 0.102 for four items; 2.5 s x 0.0102 = 0.0255.
    assert figures.baseline.cost_per_item == Decimal("0.0255")
    assert figures.trial.cost_per_item == Decimal("0.006375")
    # Three of four are valid both ways ("Tea." is shorter than five characters).
    assert (figures.baseline.valid, figures.trial.valid) == (3, 3)
    assert figures.baseline.cost_per_valid_item == Decimal("0.034")
    assert figures.trial.cost_per_valid_item == Decimal("0.0085")
    assert figures.saving_per_item == Decimal("0.019125")
    # 100,000 items a month.
    assert figures.saving_per_month == Decimal("1912.5")
    assert figures.power_saving_per_month == Decimal("37.5")  # 187,500 s x 0.0002
    assert figures.hardware_saving_per_month == Decimal("1875")
    assert figures.payback_months is not None
    assert float(figures.payback_months) == pytest.approx(5000 / 1912.5)
    # 2.5 s an item: 69.44 h a month, in one host; 0.625 s: 17.36 h.
    assert float(figures.baseline.machine_hours_per_month or 0) == pytest.approx(69.4444, abs=1e-4)
    assert float(figures.trial.machine_hours_per_month or 0) == pytest.approx(17.3611, abs=1e-4)
    assert (figures.baseline.hosts_needed, figures.trial.hosts_needed) == (1, 1)
    # 180 W x 2.5 s x 1000 = 450 kJ = 0.125 kWh; carbon at 0.5 kg a kWh.
    assert figures.baseline.energy_kwh_per_1k_items == Decimal("0.125")
    assert figures.trial.energy_kwh_per_1k_items == Decimal("0.03125")
    assert figures.baseline.carbon_kg_per_1k_items == Decimal("0.0625")


def test_more_hosts_are_needed_when_the_month_is_too_short(make_pilot: Any, baseline_of: Any) -> None:
    pilot = make_pilot(items_per_month=3_000_000)
    baseline_of(pilot, [1.0, 1.0, 1.0, 1.0])
    figures = returns(pilot)
    assert figures.baseline is not None
    assert figures.baseline.hosts_needed == 2  # 833.3 hours; a month has 730.5
    assert not figures.complete
    assert figures.trial is None and figures.payback_months is None
    assert "trial has not completed" in " ".join(figures.remarks)


def test_a_slower_trial_is_never_paid_back(make_pilot: Any, baseline_of: Any, trial_of: Any) -> None:
    pilot = make_pilot()
    baseline_of(pilot, [1.0] * 4)
    trial_of(pilot, [8.0] * 4)
    figures = returns(pilot)
    assert figures.throughput_multiple == pytest.approx(0.5)
    assert figures.saving_per_month is not None and figures.saving_per_month < 0
    assert figures.payback_months is None
    assert "never paid back" in figures.payback_remark


def test_a_failed_item_of_the_trial_counts_in_its_time_alone(make_pilot: Any, baseline_of: Any, trial_of: Any) -> None:
    pilot = make_pilot()
    baseline_of(pilot, [1.0] * 4)
    trial_of(pilot, [1.0, 1.0, 1.0, 2.0], failed=[4])
    figures = returns(pilot)
    assert figures.trial is not None
    assert (figures.trial.items, figures.trial.delivered) == (4, 3)
    assert figures.trial.items_per_second == pytest.approx(1.5)
    assert figures.throughput_multiple == pytest.approx(1.5)
    assert any("gave no output" in remark for remark in figures.remarks)


def test_quality_is_undecided_with_few_items(measured: Any) -> None:
    quality = returns(measured).quality
    assert quality is not None
    assert quality.difference == pytest.approx(0.0)
    assert quality.verdict == "undecided"


def test_identical_outputs_are_counted(measured: Any) -> None:
    assert returns(measured).identical_outputs == 1


def test_other_work_in_the_trials_time_is_told(measured: Any, make_pilot: Any, baseline_of: Any, trial_of: Any) -> None:
    assert returns(measured).trial_disturbed_by == 0
    other = make_pilot(name="other-pilot")
    baseline_of(other, [1.0] * 4)  # begins an hour before the trials
    trial_of(other, [1.0] * 4)  # at the same time as the first
    figures = returns(measured)
    assert figures.trial_disturbed_by == 4
    assert any("trial was disturbed" in remark for remark in figures.remarks)


def test_the_sensitivity_moves_one_assumption_at_a_time(measured: Any) -> None:
    rows = {row.factor: row for row in returns(measured).sensitivity}
    assert set(rows) == {
        "utilization",
        "electricity_price",
        "hardware_price",
        "items_per_month",
        "introduction_cost",
        "throughput_multiple",
    }
    # Utilization is 1 already and cannot rise; halved, hardware costs twice as much a second, so more is saved.
    assert rows["utilization"].high == 1
    assert rows["utilization"].npv_at_low > rows["utilization"].npv_at_high
    cheap, dear = rows["introduction_cost"].npv_at_low, rows["introduction_cost"].npv_at_high
    assert float(cheap - dear) == pytest.approx(5000)
    spreads = [row.spread for row in returns(measured).sensitivity]
    assert spreads == sorted(spreads, reverse=True)


def test_the_net_present_value_is_that_of_an_annuity(measured: Any) -> None:
    figures = returns(measured)
    monthly = 1.05 ** (1 / 12) - 1
    annuity = (1 - (1 + monthly) ** -12) / monthly
    assert float(figures.npv_12_months or 0) == pytest.approx(1912.5 * annuity - 5000)


def test_figures_equal_a_hand_written_query(measured: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT (SELECT count(*) / sum(i.duration_seconds) FROM pilots_baselineitem i
                    JOIN pilots_baselinerun r ON r.id = i.run_id WHERE r.pilot_id = %(pilot)s),
                   (SELECT count(*) FILTER (WHERE status = 'succeeded')
                           / extract(epoch FROM max(finished_at) - min(started_at))
                    FROM serving_request WHERE batch_id = %(batch)s),
                   (SELECT avg(valid::int) FROM serving_request WHERE batch_id = %(batch)s),
                   (SELECT sum(output_tokens) FROM serving_request WHERE batch_id = %(batch)s)
            """,
            {"pilot": measured.pk, "batch": measured.trial_batch_id},
        )
        baseline_rate, trial_rate, valid_rate, tokens = cursor.fetchone()
    figures = returns(measured)
    assert figures.throughput_multiple == pytest.approx(float(trial_rate) / float(baseline_rate))
    assert figures.trial is not None
    assert figures.trial.valid_rate == pytest.approx(float(valid_rate))
    assert figures.trial.output_tokens == tokens


def test_figures_survive_json(measured: Any) -> None:
    import json

    plain = json.loads(json.dumps(returns(measured).as_json()))
    assert plain["saving_per_month"].rstrip("0").rstrip(".") == "1912.5"
    assert plain["baseline"]["items"] == 4
    assert all(isinstance(text, str) and text for text in plain["how"].values())

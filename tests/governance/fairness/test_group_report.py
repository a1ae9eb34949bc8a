"""Rates, ratios and verdicts against textbook figures and hand calculation."""

import math
import random
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from governance.fairness.outcomes import (
    FairnessReport,
    Favourable,
    OutcomeRow,
    Reason,
    Thresholds,
    Verdict,
)
from governance.fairness.report import group_report, ratio_interval, wilson

ROW = OutcomeRow(
    group="en",
    valid=True,
    refused=False,
    truncated=False,
    error=False,
    ttft_seconds=0.5,
    output_tokens=40,
    prompt_tokens=60,
    cost=Decimal("0.002"),
)


def rows_of(group: str, valid: int, count: int) -> list[OutcomeRow]:
    return [replace(ROW, group=group, valid=index < valid) for index in range(count)]


def report_of(*groups: tuple[str, int, int], thresholds: Thresholds | None = None) -> FairnessReport:
    rows = [row for group, valid, count in groups for row in rows_of(group, valid, count)]
    return group_report(rows, thresholds)


@pytest.mark.parametrize(
    ("events", "count", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_rates_carry_the_wilson_interval_of_the_textbook(events: int, count: int, low: float, high: float) -> None:
    rate = wilson(events, count)
    assert rate.rate == events / count
    assert rate.interval is not None
    assert rate.interval.low == pytest.approx(low, abs=5e-5)
    assert rate.interval.high == pytest.approx(high, abs=5e-5)


def test_a_rate_of_nothing_is_no_rate() -> None:
    assert wilson(0, 0).rate is None
    assert wilson(0, 0).interval is None


def test_a_ratio_carries_katzs_interval_of_the_textbook() -> None:
    # Physicians' Health Study: 189 of 11,034 against 104 of 11,037; Agresti gives 1.82 (1.43 to 2.31).
    interval = ratio_interval(wilson(189, 11034), wilson(104, 11037))
    assert interval is not None
    assert interval.low == pytest.approx(1.43, abs=0.005)
    assert interval.high == pytest.approx(2.31, abs=0.005)


def test_a_ratio_without_events_has_no_interval() -> None:
    assert ratio_interval(wilson(0, 32), wilson(30, 32)) is None


def test_a_group_that_is_served_far_worse_fails() -> None:
    report = report_of(("en", 30, 32), ("zh-Hant", 4, 32))
    worse = report.group("zh-Hant")
    assert report.reference == "en"
    assert worse.ratio == pytest.approx(4 / 30)
    assert (worse.verdict, worse.reason) == (Verdict.FAIL, Reason.BELOW)
    spread = 1.959963984540054 * math.sqrt(1 / 4 - 1 / 32 + 1 / 30 - 1 / 32)
    assert worse.ratio_interval is not None
    assert worse.ratio_interval.low == pytest.approx(4 / 30 * math.exp(-spread))
    assert worse.ratio_interval.high == pytest.approx(4 / 30 * math.exp(spread))
    assert not worse.straddles_threshold
    assert report.lowest_ratio == pytest.approx(4 / 30)
    assert report.failing == (worse,)


def test_a_group_with_no_favourable_outcome_at_all_fails_rather_than_escapes() -> None:
    none = report_of(("en", 30, 32), ("zh-Hant", 0, 32)).group("zh-Hant")
    assert (none.ratio, none.ratio_interval, none.verdict) == (0.0, None, Verdict.FAIL)


def test_the_best_group_is_the_reference_and_has_no_interval_with_itself() -> None:
    best = report_of(("en", 30, 32), ("zh-Hant", 28, 32)).group("en")
    assert (best.ratio, best.ratio_interval, best.reason) == (1.0, None, Reason.REFERENCE)


def test_a_ratio_of_exactly_the_threshold_passes() -> None:
    # 20 of 30 over 25 of 30 is 0.8; in floats it comes out as 0.7999999999999999.
    assert (20 / 30) / (25 / 30) < 0.8
    exact = report_of(("a", 25, 30), ("b", 20, 30)).group("b")
    assert (exact.verdict, exact.reason) == (Verdict.PASS, Reason.ABOVE)
    assert exact.straddles_threshold


def test_a_pass_that_the_data_leave_open_says_so() -> None:
    group = report_of(("en", 31, 32), ("zh-Hant", 26, 32)).group("zh-Hant")
    assert group.verdict is Verdict.PASS
    assert group.ratio_interval is not None
    assert group.ratio_interval.low < 0.8 < group.ratio_interval.high
    assert group.straddles_threshold


def test_a_small_group_is_neither_passed_nor_failed() -> None:
    report = report_of(("en", 30, 32), ("ja", 0, 29))
    assert (report.group("ja").verdict, report.group("ja").reason) == (
        Verdict.INSUFFICIENT,
        Reason.FEW_REQUESTS,
    )
    assert report.insufficient == (report.group("en"), report.group("ja"))


def test_a_small_perfect_group_is_not_the_reference() -> None:
    report = report_of(("en", 30, 32), ("zh-Hant", 29, 32), ("ja", 3, 3))
    assert report.reference == "en"
    assert report.group("zh-Hant").ratio == pytest.approx(29 / 30)


def test_too_few_expected_events_are_insufficient_data() -> None:
    # The best group's 6 of 100 would give 2.4 events among 40: chance alone could make any ratio.
    group = report_of(("en", 6, 100), ("zh-Hant", 1, 40)).group("zh-Hant")
    assert (group.verdict, group.reason) == (Verdict.INSUFFICIENT, Reason.FEW_EVENTS)


def test_one_group_alone_is_compared_with_nothing() -> None:
    only = report_of(("en", 30, 32)).group("en")
    assert (only.verdict, only.reason) == (Verdict.INSUFFICIENT, Reason.ONE_GROUP)


def test_without_any_favourable_outcome_there_is_no_ratio() -> None:
    report = report_of(("en", 0, 40), ("zh-Hant", 0, 40))
    assert {group.reason for group in report.groups} == {Reason.NO_FAVOURABLE}
    assert report.lowest_ratio is None


def test_no_rows_make_an_empty_report() -> None:
    report = group_report([])
    assert (report.groups, report.reference, report.count, report.lowest_ratio) == ((), None, 0, None)


def test_an_error_counts_against_a_group_and_an_unchecked_output_does_not() -> None:
    rows = [
        *rows_of("en", 30, 30),
        *(replace(ROW, valid=None, error=True, ttft_seconds=None) for _ in range(10)),
        *(replace(ROW, valid=None) for _ in range(10)),
    ]
    group = group_report(rows).group("en")
    assert (group.favourable.events, group.favourable.count) == (30, 40)
    assert (group.valid.events, group.valid.count) == (30, 30)
    assert (group.error.events, group.error.count) == (10, 50)


def test_without_any_checked_output_being_served_is_compared() -> None:
    rows = [replace(ROW, valid=None, group=group) for group in ("en", "zh-Hant") for _ in range(40)]
    rows[:20] = [replace(row, error=True) for row in rows[:20]]
    rows[40:44] = [replace(row, refused=True) for row in rows[40:44]]
    report = group_report(rows)
    assert report.favourable is Favourable.SERVED
    assert report.reference == "zh-Hant"
    assert report.group("en").ratio == pytest.approx((20 / 40) / (36 / 40))
    assert report.group("zh-Hant").refused.events == 4


def test_rows_that_name_no_group_are_counted_and_not_judged() -> None:
    report = group_report([*rows_of("en", 30, 32), *rows_of("", 0, 5)])
    assert (report.count, report.without_group, len(report.groups)) == (37, 5, 1)


def test_service_figures_are_a_request_each() -> None:
    rows = [
        replace(ROW, ttft_seconds=0.1, output_tokens=10, prompt_tokens=20, cost=Decimal("0.001")),
        replace(ROW, ttft_seconds=0.2, output_tokens=20, prompt_tokens=40, cost=Decimal("0.002")),
        replace(ROW, ttft_seconds=0.9, output_tokens=30, prompt_tokens=60, cost=Decimal("0.003")),
        replace(ROW, ttft_seconds=None, output_tokens=0, prompt_tokens=80, cost=Decimal("0.002"), error=True),
        replace(ROW, group="zh-Hant", cost=Decimal("0.003"), truncated=True),
    ]
    report = group_report(rows)
    english, chinese = report.group("en"), report.group("zh-Hant")
    assert english.ttft_mean_seconds == pytest.approx(0.4)
    assert english.ttft_p50_seconds == 0.2
    assert english.prompt_tokens_per_item == 50
    assert english.output_tokens_per_item == 15
    assert english.cost_per_item == Decimal("0.002")
    assert (english.cost_multiple, chinese.cost_multiple) == (1.0, 1.5)
    assert (chinese.truncated.events, english.truncated.events) == (1, 0)


def test_cost_multiples_need_a_cost() -> None:
    report = group_report([replace(ROW, cost=Decimal(0)), replace(ROW, group="zh-Hant")])
    assert [group.cost_multiple for group in report.groups] == [None, None]


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_ratio": Decimal(0)},
        {"min_ratio": Decimal("1.2")},
        {"min_count": 0},
        {"min_events": -1},
        {"confidence": 1.0},
    ],
)
def test_impossible_thresholds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Thresholds(**wrong)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    groups=st.dictionaries(
        st.sampled_from(["en", "zh-Hant", "ja", "ko"]),
        st.tuples(st.integers(0, 60), st.integers(1, 60)).map(lambda pair: (min(pair), max(pair))),
        max_size=4,
    ),
    seed=st.randoms(use_true_random=False),
)
def test_the_report_keeps_its_promises_whatever_the_groups(
    groups: dict[str, tuple[int, int]], seed: random.Random
) -> None:
    rows = [row for group, (valid, count) in groups.items() for row in rows_of(group, valid, count)]
    report = group_report(rows)
    seed.shuffle(rows)
    assert group_report(rows) == report  # the order of rows means nothing
    assert sum(group.count for group in report.groups) == len(rows)
    for group in report.groups:
        rate = group.favourable
        assert rate.rate is not None and rate.interval is not None
        # A bound may miss 0 or 1 by a rounding error of the last digit.
        assert rate.interval.low - 1e-12 <= rate.rate <= rate.interval.high + 1e-12
        if group.count < report.thresholds.min_count:
            assert group.verdict is Verdict.INSUFFICIENT
        if group.verdict is Verdict.FAIL:
            assert group.ratio is not None and group.ratio < 0.8
        if group.ratio_interval is not None:
            assert group.ratio is not None
            assert group.ratio_interval.low <= group.ratio <= group.ratio_interval.high


def test_a_report_needs_neither_django_settings_nor_torch() -> None:
    code = (
        "import sys; from tests.governance.fairness.test_group_report import report_of;"
        "report_of(('en', 30, 32), ('zh-Hant', 4, 32));"
        "assert 'torch' not in sys.modules and 'django' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])

"""Intervals and money, against published examples and figures worked out by hand."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pilots import arithmetic
from penstock.pilots.arithmetic import Pair


def test_newcombes_published_example() -> None:
    # Newcombe 1998, table II, contrast (a): 56/70 less 48/80, method 10.
    found = arithmetic.difference_interval(56, 70, 48, 80)
    assert found is not None
    assert (round(found.low, 4), round(found.high, 4)) == (0.0524, 0.3339)


def test_no_interval_without_counts() -> None:
    assert arithmetic.wilson(0, 0) is None
    assert arithmetic.difference_interval(1, 2, 0, 0) is None


def test_payback_is_cost_by_saving_and_none_without_a_saving() -> None:
    assert arithmetic.payback_months(Decimal(600), Decimal(200)) == 3
    assert arithmetic.payback_months(Decimal(0), Decimal(200)) == 0
    assert arithmetic.payback_months(Decimal(600), Decimal(0)) is None
    assert arithmetic.payback_months(Decimal(0), Decimal(-1)) is None


def test_without_discount_the_value_is_the_sum() -> None:
    value = arithmetic.net_present_value(Decimal(500), Decimal(100), months=12, discount_rate=Decimal(0))
    assert value == 700


def test_equal_items_have_a_multiple_without_spread() -> None:
    pairs = [Pair(baseline_seconds=2.0, trial_share=0.1, baseline_tokens=5, trial_tokens=5)] * 8
    by_items, by_tokens = arithmetic.multiple_intervals(pairs, trial_seconds=4.0)
    assert by_items is not None and by_tokens is not None
    assert (by_items.low, by_items.high) == pytest.approx((4.0, 4.0))
    assert (by_tokens.low, by_tokens.high) == pytest.approx((4.0, 4.0))


def test_the_same_measurements_give_the_same_interval() -> None:
    pairs = [Pair(float(n), 0.1 * n, n, n) for n in range(1, 9)]
    assert arithmetic.multiple_intervals(pairs, 3.0) == arithmetic.multiple_intervals(pairs, 3.0)


def test_one_item_has_no_interval() -> None:
    assert arithmetic.multiple_intervals([Pair(1.0, 1.0, 1, 1)], 1.0) == (None, None)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.floats(0.01, 10), st.integers(1, 200), st.integers(1, 200)),
        min_size=2,
        max_size=12,
    ),
    st.floats(0.1, 100),
)
def test_an_interval_lies_within_the_extremes_of_its_items(
    items: list[tuple[float, float, int, int]], trial_seconds: float
) -> None:
    pairs = [Pair(*item) for item in items]
    by_items, _by_tokens = arithmetic.multiple_intervals(pairs, trial_seconds)
    assert by_items is not None
    total = sum(pair.trial_share for pair in pairs)
    each = [pair.baseline_seconds / (trial_seconds * pair.trial_share / total) for pair in pairs]
    assert min(each) * 0.999999 <= by_items.low <= by_items.high <= max(each) * 1.000001


def test_hosts_run_day_and_night() -> None:
    assert arithmetic.hosts_needed(Decimal("730.5")) == 1
    assert arithmetic.hosts_needed(Decimal("730.6")) == 2
    assert arithmetic.hosts_needed(Decimal(0)) == 1

"""How figures are written."""

import datetime as dt
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dashboard.templatetags import figures


def plain(html: Any) -> str:
    return re.sub(r"<[^>]+>", "", str(html)).replace("\N{NARROW NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    (
        (0, "0"),
        (1234567, "1,234,567"),
        (1234.5, "1,234"),
        (45.678, "45.7"),
        (9.996, "10.0"),
        (0.99949, "0.999"),
        (0.012345, "0.0123"),
        (0.00000832, "0.00000832"),
        (Decimal("0.1"), "0.100"),
        (-2.5, "-2.50"),
        (1e-12, "0.00000000000100"),
    ),
)
def test_three_significant_digits(value: Any, text: str) -> None:
    assert figures.significant(value) == text


@given(st.decimals(min_value=Decimal("1e-9"), max_value=Decimal("1e12"), places=10))
def test_rounding_is_within_half_a_unit_of_the_third_digit(value: Decimal) -> None:
    if value == 0:
        return
    shown = Decimal(figures.significant(value).replace(",", ""))
    assert abs(shown - value) <= max(abs(value) * Decimal("0.006"), Decimal("0.5") if value >= 100 else Decimal(0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    (
        (0, "0 s"),
        (0.0421, "42.1 ms"),
        (0.9999, "1.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (75, "1 min 15 s"),
        (7500, "2 h 5 min"),
        (100_000, "1 d 3 h"),
        (dt.timedelta(minutes=3), "3 min 0 s"),
    ),
)
def test_durations_come_in_the_unit_that_suits(seconds: Any, text: str) -> None:
    assert plain(figures.duration(seconds)) == text


@pytest.mark.parametrize(
    ("size", "text"),
    ((0, "0 bytes"), (999, "999 bytes"), (90_600_000, "90.6 MB"), (999_600, "1.00 MB"), (5e15, "5,000 TB")),
)
def test_sizes(size: Any, text: str) -> None:
    assert plain(figures.filesize(size)) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    (
        (Decimal("1234.5"), "1,234.50 TWD"),
        (Decimal("0.000191"), "0.000191 TWD"),
        (Decimal("-8915.41"), "−8,915.41 TWD"),
        (0, "0.00 TWD"),
    ),
)
def test_money_keeps_its_currency_and_small_amounts_their_digits(amount: Any, text: str) -> None:
    assert plain(figures.money(amount, "TWD")) == text


def test_shares_and_their_intervals() -> None:
    assert plain(figures.percent(0.875)) == "87.5%"
    assert plain(figures.percent(1)) == "100%"
    assert plain(figures.percent(-0.0001)) == "0%"
    assert plain(figures.interval(0.376, 0.964)) == "(37.6–96.4%)"
    assert plain(figures.interval(-0.388, 0.192)) == "(−38.8 to 19.2%)"


@pytest.mark.parametrize(
    "show",
    (
        figures.integer,
        figures.number,
        figures.rate,
        figures.duration,
        figures.filesize,
        figures.money,
        figures.percent,
        figures.times,
        figures.moment,
        figures.ago,
        figures.day,
        figures.digest,
    ),
)
@pytest.mark.parametrize("nothing", (None, ""))
def test_what_is_not_known_is_a_dash_with_a_title(show: Any, nothing: Any) -> None:
    assert str(show(nothing)) == '<span class="none" title="No data">–</span>'


def test_how_long_ago() -> None:
    assert figures.since(0.2) == "now"
    assert figures.since(1) == "1 second ago"
    assert figures.since(150) == "2 minutes ago"
    assert figures.since(3 * 86_400) == "3 days ago"
    assert figures.since(-120) == "in 2 minutes"


def test_a_status_is_a_word_with_a_shape() -> None:
    from penstock.dashboard.templatetags.marks import SHAPES, TONES, mark
    from penstock.registry.models import ModelRelease, Task
    from penstock.serving.models import Batch, Request

    for status in (*Batch.Status, *Request.Status, *Task.Status, *ModelRelease.Status):
        html = str(mark(status, status.label))
        assert str(status.label) in html
        assert SHAPES[TONES[status.value]] in html

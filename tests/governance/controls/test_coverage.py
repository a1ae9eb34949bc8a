"""What stands behind a control: judged by freshness and threshold, told without a score."""

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal

import pytest
from django.utils import translation

from governance.controls.coverage import (
    ControlCoverage,
    ControlState,
    Verdict,
    coverage,
    coverage_of_all,
    judge,
    summarize,
)
from governance.controls.figures import age_text, figure_text, measurement_text, threshold_text
from governance.controls.rules import load_rules
from governance.controls.sources import (
    Measurement,
    MeasurementError,
    Scope,
    collect,
    register_source,
    registered_sources,
    unregister_source,
)

NOW = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
ISO = "iso-iec-42001-2023"
NIST = "nist-ai-rmf-1.0"
ERRORS = Measurement(
    key="requests.error_rate",
    value=0.02,
    unit="ratio",
    window_start=NOW - dt.timedelta(days=30),
    window_end=NOW,
    count=640,
    measured_at=NOW - dt.timedelta(hours=1),
    requests_query="task=1&status=failed",
)
ERROR_RULE = next(rule for rule in load_rules().rules if rule.id == "error-rate")
TTFT_RULE = next(rule for rule in load_rules().rules if rule.id == "time-to-first-token")


class Figures:
    """A source that knows these figures and remembers what it was asked."""

    def __init__(self, *measurements: Measurement) -> None:
        self.figures = {measurement.key: measurement for measurement in measurements}
        self.keys = frozenset(self.figures)
        self.asked: list[tuple[frozenset[str], Scope, int]] = []

    def measure(self, *, keys: frozenset[str], scope: Scope, window_days: int) -> Mapping[str, Measurement]:
        self.asked.append((keys, scope, window_days))
        return {key: self.figures[key] for key in keys}


@pytest.fixture(autouse=True)
def no_other_sources() -> Iterator[None]:
    """The platform's own sources step aside, so that these tests see theirs alone."""
    before = registered_sources()
    for source in before:
        unregister_source(source)
    yield
    for source in registered_sources():
        unregister_source(source)
    for source in before:
        register_source(source)


def covered(control_id: str, *measurements: Measurement, catalog_id: str = ISO) -> ControlCoverage:
    register_source(Figures(*measurements))
    found = coverage(catalog_id=catalog_id, scope=Scope(), window_days=30, now=NOW)
    return next(item for item in found if item.control.id == control_id)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.WITHIN),
        ({"value": 0.05}, Verdict.WITHIN),
        ({"value": 0.051}, Verdict.OUTSIDE),
        ({"measured_at": NOW - dt.timedelta(hours=168)}, Verdict.WITHIN),
        ({"measured_at": NOW - dt.timedelta(hours=168, seconds=1)}, Verdict.STALE),
        ({"measured_at": NOW - dt.timedelta(days=30), "value": 0.9}, Verdict.STALE),
        ({"value": None}, Verdict.NO_DATA),
        ({"value": 0.0, "count": 0}, Verdict.NO_DATA),
    ],
)
def test_a_figure_is_judged_by_data_then_age_then_threshold(change: dict[str, object], verdict: Verdict) -> None:
    assert judge(ERROR_RULE, replace(ERRORS, **change), now=NOW) == verdict  # type: ignore[arg-type]


def test_a_figure_without_a_threshold_is_recorded() -> None:
    figure = replace(ERRORS, key="requests.ttft_p95_seconds", unit="seconds")
    assert judge(TTFT_RULE, figure, now=NOW) == Verdict.RECORDED


def test_a_missing_figure_is_no_data() -> None:
    assert judge(ERROR_RULE, None, now=NOW) == Verdict.NO_DATA


def test_every_control_is_listed_in_the_catalogs_order() -> None:
    found = coverage(catalog_id=NIST, scope=Scope(), window_days=30, now=NOW)
    assert len(found) == 72
    assert found[0].control.id == "GOVERN 1.1"
    assert [group.id for group in found[0].groups] == ["GOVERN", "GOVERN 1"]


def test_a_control_with_a_fresh_figure_is_live_down_to_its_requests() -> None:
    control = covered("A.6.2.6", ERRORS)
    assert control.state == ControlState.LIVE
    (item,) = control.evidence
    assert item.measurement is ERRORS
    assert item.age == dt.timedelta(hours=1)
    assert control.newest == ERRORS.measured_at
    assert control.gap == f"{len(control.items) - 1} of {len(control.items)} figures stale or without data."
    assert len(control.next_questions) == len(control.items)


def test_one_figure_outside_its_threshold_marks_the_control() -> None:
    control = covered(
        "A.6.2.6",
        replace(ERRORS, value=0.5),
        replace(ERRORS, key="requests.valid_rate", value=0.99),
    )
    assert control.state == ControlState.OUTSIDE
    assert control.gap.startswith("1 of ")


def test_a_control_with_old_figures_only_is_stale() -> None:
    control = covered("A.6.2.6", replace(ERRORS, measured_at=NOW - dt.timedelta(days=20)))
    assert control.state == ControlState.STALE
    assert control.newest == NOW - dt.timedelta(days=20)


def test_a_control_without_figures_says_what_it_waits_for() -> None:
    control = covered("A.6.2.6")
    assert (control.state, control.newest, control.evidence) == (ControlState.NO_DATA, None, ())


def test_a_control_that_no_rule_names_needs_a_document_or_a_person() -> None:
    control = covered("A.2.2", ERRORS)
    assert control.state == ControlState.NOT_MAPPED
    assert "a document or a person" in control.gap


def test_the_summary_counts_controls_and_gives_no_score() -> None:
    register_source(Figures(ERRORS))
    counts = summarize(coverage(catalog_id=ISO, scope=Scope(), window_days=30, now=NOW))
    # 16 of the 38 have rules; error rate speaks to A.6.2.6 alone.
    assert (counts.total, counts.live, counts.no_data, counts.not_mapped) == (38, 1, 15, 22)
    assert counts.outside_threshold == counts.stale == 0


def test_several_catalogs_are_covered_from_one_measuring() -> None:
    source = Figures(ERRORS)
    register_source(source)
    scope = Scope(task_id=7, visible_task_ids=frozenset({7, 8}))
    found = coverage_of_all(scope=scope, window_days=14, now=NOW)
    assert source.asked == [(frozenset({"requests.error_rate"}), scope, 14)]
    assert {catalog_id: len(controls) for catalog_id, controls in found.items()} == {
        ISO: 38,
        NIST: 72,
        "eu-ai-act-2024": 15,
        "taiwan-ai-basic-act-2026": 7,
    }


def test_only_what_the_catalog_needs_is_measured() -> None:
    source = Figures(ERRORS, replace(ERRORS, key="energy.kwh", unit="kWh"))
    register_source(source)
    coverage(catalog_id="taiwan-ai-basic-act-2026", scope=Scope(), window_days=30, now=NOW)
    assert [keys for keys, _, _ in source.asked] == [frozenset({"energy.kwh"})]


def test_a_scope_never_reaches_beyond_what_the_reader_may_see() -> None:
    with pytest.raises(PermissionError):
        Scope(task_id=3, visible_task_ids=frozenset({7}))


def test_a_source_is_registered_once_and_its_keys_belong_to_it() -> None:
    source = Figures(ERRORS)
    register_source(source)
    register_source(source)
    assert registered_sources() == (source,)
    with pytest.raises(MeasurementError, match="supplied by another source"):
        register_source(Figures(ERRORS))


def test_a_source_of_unknown_measurements_is_refused() -> None:
    with pytest.raises(MeasurementError, match=r"requests\.mood"):
        register_source(Figures(replace(ERRORS, key="requests.mood")))


@pytest.mark.parametrize(
    ("measurement", "message"),
    [
        (replace(ERRORS, unit="seconds"), "unit must be 'ratio'"),
        (replace(ERRORS, key="cost.total", unit="dollars"), "currency code"),
    ],
)
def test_a_figure_in_the_wrong_unit_is_refused(measurement: Measurement, message: str) -> None:
    register_source(Figures(measurement))
    with pytest.raises(MeasurementError, match=message):
        collect(keys={measurement.key}, scope=Scope(), window_days=30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured_at": dt.datetime(2026, 11, 30)}, "time with a zone"),  # noqa: DTZ001
        ({"window_end": NOW - dt.timedelta(days=60)}, "ends before it starts"),
        ({"count": -1}, "must not be negative"),
        ({"value": float("nan")}, "finite"),
        ({"value": Decimal("Infinity")}, "finite"),
    ],
)
def test_a_measurement_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        replace(ERRORS, **change)  # type: ignore[arg-type]


def test_a_window_of_no_days_is_refused() -> None:
    with pytest.raises(MeasurementError, match="window_days"):
        collect(keys=set(), scope=Scope(), window_days=0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.02, "ratio", "2 %"),
        (0.98765, "ratio", "98.77 %"),
        (1.23456, "seconds", "1.235 s"),
        (100, "count", "100"),
        (12_345, "count", "12,345"),
        (Decimal("0.0000012345"), "TWD", "TWD 0.000001"),
        (Decimal("0.00000012345"), "TWD", "TWD 0.00000012"),
        (0, "TWD", "TWD 0"),
        (Decimal("1234.50"), "TWD", "TWD 1,234.5"),
        (3.999, "multiple", "4 times"),
        (0.00031, "kWh", "0.00031 kWh"),
        (None, "ratio", "–"),
    ],
)
def test_figures_read_with_their_unit(value: float | None, unit: str, text: str) -> None:
    with translation.override("en"):
        assert figure_text(value, unit) == text


def test_thresholds_ages_and_measurements_read_plainly() -> None:
    with translation.override("en"):
        assert threshold_text(ERROR_RULE.threshold) == "≤ 5 %"
        assert threshold_text(None) == "–"
        assert measurement_text(ERRORS) == "2 %"
        assert measurement_text(None) == "–"
        assert age_text(dt.timedelta(minutes=5)) == "5 min ago"
        assert age_text(dt.timedelta(hours=47)) == "47 h ago"
        assert age_text(dt.timedelta(days=3)) == "3 days ago"
        assert age_text(None) == "–"

"""What live evidence stands behind each control, how fresh it is, and what is missing. Never a score, never a verdict
of compliance: a figure within its threshold is one observation, and the text beside it says what it does not show."""

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

from governance.catalogs.loader import Catalog, Control, Group, Text, get_catalog, load_catalogs
from governance.controls.rules import MeasurementDefinition, Rule, load_rules
from governance.controls.sources import Measurement, Scope, collect


class Verdict(TextChoices):
    """What one figure says, held against its rule."""

    WITHIN = "within_threshold", _("within threshold")
    OUTSIDE = "outside_threshold", _("outside threshold")
    RECORDED = "recorded", _("recorded")
    STALE = "stale", _("stale")
    NO_DATA = "no_data", _("no data")


class ControlState(TextChoices):
    """What stands behind one control: the most telling of its figures' verdicts, or that no figure can."""

    OUTSIDE = "outside_threshold", _("a figure is outside its threshold")
    LIVE = "live", _("live evidence")
    STALE = "stale", _("stale evidence")
    NO_DATA = "no_data", _("no data yet")
    NOT_MAPPED = "not_mapped", _("missing: needs a document or a person")


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """One measurement (or its absence) held against one rule, at one time."""

    rule: Rule
    definition: MeasurementDefinition
    measurement: Measurement | None
    verdict: Verdict
    age: dt.timedelta | None


@dataclass(frozen=True, slots=True)
class ControlCoverage:
    """One control with its evidence."""

    catalog_id: str
    control: Control
    groups: tuple[Group, ...]
    items: tuple[EvidenceItem, ...]
    state: ControlState

    @property
    def evidence(self) -> tuple[EvidenceItem, ...]:
        """The items with data behind them, stale ones too."""
        return tuple(item for item in self.items if item.verdict != Verdict.NO_DATA)

    @property
    def newest(self) -> dt.datetime | None:
        """When the newest evidence was measured."""
        times = [item.measurement.measured_at for item in self.evidence if item.measurement is not None]
        return max(times, default=None)

    @property
    def next_questions(self) -> tuple[Text, ...]:
        """What an auditor would ask next, in the order of the items."""
        return tuple(item.rule.next_question for item in self.items)

    @property
    def gap(self) -> str:
        """What is missing, as a sentence in the active language."""
        count = Counter(item.verdict for item in self.items)
        if self.state == ControlState.NOT_MAPPED:
            return str(_("No figure of this platform can speak to this control: it needs a document or a person."))
        if self.state == ControlState.NO_DATA:
            return str(_("Figures could speak to this control, but nothing was recorded in this window."))
        if self.state == ControlState.STALE:
            return str(_("The evidence is older than its rules allow: run the task again, or explain why it rests."))
        if self.state == ControlState.OUTSIDE:
            return _("%(count)d of %(total)d figures outside threshold: needs a cause and a measure.") % {
                "count": count[Verdict.OUTSIDE],
                "total": len(self.items),
            }
        silent = count[Verdict.NO_DATA] + count[Verdict.STALE]
        if silent:
            return _("%(count)d of %(total)d figures stale or without data.") % {
                "count": silent,
                "total": len(self.items),
            }
        return str(
            _("The figures are live. The procedures and documents that the control asks for are not shown here.")
        )


@dataclass(frozen=True, slots=True)
class CoverageSummary:
    """How many controls are in which state. Counts only: they must not be added up to a score."""

    total: int
    live: int
    outside_threshold: int
    stale: int
    no_data: int
    not_mapped: int


def judge(rule: Rule, measurement: Measurement | None, *, now: dt.datetime) -> Verdict:
    """Hold a figure against a rule. An old figure is stale whatever it says: it does not describe the present."""
    if measurement is None or measurement.value is None or not measurement.has_data:
        return Verdict.NO_DATA
    if now - measurement.measured_at > dt.timedelta(hours=rule.freshness_hours):
        return Verdict.STALE
    if rule.threshold is None:
        return Verdict.RECORDED
    return Verdict.WITHIN if rule.threshold.holds(measurement.value) else Verdict.OUTSIDE


def coverage(
    *,
    catalog_id: str,
    scope: Scope,
    window_days: int,
    now: dt.datetime,
    measurements: Mapping[str, Measurement] | None = None,
) -> list[ControlCoverage]:
    """Every control of a catalog with what stands behind it, in the catalog's order.

    `measurements` are those of `measure_for_rules`, where a page shows several catalogs; by default they are
    collected here. Raises `UnknownCatalogError`.
    """
    catalog = get_catalog(catalog_id)
    rules = load_rules()
    if measurements is None:
        keys = {rule.measurement for rule in rules.rules if catalog_id in rule.controls}
        measurements = collect(keys=keys, scope=scope, window_days=window_days)
    return [
        _cover(catalog, control, rules.for_control(catalog_id, control.id), measurements, now)
        for control in catalog.controls
    ]


def measure_for_rules(*, scope: Scope, window_days: int) -> dict[str, Measurement]:
    """The measurements of all rules, collected once."""
    return collect(keys=load_rules().measurements, scope=scope, window_days=window_days)


def coverage_of_all(*, scope: Scope, window_days: int, now: dt.datetime) -> dict[str, list[ControlCoverage]]:
    """`coverage` for every catalog, from one set of measurements."""
    measurements = measure_for_rules(scope=scope, window_days=window_days)
    return {
        catalog_id: coverage(
            catalog_id=catalog_id, scope=scope, window_days=window_days, now=now, measurements=measurements
        )
        for catalog_id in load_catalogs()
    }


def summarize(controls: Iterable[ControlCoverage]) -> CoverageSummary:
    """Count controls by state."""
    states = Counter(control.state for control in controls)
    return CoverageSummary(
        total=sum(states.values()),
        live=states[ControlState.LIVE],
        outside_threshold=states[ControlState.OUTSIDE],
        stale=states[ControlState.STALE],
        no_data=states[ControlState.NO_DATA],
        not_mapped=states[ControlState.NOT_MAPPED],
    )


def _cover(
    catalog: Catalog,
    control: Control,
    rules: tuple[Rule, ...],
    measurements: Mapping[str, Measurement],
    now: dt.datetime,
) -> ControlCoverage:
    definitions = load_rules().measurements
    items = []
    for rule in rules:
        measurement = measurements.get(rule.measurement)
        verdict = judge(rule, measurement, now=now)
        age = None if measurement is None or verdict == Verdict.NO_DATA else now - measurement.measured_at
        items.append(EvidenceItem(rule, definitions[rule.measurement], measurement, verdict, age))
    return ControlCoverage(
        catalog_id=catalog.id,
        control=control,
        groups=catalog.group_path(control),
        items=tuple(items),
        state=_state({item.verdict for item in items}),
    )


def _state(verdicts: set[Verdict]) -> ControlState:
    if not verdicts:
        return ControlState.NOT_MAPPED
    if Verdict.OUTSIDE in verdicts:
        return ControlState.OUTSIDE
    if verdicts & {Verdict.WITHIN, Verdict.RECORDED}:
        return ControlState.LIVE
    if Verdict.STALE in verdicts:
        return ControlState.STALE
    return ControlState.NO_DATA

"""Where the figures come from: the interface that governance defines and the platform's rooms fill."""

import datetime as dt
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from threading import Lock
from typing import Any, Protocol

from governance.controls.rules import load_rules


class MeasurementError(ValueError):
    """A measurement contradicts itself, or a source answers what it does not know."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose figures: one task or all, and never beyond the tasks that the reader may see (None: all of them)."""

    task_id: int | None = None
    visible_task_ids: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.task_id is not None and self.visible_task_ids is not None and self.task_id not in self.visible_task_ids:
            raise PermissionError(f"task {self.task_id} is not among the tasks that this reader may see")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure over a window.

    `value` is None where nothing could be measured. `count` is the number of records behind the figure (requests,
    tasks, releases); with none behind it, a figure is no evidence. `measured_at` is the time of the newest of these
    records, or of the counting itself where the figure describes the present state (an inventory); freshness is
    reckoned from it. `unit` is that of the measurement's definition, or a currency code where that says `currency`.
    `requests_query` is the query string that lists the requests behind the figure, where there are any.
    """

    key: str
    value: Decimal | float | int | None
    unit: str
    window_start: dt.datetime
    window_end: dt.datetime
    count: int
    measured_at: dt.datetime
    details: dict[str, Any] = field(default_factory=dict)
    requests_query: str | None = None

    def __post_init__(self) -> None:
        for name in ("window_start", "window_end", "measured_at"):
            if getattr(self, name).utcoffset() is None:
                raise MeasurementError(f"{self.key}: {name} must be a time with a zone")
        if self.window_end < self.window_start:
            raise MeasurementError(f"{self.key}: the window ends before it starts")
        if self.count < 0:
            raise MeasurementError(f"{self.key}: count must not be negative, got {self.count}")
        if self.value is not None and not math.isfinite(self.value):
            raise MeasurementError(f"{self.key}: value must be a finite number or None, got {self.value}")

    @property
    def has_data(self) -> bool:
        return self.value is not None and self.count > 0


class MeasurementSource(Protocol):
    """Supplies some of the measurements that the rules name.

    `measure` returns those of the asked `keys` that it can, for the last `window_days` days; it leaves out a key that
    it has nothing to say about.
    """

    keys: frozenset[str]

    def measure(self, *, keys: frozenset[str], scope: Scope, window_days: int) -> Mapping[str, Measurement]: ...


_sources: list[MeasurementSource] = []
_lock = Lock()


def register_source(source: MeasurementSource) -> None:
    """Add a source, once: from `AppConfig.ready`. A key that no definition names, or that another source supplies,
    raises `MeasurementError`; registering the same source again changes nothing."""
    with _lock:
        if any(known is source for known in _sources):
            return
        unknown = source.keys - load_rules().measurements.keys()
        if unknown:
            raise MeasurementError(f"rules.yaml defines no measurement {', '.join(sorted(unknown))}")
        for known in _sources:
            taken = source.keys & known.keys
            if taken:
                raise MeasurementError(f"{', '.join(sorted(taken))}: supplied by another source already")
        _sources.append(source)


def unregister_source(source: MeasurementSource) -> None:
    """Take a source out again; nothing happens if it was never in."""
    with _lock:
        _sources[:] = [known for known in _sources if known is not source]


def registered_sources() -> tuple[MeasurementSource, ...]:
    with _lock:
        return tuple(_sources)


def collect(*, keys: Collection[str], scope: Scope, window_days: int) -> dict[str, Measurement]:
    """Ask every source for its part of `keys`. A source that fails raises: a coverage page with silently missing
    figures would be worse than none."""
    if window_days < 1:
        raise MeasurementError(f"window_days must be at least 1, got {window_days}")
    wanted = frozenset(keys)
    found: dict[str, Measurement] = {}
    for source in registered_sources():
        asked = wanted & source.keys
        if not asked:
            continue
        for key, measurement in source.measure(keys=asked, scope=scope, window_days=window_days).items():
            if key not in asked or measurement.key != key:
                raise MeasurementError(f"{type(source).__name__} answered {key!r}, which was not asked of it")
            check_unit(measurement)
            found[key] = measurement
    return found


def check_unit(measurement: Measurement) -> None:
    """Raise `MeasurementError` unless the unit is the defined one: seconds held against a ratio say nothing."""
    defined = load_rules().measurements[measurement.key].unit
    if defined == "currency":
        if not (len(measurement.unit) == 3 and measurement.unit.isalpha() and measurement.unit.isupper()):
            raise MeasurementError(
                f"{measurement.key}: unit must be a currency code such as TWD, got {measurement.unit!r}"
            )
    elif measurement.unit != defined:
        raise MeasurementError(f"{measurement.key}: unit must be {defined!r}, got {measurement.unit!r}")

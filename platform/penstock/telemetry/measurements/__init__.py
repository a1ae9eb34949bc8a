"""The figures that stand behind controls. `governance.controls` asks, by key; each figure says what it counted.

A figure is over the tasks of the scope, never beyond those that the reader may see. Figures of the installation as a
whole (hosts, the signed head of the log) are the same for every reader.
"""

from collections.abc import Mapping

from governance.controls.sources import Measurement, Scope
from penstock.telemetry.measurements.ledger import LEDGER_FIGURES
from penstock.telemetry.measurements.registry import REGISTRY_FIGURES
from penstock.telemetry.measurements.requests import REQUEST_FIGURES
from penstock.telemetry.measurements.window import Figure, Window

__all__ = ["FIGURES", "SOURCE", "TelemetrySource"]

FIGURES: Mapping[str, Figure] = {**REQUEST_FIGURES, **REGISTRY_FIGURES, **LEDGER_FIGURES}


class TelemetrySource:
    """Telemetry's `MeasurementSource`: everything but the figures of pilots, which live one room up."""

    keys = frozenset(FIGURES)

    def measure(self, *, keys: frozenset[str], scope: Scope, window_days: int) -> Mapping[str, Measurement]:
        window = Window(scope=scope, days=window_days)
        return {key: FIGURES[key](key, window) for key in sorted(keys & self.keys)}


SOURCE = TelemetrySource()

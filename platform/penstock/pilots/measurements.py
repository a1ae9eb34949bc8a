"""The figures of pilots that stand behind controls: whether uses of AI were decided upon, and on what."""

from collections.abc import Mapping

from django.utils import timezone

from governance.controls.sources import Measurement, Scope
from penstock.pilots.models import Pilot
from penstock.pilots.returns import returns
from penstock.serving.models import Batch
from penstock.telemetry.measurements.window import Window, narrowed

DECIDED = "pilots.decided"
MULTIPLE = "pilots.throughput_multiple"


class PilotSource:
    """Pilots' `MeasurementSource`, over the pilots of the scope's tasks."""

    keys = frozenset({DECIDED, MULTIPLE})

    def measure(self, *, keys: frozenset[str], scope: Scope, window_days: int) -> Mapping[str, Measurement]:
        window = Window(scope=scope, days=window_days)
        figures = {DECIDED: decided, MULTIPLE: throughput_multiple}
        return {key: figures[key](window) for key in sorted(keys & self.keys)}


def decided(window: Window) -> Measurement:
    """How many pilots were decided within the window; `count` is how many there are, decided or not."""
    pilots = narrowed(Pilot.objects.all(), window.scope, "task")
    within = pilots.filter(decided_at__gte=window.start, decided_at__lt=window.end)
    newest = within.order_by("-decided_at").first()
    return window.measured(
        DECIDED,
        within.count(),
        "count",
        count=within.count(),
        at=newest.decided_at if newest else timezone.now(),
        pilots=pilots.count(),
        names=", ".join(within.order_by("name").values_list("name", flat=True)) or None,
    )


def throughput_multiple(window: Window) -> Measurement:
    """The throughput multiple of the pilot whose trial completed last, with its interval."""
    trials = narrowed(Pilot.objects.all(), window.scope, "task").filter(
        trial_batch__status=Batch.Status.COMPLETED, trial_batch__completed_at__gte=window.start
    )
    for pilot in trials.select_related("trial_batch", "rate_card", "task").order_by("-trial_batch__completed_at"):
        found = returns(pilot)
        if found.throughput_multiple is not None and found.trial is not None and pilot.trial_batch is not None:
            return window.measured(
                MULTIPLE,
                found.throughput_multiple,
                "multiple",
                count=found.paired_items,
                at=pilot.trial_batch.completed_at,
                query=window.requests_query(batch=pilot.trial_batch.pk),
                pilot=pilot.name,
                low=found.throughput_multiple_low,
                high=found.throughput_multiple_high,
            )
    return window.measured(MULTIPLE, None, "multiple", count=0, at=timezone.now())


SOURCE = PilotSource()

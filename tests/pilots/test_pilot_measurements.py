"""The figures of pilots that controls rest on."""

from typing import Any

import pytest

from governance.controls.rules import load_rules
from governance.controls.sources import Scope, registered_sources
from penstock.pilots.measurements import DECIDED, MULTIPLE, SOURCE
from penstock.pilots.models import Pilot
from penstock.pilots.services import decide
from penstock.serving.models import Batch

pytestmark = pytest.mark.django_db
EVERYTHING = Scope(task_id=None, visible_task_ids=None)


def measure(scope: Scope = EVERYTHING) -> Any:
    return SOURCE.measure(keys=SOURCE.keys, scope=scope, window_days=36500)


@pytest.fixture
def measured_pilot(make_pilot: Any, baseline_of: Any, trial_of: Any) -> Pilot:
    pilot: Pilot = make_pilot()
    baseline_of(pilot, [2.0, 3.0, 4.0, 1.0])
    trial_of(pilot, [1.0, 2.0, 2.5, 0.5])
    return pilot


def test_every_measurement_of_the_rules_has_a_source() -> None:
    supplied = {key for source in registered_sources() for key in source.keys}
    assert supplied == set(load_rules().measurements)


def test_an_undecided_pilot_is_no_evidence_of_a_decision(measured_pilot: Pilot) -> None:
    figure = measure()[DECIDED]
    assert (figure.value, figure.count, figure.details["pilots"]) == (0, 0, 1)


def test_a_decided_pilot_counts_from_its_decision(measured_pilot: Pilot, people: Any) -> None:
    decide(user=people.pilot_manager, pilot=measured_pilot, decision="scale", reason="Four times the throughput.")
    figure = measure()[DECIDED]
    measured_pilot.refresh_from_db()
    assert (figure.value, figure.count) == (1, 1)
    assert figure.measured_at == measured_pilot.decided_at


def test_the_multiple_is_that_of_the_trial_that_completed_last(measured_pilot: Pilot) -> None:
    figure = measure()[MULTIPLE]
    assert figure.value == pytest.approx(4.0)  # 10 s one at a time, 2.5 s in the trial
    assert figure.count == 4
    assert figure.details["pilot"] == measured_pilot.name
    assert Batch.objects.get().pk in (figure.requests_query or "")


def test_pilots_beyond_the_readers_sight_do_not_count(measured_pilot: Pilot) -> None:
    figures = measure(Scope(task_id=None, visible_task_ids=frozenset()))
    assert (figures[MULTIPLE].value, figures[MULTIPLE].count) == (None, 0)
    assert figures[DECIDED].details["pilots"] == 0

"""Planning, measuring and deciding: who may, when, and what the ledger says of it."""

from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied, ValidationError

from governance.ledger.models import OutboxEntry
from penstock.pilots.items import ItemsError
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.selectors import acts_open_to, pilots_visible_to
from penstock.pilots.services import decide, start_baseline, start_trial, update_pilot
from penstock.pilots.transitions import PilotStateError
from penstock.serving.models import Batch

pytestmark = pytest.mark.django_db


def kinds() -> list[str]:
    return list(OutboxEntry.objects.filter(kind__startswith="pilot.").order_by("id").values_list("kind", flat=True))


def test_a_pilot_goes_from_plan_to_decision(make_pilot: Any, baseline_of: Any, trial_of: Any, people: Any) -> None:
    user = people.pilot_manager
    pilot = make_pilot()
    assert pilot.status == Pilot.Status.PLANNED
    assert acts_open_to(user, pilot) == ["update", "start_baseline", "stop"]
    baseline_of(pilot, [1.0] * 4)
    pilot.refresh_from_db()
    assert pilot.status == Pilot.Status.BASELINE
    assert acts_open_to(user, pilot) == ["update", "start_baseline", "start_trial", "stop"]
    batch = trial_of(pilot, [0.5] * 4)
    assert pilot.status == Pilot.Status.RUNNING
    assert acts_open_to(user, pilot) == ["update", "decide", "stop"]
    assert batch.metadata == {"task": "descriptions", "pilot": "shop-pilot"}
    assert batch.total == 4
    decided = decide(user=user, pilot=pilot, decision="scale", reason="It pays.")
    assert (decided.status, decided.decision, decided.decided_by) == ("decided", "scale", "pilot")
    assert acts_open_to(user, decided) == []
    assert kinds() == ["pilot.created", "pilot.baseline_started", "pilot.trial_started", "pilot.decided"]


def test_the_trial_decodes_greedily_whatever_the_items_say(
    make_pilot: Any, upload: Any, item_line: Any, baseline_of: Any, trial_of: Any
) -> None:
    lines = [item_line(number, temperature=1.5, seed=3) for number in range(1, 5)]
    pilot = make_pilot(items_file=upload(lines))
    baseline_of(pilot, [1.0] * 4)
    batch = trial_of(pilot, [1.0] * 4)
    assert {request.body["temperature"] for request in batch.requests.all()} == {0}


def test_a_trial_needs_a_baseline(make_pilot: Any, people: Any) -> None:
    pilot = make_pilot()
    with pytest.raises(PilotStateError):
        start_trial(user=people.pilot_manager, pilot=pilot)
    start_baseline(user=people.pilot_manager, pilot=pilot)
    with pytest.raises(PilotStateError, match="measured first"):
        start_trial(user=people.pilot_manager, pilot=pilot)


def test_one_baseline_at_a_time_and_again_after_a_failure(make_pilot: Any, people: Any) -> None:
    pilot = make_pilot()
    run = start_baseline(user=people.pilot_manager, pilot=pilot)
    with pytest.raises(PilotStateError, match="already"):
        start_baseline(user=people.pilot_manager, pilot=pilot)
    BaselineRun.objects.filter(pk=run.pk).update(status=BaselineRun.Status.FAILED)
    assert start_baseline(user=people.pilot_manager, pilot=pilot).pk != run.pk


def test_a_trial_is_repeated_only_after_a_batch_that_did_not_complete(
    make_pilot: Any, baseline_of: Any, people: Any
) -> None:
    pilot = make_pilot()
    baseline_of(pilot, [1.0] * 4)
    batch = start_trial(user=people.pilot_manager, pilot=pilot)
    with pytest.raises(PilotStateError, match="already"):
        start_trial(user=people.pilot_manager, pilot=pilot)
    Batch.objects.filter(pk=batch.pk).update(status=Batch.Status.FAILED)
    assert start_trial(user=people.pilot_manager, pilot=pilot).pk != batch.pk


def test_only_stopping_is_possible_before_the_trial_completed(make_pilot: Any, people: Any) -> None:
    pilot = make_pilot()
    with pytest.raises(PilotStateError):
        decide(user=people.pilot_manager, pilot=pilot, decision="scale", reason="Hope.")
    decided = decide(user=people.pilot_manager, pilot=pilot, decision="stop", reason="The supplier withdrew.")
    assert decided.status == Pilot.Status.DECIDED
    with pytest.raises(PilotStateError):
        start_baseline(user=people.pilot_manager, pilot=pilot)
    with pytest.raises(PilotStateError, match="decided"):
        update_pilot(user=people.pilot_manager, pilot=pilot, items_per_month=5)


def test_a_decision_needs_a_known_word_and_a_reason(make_pilot: Any, people: Any) -> None:
    pilot = make_pilot()
    with pytest.raises(ValidationError) as unknown:
        decide(user=people.pilot_manager, pilot=pilot, decision="perhaps", reason="x")
    assert "decision" in unknown.value.message_dict
    with pytest.raises(ValidationError) as silent:
        decide(user=people.pilot_manager, pilot=pilot, decision="stop", reason="  ")
    assert "reason" in silent.value.message_dict


def test_only_pilot_managers_operators_and_administrators_write(make_pilot: Any, people: Any) -> None:
    pilot = make_pilot()
    for person in (people.auditor, people.approver, people.task_owner, people.outsider):
        with pytest.raises(PermissionDenied):
            make_pilot(name="another", user=person)
        with pytest.raises(PermissionDenied):
            start_baseline(user=person, pilot=pilot)
        with pytest.raises(PermissionDenied):
            decide(user=person, pilot=pilot, decision="stop", reason="No.")
        with pytest.raises(PermissionDenied):
            update_pilot(user=person, pilot=pilot, items_per_month=1)
        assert acts_open_to(person, pilot) == []
    for person, name in ((people.operator, "by-operator"), (people.administrator, "by-administrator")):
        assert make_pilot(name=name, user=person).created_by == person.username


def test_a_pilot_is_seen_by_its_tasks_team_alone(make_pilot: Any, people: Any) -> None:
    pilot = make_pilot()
    for person in (people.auditor, people.pilot_manager, people.administrator):
        assert list(pilots_visible_to(person)) == [pilot]
    assert not pilots_visible_to(people.outsider).exists()


def test_assumptions_change_and_leave_an_entry(make_pilot: Any, people: Any) -> None:
    pilot = make_pilot()
    changed = update_pilot(user=people.operator, pilot=pilot, items_per_month=5, introduction_cost=Decimal("7"))
    assert (changed.items_per_month, changed.introduction_cost) == (5, Decimal("7"))
    entry = OutboxEntry.objects.get(kind="pilot.updated")
    assert entry.payload["before"]["items_per_month"] == 100_000
    assert entry.payload["after"]["introduction_cost"] == "7.00"
    update_pilot(user=people.operator, pilot=pilot, items_per_month=5)
    assert OutboxEntry.objects.filter(kind="pilot.updated").count() == 1
    with pytest.raises(ValidationError, match="status"):
        update_pilot(user=people.operator, pilot=pilot, status="decided")


def test_a_file_with_fewer_items_is_compared_whole(make_pilot: Any) -> None:
    assert make_pilot(items=4, sample_items=50).sample_items == 6


def test_a_line_that_cannot_be_compared_is_named(make_pilot: Any, upload: Any, item_line: Any, people: Any) -> None:
    with pytest.raises(ItemsError, match="line 2"):
        make_pilot(name="broken", items_file=upload([item_line(1), b"{not json"]))
    with pytest.raises(ItemsError, match="used before"):
        make_pilot(name="twice", items_file=upload([item_line(1), item_line(1)]))
    with pytest.raises(ItemsError, match="no request"):
        make_pilot(name="empty", items_file=upload([b""]))
    pilot = make_pilot(name="stops", items_file=upload([item_line(1), item_line(2, stop="END")]))
    with pytest.raises(ItemsError, match=r"line 2.*stop texts"):
        start_baseline(user=people.pilot_manager, pilot=pilot)
    pilot = make_pilot(name="too-long", items_file=upload([item_line(1, max_tokens=100_000)]))
    with pytest.raises(ItemsError, match="line 1"):
        start_baseline(user=people.pilot_manager, pilot=pilot)


def test_another_teams_file_is_not_found(make_pilot: Any, upload: Any, item_line: Any, people: Any) -> None:
    from penstock.accounts.models import Team

    theirs = upload([item_line(1)], user=people.outsider, team=Team.objects.get(slug="elsewhere"))
    with pytest.raises(ValidationError) as refused:
        make_pilot(items_file=theirs)
    assert "items_file" in refused.value.message_dict


def test_a_name_is_taken_once(make_pilot: Any) -> None:
    make_pilot()
    with pytest.raises(ValidationError) as taken:
        make_pilot()
    assert "name" in taken.value.message_dict
    with pytest.raises(ValidationError):
        make_pilot(name="Not A Name")

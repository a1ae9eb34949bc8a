import hashlib
import json
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from hypothesis import given
from hypothesis import strategies as st

from governance.ledger.models import OutboxEntry
from penstock.registry.models import ModelRelease, Task, TaskVersion
from penstock.registry.selectors import tasks_visible_to, transitions_open_to, version_of
from penstock.registry.services import (
    activate_task,
    create_task,
    retire_task,
    submit_task,
    suspend_task,
    update_task,
)
from penstock.registry.transitions import TASK_TRANSITIONS, TransitionError, check

pytestmark = pytest.mark.django_db


def draft(people: Any, release: Any, **fields: Any) -> Task:
    values = {
        "name": "descriptions",
        "title": "Product descriptions",
        "purpose": "Writes product descriptions for a person to check.",
        "latency_class": "batch",
        "model_release": release,
        **fields,
    }
    return create_task(user=people.operator, team=people.team, **values)


def active(people: Any, release: Any) -> Task:
    task = submit_task(user=people.task_owner, task=draft(people, release))
    return activate_task(user=people.approver, task=task)


def kinds(subject: str) -> list[str]:
    return list(OutboxEntry.objects.filter(subject=subject).order_by("id").values_list("kind", flat=True))


def test_a_task_goes_from_draft_to_retired_and_the_ledger_tells_it(people: Any, release: Any) -> None:
    task = active(people, release)
    task = suspend_task(user=people.operator, task=task, reason="wrong prices")
    task = activate_task(user=people.approver, task=task)
    task = retire_task(user=people.task_owner, task=task)
    assert Task.objects.get(pk=task.pk).status == Task.Status.RETIRED
    assert kinds("descriptions") == [
        "task.created",
        "task.submitted",
        "task.activated",
        "task.suspended",
        "task.activated",
        "task.retired",
    ]
    suspended = OutboxEntry.objects.get(kind="task.suspended")
    assert suspended.actor == "operator"
    assert suspended.payload["reason"] == "wrong prices"


@pytest.mark.parametrize(
    ("status", "allowed"),
    [
        ("draft", {"submit", "retire"}),
        ("submitted", {"activate", "retire"}),
        ("active", {"suspend", "retire"}),
        ("suspended", {"activate", "retire"}),
        ("retired", set()),
    ],
)
def test_each_state_allows_these_changes_alone(status: str, allowed: set[str]) -> None:
    for name, transition in TASK_TRANSITIONS.items():
        if name in allowed:
            check(transition, name="t", status=Task.Status(status))
        else:
            with pytest.raises(TransitionError):
                check(transition, name="t", status=Task.Status(status))


def test_only_an_approver_activates(people: Any, release: Any) -> None:
    task = submit_task(user=people.operator, task=draft(people, release))
    for person in (people.operator, people.task_owner, people.auditor, people.pilot_manager, people.outsider):
        with pytest.raises(PermissionDenied):
            activate_task(user=person, task=task)
    assert transitions_open_to(people.approver, task) == ["activate", "retire"]
    assert transitions_open_to(people.operator, task) == []
    assert activate_task(user=people.approver, task=task).status == "active"


def test_a_task_is_not_activated_on_a_release_that_is_not_approved(people: Any, release: Any) -> None:
    ModelRelease.objects.update(status="imported", approved_at=None)
    task = submit_task(user=people.operator, task=draft(people, release))
    with pytest.raises(ValidationError) as caught:
        activate_task(user=people.approver, task=task)
    assert "model_release" in caught.value.message_dict


def test_each_change_of_what_a_task_says_is_a_version_with_its_digest(people: Any, release: Any) -> None:
    task = draft(people, release)
    task = update_task(user=people.operator, task=task, prompt_template="Describe $name.", max_output_tokens=64)
    assert task.version == 2
    assert [version.version for version in TaskVersion.objects.filter(task=task)] == [2, 1]
    second = version_of(task)
    assert second.content["prompt_template"] == "Describe $name."
    assert version_of(task, 1).content["prompt_template"] == ""
    # RFC 8785 of plain ASCII keys and no exotic numbers is sorted compact JSON, which the standard library can write.
    canonical = json.dumps(second.content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert second.digest == hashlib.sha256(canonical.encode()).hexdigest()
    event = OutboxEntry.objects.get(kind="task.updated")
    assert event.payload["changed"] == ["max_output_tokens", "prompt_template"]
    assert "Describe" not in str(event.payload)


def test_a_change_that_changes_nothing_makes_no_version(people: Any, release: Any) -> None:
    task = draft(people, release)
    assert update_task(user=people.operator, task=task, title=task.title).version == 1
    assert kinds("descriptions") == ["task.created"]


def test_a_submitted_task_that_is_changed_goes_back_to_draft(people: Any, release: Any) -> None:
    task = submit_task(user=people.operator, task=draft(people, release))
    task = update_task(user=people.operator, task=task, purpose="Something else altogether.")
    assert task.status == "draft"
    with pytest.raises(TransitionError):
        activate_task(user=people.approver, task=task)


def test_what_an_active_task_does_is_changed_by_an_approver_alone(people: Any, release: Any) -> None:
    task = active(people, release)
    with pytest.raises(PermissionDenied, match="system_prompt"):
        update_task(user=people.operator, task=task, system_prompt="Ignore the rules.")
    assert Task.objects.get(pk=task.pk).version == 1
    assert update_task(user=people.task_owner, task=task, title="Descriptions").version == 2
    assert update_task(user=people.approver, task=task, system_prompt="Write in English.").version == 3


def test_a_retired_task_stays_as_it_is(people: Any, release: Any) -> None:
    task = retire_task(user=people.task_owner, task=draft(people, release))
    with pytest.raises(TransitionError):
        update_task(user=people.operator, task=task, title="Again")


def test_changed_thresholds_leave_an_event_of_their_own(people: Any, release: Any) -> None:
    task = draft(people, release)
    assert task.fairness_plan["min_ratio"] == 0.8
    update_task(user=people.operator, task=task, fairness_plan={"min_ratio": 0.9})
    event = OutboxEntry.objects.get(kind="thresholds.changed")
    assert event.payload["before"]["min_ratio"] == 0.8
    assert event.payload["after"]["min_ratio"] == 0.9


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "Not A Slug"}, "name"),
        ({"name": "unassigned-x"}, "name"),
        ({"name": "small-model"}, "name"),
        ({"title": ""}, "title"),
        ({"latency_class": "someday"}, "latency_class"),
        ({"risk_tier": "none"}, "risk_tier"),
        ({"prompt_template": "costs $ 5"}, "prompt_template"),
        ({"output_contract": {"min_charcters": 3}}, "output_contract"),
        ({"objectives": [{"metric": "speed", "target": "1"}]}, "objectives"),
        ({"objectives": [{"metric": "error_rate", "target": "2"}]}, "objectives"),
        ({"objectives": [{"metric": "cost_per_1k_output_tokens", "target": "2"}]}, "objectives"),
        ({"fairness_plan": {"min_ratio": 1.5}}, "fairness_plan"),
        ({"budget_amount": Decimal("10")}, "__all__"),
    ],
)
def test_a_bad_field_is_named(people: Any, release: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        draft(people, release, **fields)
    assert named in caught.value.message_dict
    assert not Task.objects.exists()
    assert not OutboxEntry.objects.exists()


def test_the_owner_belongs_to_the_team(people: Any, release: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        draft(people, release, owner=people.outsider)
    assert "owner" in caught.value.message_dict
    assert draft(people, release, owner=people.task_owner).owner == people.task_owner


def test_a_name_is_taken_once(people: Any, release: Any) -> None:
    draft(people, release)
    with pytest.raises(ValidationError) as caught:
        draft(people, release)
    assert "name" in caught.value.message_dict


def test_those_who_only_read_and_outsiders_register_nothing(people: Any, release: Any) -> None:
    for person in (people.auditor, people.outsider, people.pilot_manager):
        with pytest.raises(PermissionDenied):
            create_task(
                user=person,
                team=people.team,
                name="x",
                title="x",
                purpose="x",
                latency_class="batch",
                model_release=release,
            )


def test_an_outsider_does_not_see_the_task(people: Any, release: Any) -> None:
    draft(people, release)
    assert tasks_visible_to(people.auditor).count() == 1
    assert tasks_visible_to(people.outsider).count() == 0
    assert tasks_visible_to(people.administrator).count() == 1


@given(st.lists(st.sampled_from(sorted(TASK_TRANSITIONS)), max_size=12))
def test_whatever_is_tried_the_status_is_one_that_the_table_leads_to(names: list[str]) -> None:
    status = Task.Status.DRAFT
    for name in names:
        transition = TASK_TRANSITIONS[name]
        try:
            check(transition, name="t", status=status)
        except TransitionError:
            continue
        assert status != Task.Status.RETIRED
        assert transition.target != Task.Status.DRAFT
        status = transition.target

"""Tasks and model releases on their pages: forms whose errors stand beside the field, acts that ask first."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.urls import reverse


@pytest.fixture
def filled(world: Any, people: Any) -> dict[str, Any]:
    """A form as somebody fills it in."""
    return {
        "team": people.team.pk,
        "name": "return-reasons",
        "title": "Return reasons",
        "purpose": "Sorts reasons.",
        "owner": people.task_owner.pk,
        "latency_class": "nearline",
        "risk_tier": "limited",
        "model_release": world.release.pk,
        "max_output_tokens": 64,
        "contract_language_from": "language",
        "contract_repetition_limit": "40",
        "contract_forbidden_phrases": "free of charge\n\nguaranteed",
        "objective_valid_rate": "95",
        "objective_ttft_p95_seconds": "1.5",
        "objective_cost_per_1k_output_tokens": "0.01",
        "fairness_group": "region",
        "budget_amount": "500",
        "budget_currency": "twd",
        "retention_days": 90,
    }


def test_a_task_is_registered_as_a_draft(filled: dict[str, Any], people: Any, as_person: Any) -> None:
    from penstock.registry.models import Task

    answer = as_person(people.operator).post("/new/task/", filled)
    assert answer.status_code == 302, answer.context["form"].errors
    task = Task.objects.get(name="return-reasons")
    assert task.status == "draft"
    assert task.owner == people.task_owner
    assert task.output_contract == {
        "language_from": "language",
        "repetition_limit": 0.4,
        "forbidden_phrases": ["free of charge", "guaranteed"],
    }
    targets = {entry["metric"]: (Decimal(entry["target"]), entry["unit"]) for entry in task.objectives}
    assert targets == {
        "valid_rate": (Decimal("0.95"), "ratio"),
        "ttft_p95_seconds": (Decimal("1.5"), "s"),
        "cost_per_1k_output_tokens": (Decimal("0.01"), "TWD"),
    }
    assert task.fairness_plan["group"] == "region"
    assert (task.budget_amount, task.budget_currency, task.retention_days) == (Decimal("500"), "TWD", 90)


@pytest.mark.parametrize(
    ("change", "field"),
    (
        ({"name": "Return Reasons"}, "name"),
        ({"name": "descriptions"}, None),
        ({"name": "tiny-4bit"}, "name"),
        ({"title": ""}, "title"),
        ({"purpose": " "}, "purpose"),
        ({"max_output_tokens": "0"}, "max_output_tokens"),
        ({"objective_valid_rate": "120"}, "objective_valid_rate"),
        ({"objective_ttft_p95_seconds": "-1"}, "objective_ttft_p95_seconds"),
        ({"contract_min_characters": "50", "contract_max_characters": "10"}, None),
        ({"prompt_template": "Price: $"}, "prompt_template"),
        ({"budget_currency": ""}, None),
        ({"owner": "999999"}, "owner"),
    ),
)
def test_a_problem_stands_beside_its_field_and_nothing_is_saved(
    filled: dict[str, Any], people: Any, as_person: Any, change: dict[str, str], field: str | None
) -> None:
    from penstock.registry.models import Task

    before = Task.objects.count()
    answer = as_person(people.operator).post("/new/task/", {**filled, **change})
    form = answer.context["form"]
    assert answer.status_code == 400
    assert form.errors, change
    if field is not None:
        assert field in form.errors, form.errors
        assert 'aria-invalid="true"' in answer.content.decode()
    assert form["purpose"].value() == {**filled, **change}["purpose"]  # nothing typed is lost
    assert Task.objects.count() == before


def test_an_outsiders_team_cannot_be_chosen(filled: dict[str, Any], people: Any, as_person: Any) -> None:
    from penstock.accounts.models import Team

    elsewhere = Team.objects.get(slug="elsewhere")
    answer = as_person(people.operator).post("/new/task/", {**filled, "team": elsewhere.pk})
    assert "team" in answer.context["form"].errors


def test_an_unchanged_form_makes_no_version_and_a_changed_one_does(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.operator)
    url = reverse("dashboard:task-edit", args=[world.task.name])
    form = client.get(url).context["form"]
    shown = {name: form[name].value() for name in form.fields if form[name].value() not in (None, False)}
    client.post(url, shown)
    world.task.refresh_from_db()
    assert world.task.version == 1
    client.post(url, {**shown, "objective_error_rate": "2"})
    world.task.refresh_from_db()
    assert world.task.version == 2
    assert world.task.objectives[0]["target"] in ("0.02", "0.0200")
    assert world.task.output_contract == {"language_from": "language", "min_characters": 20}
    assert world.task.fairness_plan["min_count"] == 2
    page = client.get(reverse("dashboard:task", args=[world.task.name])).content.decode()
    assert "Task changed" in page


def test_a_task_goes_its_way_with_a_reason_that_the_history_shows(world: Any, people: Any, as_person: Any) -> None:
    def act(person: Any, name: str, reason: str) -> Any:
        return as_person(person).post(
            reverse("dashboard:task-act", args=[world.draft.name, name]), {"reason": reason}, follow=True
        )

    act(people.operator, "submit", "ready")
    assert act(people.operator, "activate", "myself").status_code == 403
    page = act(people.approver, "activate", "read and agreed").content.decode()
    world.draft.refresh_from_db()
    assert world.draft.status == "active"
    assert "Active: requests are taken now." in page
    assert "read and agreed" in page
    act(people.operator, "suspend", "odd outputs")
    world.draft.refresh_from_db()
    assert world.draft.status == "suspended"


def test_what_the_state_does_not_allow_says_from_where_it_would(world: Any, people: Any, as_person: Any) -> None:
    answer = as_person(people.approver).post(reverse("dashboard:task-act", args=[world.draft.name, "activate"]), {})
    assert answer.status_code == 400
    assert "possible only from" in answer.content.decode()


def test_only_open_acts_are_offered(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    url = reverse("dashboard:task", args=[world.task.name])

    def offered(person: Any) -> list[str]:
        return [name for name, _label in as_person(person).get(url).context["transitions"]]

    assert offered(people.operator) == ["suspend"]
    assert offered(people.approver) == ["suspend", "retire"]
    assert offered(people.auditor) == []


def test_an_act_that_does_not_exist_is_no_page(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.approver)
    assert client.get(f"/tasks/{world.task.name}/explode/").status_code == 404
    assert client.get(f"/models/{world.release.name}/explode/").status_code == 404


def test_a_release_is_approved_and_withdrawn_after_asking(
    make_release: Any, world: Any, people: Any, as_person: Any
) -> None:
    fresh = make_release("fresh-8bit", status="imported", approved_at=None)
    url = reverse("dashboard:release-act", args=[fresh.name, "approve"])
    assert as_person(people.operator).post(url).status_code == 403
    client = as_person(people.approver)
    assert fresh.digest in client.get(url).content.decode()
    client.post(url)
    fresh.refresh_from_db()
    assert (fresh.status, fresh.approved_by) == ("approved", "approver")
    client.post(reverse("dashboard:release-act", args=[fresh.name, "withdraw"]))
    fresh.refresh_from_db()
    assert fresh.status == "withdrawn"
    assert client.post(url).status_code == 400


def test_the_objectives_verdict_is_that_of_telemetry(world: Any, people: Any, as_person: Any) -> None:
    page = as_person(people.auditor).get(reverse("dashboard:task", args=[world.task.name]))
    (label, result), *others = page.context["objectives"]
    assert not others
    assert label == "Errors"
    assert round(result.value, 6) == Decimal("0.111111")  # 1 of the 9 that are finished
    assert str(result.verdict) == "not_met"
    assert "Not kept" in page.content.decode()

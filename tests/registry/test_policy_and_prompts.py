from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import translation

from penstock.accounts.models import Membership, Role, Team
from penstock.registry.contracts import (
    Objective,
    dump_objectives,
    parse_fairness_plan,
    parse_objectives,
    parse_output_contract,
)
from penstock.registry.models import ModelRelease, Task
from penstock.registry.policy import PolicyError, resolve
from penstock.registry.prompts import PromptError, render_record, template_fields
from penstock.registry.services import activate_task, create_task, submit_task, suspend_task


def task_on(people: Any, release: Any, name: str = "descriptions", *, started: bool = True) -> Task:
    task = create_task(
        user=people.operator,
        team=people.team,
        name=name,
        title="Product descriptions",
        purpose="Writes product descriptions.",
        latency_class="batch",
        model_release=release,
    )
    if started:
        submit_task(user=people.operator, task=task)
        task = activate_task(user=people.approver, task=task)
    return task


def refusal(**arguments: Any) -> tuple[str, str]:
    with pytest.raises(PolicyError) as caught:
        resolve(**arguments)
    assert caught.value.message
    return caught.value.code, caught.value.param


def test_a_release_and_a_task_may_both_be_named(people: Any, release: Any) -> None:
    task = task_on(people, release)
    expected = (task, release)
    assert resolve(team=people.team, model="small-model", task_name="descriptions") == expected
    assert resolve(team=people.team, model="descriptions") == expected
    assert resolve(team=people.team, model="descriptions", task_name="descriptions") == expected


def test_requests_without_a_task_count_for_the_teams_unassigned_one(people: Any, release: Any) -> None:
    task, _release = resolve(team=people.team, model="small-model")
    again, _release = resolve(team=people.team, model="small-model")
    assert task == again
    assert task.unassigned
    assert task.status == "active"
    assert task.latency_class == "interactive"
    assert task.versions.count() == 1
    elsewhere = Team.objects.get(slug="elsewhere")
    other, _release = resolve(team=elsewhere, model="small-model")
    assert other.team == elsewhere
    assert other != task


def test_the_name_of_an_unassigned_task_fits(people: Any, make_release: Any) -> None:
    release = make_release("m" * 80)
    task, _release = resolve(team=people.team, model="m" * 80)
    assert len(task.name) <= 80
    assert resolve(team=people.team, model=release.name)[0] == task


def test_what_may_not_run_is_refused_with_code_and_field(people: Any, release: Any, make_release: Any) -> None:
    team = people.team
    task_on(people, release)
    assert refusal(team=team, model="no-such") == ("model_not_found", "model")
    assert refusal(team=team, model="small-model", task_name="no-such") == ("task_not_found", "metadata.task")
    other = make_release("other-model")
    assert refusal(team=team, model=other.name, task_name="descriptions") == ("model_not_allowed", "model")
    task_on(people, release, "second")
    assert refusal(team=team, model="second", task_name="descriptions") == ("task_mismatch", "metadata.task")
    task_on(people, release, "third", started=False)
    assert refusal(team=team, model="third") == ("task_not_active", "model")
    make_release("raw-model", status="imported")
    assert refusal(team=team, model="raw-model") == ("model_not_approved", "model")


def test_a_suspended_task_and_a_withdrawn_release_stop_at_once(people: Any, release: Any) -> None:
    task = task_on(people, release)
    suspend_task(user=people.operator, task=task)
    assert refusal(team=people.team, model="small-model", task_name="descriptions")[0] == "task_not_active"
    ModelRelease.objects.update(status="withdrawn")
    assert refusal(team=people.team, model="small-model")[0] == "model_not_approved"


def test_another_teams_task_does_not_exist(people: Any, release: Any) -> None:
    task_on(people, release)
    elsewhere = Team.objects.get(slug="elsewhere")
    assert refusal(team=elsewhere, model="descriptions") == ("model_not_found", "model")
    assert refusal(team=elsewhere, model="small-model", task_name="descriptions")[0] == "task_not_found"


def test_the_unassigned_task_belongs_to_the_most_accountable_member(people: Any, release: Any) -> None:
    Membership.objects.create(user=people.auditor, team=people.team, role=Role.ADMINISTRATOR)
    assert resolve(team=people.team, model="small-model")[0].owner == people.auditor


def test_a_template_is_filled_from_a_record() -> None:
    task = SimpleNamespace(
        system_prompt="請用臺灣的繁體中文書寫。", prompt_template="商品：$name，特色：${features}，NT$$$price"
    )
    messages = render_record(task, {"name": "竹蒸籠", "features": ["兩層", "手工"], "price": 480, "extra": {}})
    assert messages == [
        {"role": "system", "content": "請用臺灣的繁體中文書寫。"},
        {"role": "user", "content": "商品：竹蒸籠，特色：兩層, 手工，NT$480"},
    ]
    assert template_fields(task.prompt_template) == ["name", "features", "price"]


def test_a_record_without_a_field_is_refused_by_the_fields_name() -> None:
    task = SimpleNamespace(system_prompt="", prompt_template="$name made of $material")
    with pytest.raises(PromptError, match="material") as caught:
        render_record(task, {"name": "cup"})
    assert caught.value.field == "material"


def test_a_record_cannot_smuggle_in_a_field() -> None:
    task = SimpleNamespace(system_prompt="", prompt_template="Describe $name.")
    (message,) = render_record(task, {"name": "$secret", "secret": "x"})
    assert message["content"] == "Describe $secret."


def test_no_template_or_a_stray_dollar_is_said() -> None:
    with pytest.raises(PromptError):
        render_record(SimpleNamespace(system_prompt="", prompt_template=""), {})
    with pytest.raises(PromptError):
        template_fields("5 $ each")


def test_objectives_know_their_unit_and_direction() -> None:
    faster, cheaper = parse_objectives(
        [
            {"metric": "output_tokens_per_second", "target": "40"},
            {"metric": "cost_per_1k_output_tokens", "target": "0.5", "unit": "TWD"},
        ]
    )
    assert faster.unit == "tokens/s"
    assert faster.is_met_by(Decimal("40"))
    assert not faster.is_met_by(Decimal("39.9"))
    assert cheaper.is_met_by(Decimal("0.5"))
    assert not cheaper.is_met_by(Decimal("0.51"))
    assert dump_objectives([cheaper]) == [{"metric": "cost_per_1k_output_tokens", "target": "0.5", "unit": "TWD"}]
    assert parse_objectives(dump_objectives([faster, cheaper])) == [faster, cheaper]


@pytest.mark.parametrize(
    "value",
    [
        [{"metric": "error_rate", "target": "0.1"}, {"metric": "error_rate", "target": "0.2"}],
        [{"metric": "error_rate", "target": "-1"}],
        [{"metric": "error_rate", "target": "0.1", "unit": "s"}],
        [{"metric": "error_rate"}],
        {"metric": "error_rate"},
        "fast",
    ],
)
def test_objectives_that_cannot_be_are_refused(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_objectives(value)
    assert "objectives" in caught.value.message_dict


def test_a_refusal_comes_in_the_readers_language() -> None:
    with translation.override("zh-hant"), pytest.raises(ValidationError) as caught:
        parse_objectives([{"metric": "error_rate", "target": "1.5"}])
    assert caught.value.message_dict["objectives"] == ["0: error_rate 為比率，須介於 0 至 1，即百分之 0 至 100。"]
    with translation.override("zh-hant"), pytest.raises(ValidationError) as caught:
        parse_output_contract({"min_characters": 9, "max_characters": 8})
    assert caught.value.message_dict["output_contract"] == ["字元數上限不得小於下限。"]


def test_the_default_plan_is_the_four_fifths_rule() -> None:
    plan = parse_fairness_plan(None)
    assert (plan.group, plan.min_ratio, plan.favourable) == ("language", 0.8, "valid")
    assert Objective(metric="valid_rate", target=Decimal("0.9")).more_is_better

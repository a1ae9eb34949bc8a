"""The figures behind controls: each by hand, and each within what its reader may see."""

import datetime as dt
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs

import pytest
from django.utils import timezone

from governance.controls.coverage import coverage_of_all
from governance.controls.rules import load_rules
from governance.controls.sources import Measurement, Scope, check_unit, collect, registered_sources
from governance.ledger.services import record, sequence, sign_checkpoint
from penstock.accounts.models import ApiKey
from penstock.serving.completion import Result, record_results
from penstock.serving.models import Batch, EngineHost, Request
from penstock.telemetry.measurements import FIGURES, SOURCE
from penstock.telemetry.models import RateCard, Usage
from penstock.telemetry.recorder import record_usage


def measure(scope: Scope | None = None, days: int = 30) -> dict[str, Measurement]:
    return dict(SOURCE.measure(keys=SOURCE.keys, scope=scope or Scope(), window_days=days))


@pytest.fixture
def lately(floor: Any, round_card: RateCard) -> Any:
    """Eleven requests of an hour ago: nine succeeded (two of them invalid), one failed, one was cancelled."""
    hour_ago = timezone.now() - dt.timedelta(hours=1)
    rows = [
        floor.request(
            origin=hour_ago,
            start=n,
            seconds=2,
            ttft_seconds=0.5,
            output_tokens=10,
            compute_seconds=1.0,
            valid=n >= 2,
            groups={"language": "en"},
        )
        for n in range(9)
    ]
    rows.append(floor.request(origin=hour_ago, status="failed", error_code="engine_error", groups={"language": "en"}))
    rows.append(floor.request(origin=hour_ago, status="cancelled"))
    record_usage(rows)
    return floor


def test_every_key_of_the_rules_has_a_figure_but_those_of_pilots_one_room_up() -> None:
    missing = load_rules().measurements.keys() - SOURCE.keys
    assert {key.partition(".")[0] for key in missing} <= {"pilots"}
    assert SOURCE.keys <= load_rules().measurements.keys()
    assert any(source is SOURCE for source in registered_sources())


def test_every_figure_has_the_unit_that_its_definition_says(lately: Any) -> None:
    figures = measure()
    assert figures.keys() == FIGURES.keys()
    for figure in figures.values():
        check_unit(figure)


def test_an_empty_installation_has_no_figure_but_its_inventory(db: None) -> None:
    for key, figure in measure().items():
        if key not in ("access.active_users", "access.api_keys_active"):
            assert not figure.has_data, key


def test_figures_of_requests_are_those_of_the_rows(lately: Any) -> None:
    figures = measure()
    assert (figures["requests.count"].value, figures["requests.count"].count) == (11, 11)
    assert (figures["requests.error_rate"].value, figures["requests.error_rate"].count) == (0.1, 10)
    assert (figures["requests.valid_rate"].value, figures["requests.valid_rate"].count) == (7 / 9, 9)
    assert figures["requests.ttft_p95_seconds"].value == 0.5
    assert figures["requests.duration_p95_seconds"].value == 2.0
    assert figures["requests.output_tokens_per_second"].value == 9.0  # 90 tokens in the 10 s in which any ran
    assert (figures["cost.total"].value, figures["cost.total"].unit) == (Decimal("0.0135"), "TWD")
    assert figures["cost.per_1k_output_tokens"].value == Decimal("0.15")
    assert figures["energy.kwh"].value == Decimal("0.0009")
    assert figures["energy.kwh"].details["source"] == "estimated"


def test_a_figure_is_as_fresh_as_its_newest_request(lately: Any) -> None:
    newest = Request.objects.order_by("-finished_at").values_list("finished_at", flat=True)[0]
    assert measure()["requests.count"].measured_at == newest


def test_a_figure_leads_to_the_requests_that_count_against_it(lately: Any) -> None:
    figures = measure(Scope(task_id=lately.task.pk))
    query = parse_qs(figures["requests.error_rate"].requests_query or "")
    assert (query["task"], query["status"]) == (["descriptions"], ["errors"])
    query = parse_qs(figures["requests.valid_rate"].requests_query or "")
    assert (query["status"], query["valid"]) == (["succeeded"], ["no"])


def test_the_query_lists_as_many_requests_as_the_figure_counts(lately: Any, people: Any) -> None:
    from django.http import QueryDict

    from penstock.dashboard.forms.requests import RequestFilter

    figures = measure(Scope(task_id=lately.task.pk))
    for key, expected in (("requests.count", 11), ("requests.error_rate", 1), ("requests.valid_rate", 2)):
        form = RequestFilter(QueryDict(figures[key].requests_query or ""), user=people.auditor)
        assert form.apply(Request.objects.all()).count() == expected, form.errors


def test_the_window_leaves_older_requests_out(lately: Any) -> None:
    lately.request(origin=timezone.now() - dt.timedelta(days=20))
    assert measure(days=7)["requests.count"].value == 11
    assert measure(days=30)["requests.count"].value == 12


def test_nothing_of_tasks_that_the_reader_may_not_see_is_counted(lately: Any, next_door: Any, people: Any) -> None:
    next_door.request(origin=timezone.now() - dt.timedelta(hours=2), status="failed", error_code="engine_error")
    own = measure(Scope(visible_task_ids=frozenset({lately.task.pk})))
    assert own["requests.count"].value == 11
    assert own["registry.active_tasks"].value == 1
    assert own["registry.task_changes"].value == 1
    assert measure()["requests.count"].value == 12
    assert measure()["registry.active_tasks"].value == 2
    nobody = measure(Scope(visible_task_ids=frozenset()))
    for key, figure in nobody.items():
        if key not in ("hosts.inventory", "ledger.checkpoint_age_seconds"):
            assert not figure.count, key


def test_batches_are_late_when_they_expire_or_complete_after_their_window(floor: Any) -> None:
    now = timezone.now()
    for name, status, completed, expires in (
        ("on-time", "completed", now - dt.timedelta(hours=2), now - dt.timedelta(hours=1)),
        ("late", "completed", now - dt.timedelta(hours=1), now - dt.timedelta(hours=2)),
        ("expired", "expired", None, now - dt.timedelta(hours=3)),
        ("cancelled", "cancelled", None, now),
    ):
        batch = Batch.objects.get(pk=floor.batch.pk)
        batch.pk, batch.status, batch.completed_at, batch.expires_at = name, status, completed, expires
        batch.expired_at = expires if status == "expired" else None
        batch.save(force_insert=True)
    figure = measure(days=1)["batches.deadline_met_rate"]
    assert (figure.value, figure.count) == (1 / 3, 3)
    assert figure.details["late_batches"] == ["expired", "late"]


def test_objectives_are_counted_over_all_tasks_that_could_be_judged(lately: Any) -> None:
    lately.task.objectives = [
        {"metric": "error_rate", "target": "0.05"},
        {"metric": "ttft_p95_seconds", "target": "1"},
        {"metric": "cost_per_1k_output_tokens", "target": "1", "unit": "EUR"},
    ]
    lately.task.save()
    figure = measure()["objectives.met_rate"]
    assert (figure.value, figure.count) == (0.5, 2)
    [missed] = figure.details["missed"]
    assert (missed["metric"], missed["value"], missed["target"]) == ("error_rate", "0.1", "0.05")


def test_that_no_group_failed_is_no_news_where_none_could_be_judged(lately: Any) -> None:
    figures = measure()
    assert figures["fairness.groups_failing"].value is None
    assert figures["fairness.groups_insufficient"].value == 1
    assert figures["fairness.lowest_ratio"].value is None


def test_a_failing_group_is_named_and_leads_to_its_requests(lately: Any) -> None:
    hour_ago = timezone.now() - dt.timedelta(hours=1)
    for n in range(40):
        lately.request(origin=hour_ago, valid=True, groups={"language": "en"})
        lately.request(origin=hour_ago, valid=n < 10, groups={"language": "zh-Hant"})
    figures = measure()
    assert figures["fairness.groups_failing"].value == 1
    assert figures["fairness.groups_failing"].details["groups"] == {"descriptions": ["zh-Hant"]}
    # English: 47 valid of 50, one of them an error; Traditional Chinese: 10 of 40.
    assert figures["fairness.lowest_ratio"].value == pytest.approx((10 / 40) / (47 / 50))
    assert parse_qs(figures["fairness.lowest_ratio"].requests_query or "")["group"] == ["language:zh-Hant"]


def test_registry_figures_say_what_lacks(lately: Any, people: Any) -> None:
    figures = measure()
    assert figures["registry.tasks_with_owner_rate"].value == 1.0
    assert figures["registry.tasks_with_objectives_rate"].value == 0.0
    assert figures["registry.tasks_with_objectives_rate"].details["lacking"] == ["descriptions"]
    assert figures["registry.releases_with_licence_rate"].value == 1.0
    assert figures["registry.releases_with_digest_rate"].value == 1.0
    assert figures["registry.release_approvals"].value == 1
    people.task_owner.is_active = False
    people.task_owner.save()
    assert measure()["registry.tasks_with_owner_rate"].value == 0.0


def test_people_and_keys_are_counted_within_the_teams_of_the_scope(lately: Any, next_door: Any, people: Any) -> None:
    now = timezone.now()
    for prefix, changes in (
        ("live", {}),
        ("revoked", {"revoked_at": now}),
        ("expired", {"expires_at": now - dt.timedelta(days=1)}),
    ):
        ApiKey.objects.create(
            name=prefix,
            prefix=prefix,
            secret_digest="",
            team=lately.team,
            user=people.operator,
            created_at=now,
            **changes,
        )
    own = measure(Scope(task_id=lately.task.pk))
    assert own["access.api_keys_active"].value == 1
    assert own["access.active_users"].value == 5
    assert measure(Scope(task_id=next_door.task.pk))["access.active_users"].value == 1
    assert measure()["access.active_users"].value == 7


def test_hosts_are_as_fresh_as_their_last_sign_of_life(db: None) -> None:
    then = timezone.now() - dt.timedelta(hours=5)
    EngineHost.objects.create(name="one", url="http://one", started_at=then, heartbeat_at=then)
    figure = measure()["hosts.inventory"]
    assert (figure.value, figure.measured_at) == (1, then)


def test_requests_without_an_entry_are_found_and_pending_ones_told_apart(lately: Any, home: Any) -> None:
    finished = record_results(
        [
            Result(
                request_id=lately.request(status="queued").pk,
                status=Request.Status.SUCCEEDED,
                finished_at=timezone.now(),
            )
            for _ in range(2)
        ]
    )
    figure = measure()["ledger.requests_without_leaf"]
    assert (figure.value, figure.count, figure.details["pending"]) == (11, 13, 2)
    assert finished[0].pk not in figure.details["missing"]
    assert sequence() == 2
    figure = measure()["ledger.requests_without_leaf"]
    assert (figure.value, figure.details["pending"]) == (11, 0)


def test_a_finished_request_has_its_usage_in_the_same_transaction(floor: Any, round_card: RateCard) -> None:
    queued = floor.request(status="queued")
    record_results(
        [
            Result(
                request_id=queued.pk,
                status=Request.Status.SUCCEEDED,
                finished_at=timezone.now(),
                started_at=timezone.now(),
                compute_seconds=2.0,
                output_tokens=5,
            )
        ]
    )
    assert Usage.objects.get(request=queued).cost == Decimal("0.003")


def test_ledger_figures_are_of_the_scopes_tasks(lately: Any, next_door: Any, home: Any) -> None:
    from governance.ledger.services import ledger_key

    record(kind="task.updated", subject="descriptions", payload={})
    record(kind="batch.completed", subject=lately.batch.pk, payload={"task": "descriptions"})
    record(kind="evidence.exported", subject=lately.batch.pk, payload={"batch": lately.batch.pk})
    record(kind="task.updated", subject="next-door", payload={})
    sequence()
    assert measure()["ledger.checkpoint_age_seconds"].value is None
    sign_checkpoint(key=ledger_key())
    own = measure(Scope(task_id=lately.task.pk))
    assert own["ledger.leaves"].value == 3
    assert own["evidence.exports"].value == 1
    assert measure(Scope(task_id=next_door.task.pk))["evidence.exports"].value == 0
    assert measure()["ledger.leaves"].value == 4
    age = own["ledger.checkpoint_age_seconds"]
    assert (age.count, age.value is not None and 0 <= age.value < 60) == (4, True)


def test_coverage_collects_from_the_source(lately: Any) -> None:
    covered = coverage_of_all(scope=Scope(), window_days=30, now=timezone.now())
    monitoring = next(c for c in covered["iso-iec-42001-2023"] if c.control.id == "A.6.2.6")
    values = {item.rule.measurement: item.measurement and item.measurement.value for item in monitoring.items}
    assert values["requests.error_rate"] == 0.1
    assert collect(keys=["requests.count"], scope=Scope(), window_days=30)["requests.count"].value == 11


def test_the_number_of_queries_does_not_grow_with_requests(lately: Any, django_assert_max_num_queries: Any) -> None:
    with django_assert_max_num_queries(70):
        measure()

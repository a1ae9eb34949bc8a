"""How groups were served: rows of our own, figures from scipy and by hand."""

import datetime as dt
import json
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs

import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from django.utils import timezone, translation
from scipy.stats import binomtest
from scipy.stats.contingency import relative_risk

from governance.fairness.outcomes import Favourable, Verdict
from governance.ledger.models import OutboxEntry
from penstock.telemetry.fairness import fairness_report, set_thresholds
from penstock.telemetry.models import RateCard
from penstock.telemetry.recorder import record_usage


@pytest.fixture
def unequal(floor: Any, round_card: RateCard) -> Any:
    """32 requests a language, as the sample batch: 31 English ones valid, 4 Traditional Chinese ones."""
    hour_ago = timezone.now() - dt.timedelta(hours=1)
    rows = []
    for language, valid, compute, ttft in (("en", 31, 1.0, 0.2), ("zh-Hant", 4, 3.0, 0.5)):
        rows += [
            floor.request(
                origin=hour_ago,
                groups={"language": language},
                valid=n < valid,
                refused=False,
                ttft_seconds=ttft,
                output_tokens=10,
                prompt_tokens=20,
                compute_seconds=compute,
            )
            for n in range(32)
        ]
    record_usage(rows)
    return floor


def test_the_worse_served_group_fails_with_scipys_figures(unequal: Any, people: Any) -> None:
    report = fairness_report(user=people.auditor, task=unequal.task)
    chinese = report.group("zh-Hant")
    assert (chinese.count, chinese.favourable.events, chinese.verdict) == (32, 4, Verdict.FAIL)
    assert chinese.ratio == pytest.approx(4 / 31)
    wilson = binomtest(4, 32).proportion_ci(method="wilson")
    assert chinese.favourable.interval is not None
    assert (chinese.favourable.interval.low, chinese.favourable.interval.high) == pytest.approx(
        (wilson.low, wilson.high)
    )
    katz = relative_risk(4, 32, 31, 32).confidence_interval(0.95)
    assert chinese.ratio_interval is not None
    assert (chinese.ratio_interval.low, chinese.ratio_interval.high) == pytest.approx((katz.low, katz.high))


def test_cost_and_latency_stand_beside_the_verdict_as_ratios_to_the_best(unequal: Any, people: Any) -> None:
    report = fairness_report(user=people.auditor, task=unequal.task)
    chinese, english = report.services["zh-Hant"], report.services["en"]
    assert english.ttft_ratio == 1.0
    assert chinese.ttft_ratio == pytest.approx(2.5)
    assert chinese.cost_ratio == 3.0
    assert chinese.summary.cost_per_item == report.group("zh-Hant").cost_per_item == Decimal("0.0045")
    assert report.currency == "TWD"


def test_the_finding_says_it_plainly(unequal: Any, people: Any) -> None:
    katz = relative_risk(4, 32, 31, 32).confidence_interval(0.95)
    with translation.override("en"):
        assert fairness_report(user=people.auditor, task=unequal.task).finding == (
            "Valid answers: Traditional Chinese 13 %, English 97 %; "
            f"ratio 0.13 [{katz.low:.2f}, {katz.high:.2f}] is below the 0.80 threshold."
        )


def test_figures_equal_a_hand_written_query(unequal: Any, people: Any) -> None:
    from django.db import connection

    report = fairness_report(user=people.auditor, task=unequal.task)
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT r.groups ->> 'language', count(*), count(*) FILTER (WHERE r.valid), avg(u.cost),
                   percentile_cont(0.5) WITHIN GROUP (ORDER BY r.ttft_seconds)
            FROM serving_request r JOIN telemetry_usage u ON u.request_id = r.id WHERE r.task_id = %s GROUP BY 1
            """,
            [unequal.task.pk],
        )
        rows = cursor.fetchall()
    assert len(rows) == 2
    for name, count, valid, cost, ttft in rows:
        group = report.group(name)
        assert (group.count, group.valid.events, group.cost_per_item, group.ttft_p50_seconds) == (
            count,
            valid,
            cost,
            ttft,
        )


def test_errors_count_against_a_group_and_cancellations_do_not(unequal: Any, people: Any) -> None:
    hour_ago = timezone.now() - dt.timedelta(hours=1)
    for status in ("failed", "expired", "cancelled", "queued"):
        unequal.request(origin=hour_ago, status=status, groups={"language": "en"}, ttft_seconds=90.0)
    english = fairness_report(user=people.auditor, task=unequal.task).group("en")
    assert (english.count, english.error.events, english.favourable.count) == (34, 2, 34)
    assert english.ttft_mean_seconds == pytest.approx(0.2)


def test_each_group_leads_to_its_requests(unequal: Any, people: Any) -> None:
    report = fairness_report(user=people.auditor, task=unequal.task)
    query = parse_qs(report.services["zh-Hant"].requests_query)
    assert query["group"] == ["language:zh-Hant"]
    assert query["task"] == ["descriptions"]
    batch = fairness_report(user=people.auditor, task=unequal.task, batch=unequal.batch)
    assert parse_qs(batch.requests_query)["batch"] == [unequal.batch.pk]
    assert batch.count == 64


def test_requests_outside_the_window_do_not_count(unequal: Any, people: Any) -> None:
    long_ago = timezone.now() - dt.timedelta(days=20)
    unequal.request(origin=long_ago, groups={"language": "en"}, valid=True)
    assert fairness_report(user=people.auditor, task=unequal.task, window_days=7).count == 64
    assert fairness_report(user=people.auditor, task=unequal.task, window_days=30).count == 65


def test_an_outsider_gets_a_report_over_nothing(unequal: Any, people: Any) -> None:
    report = fairness_report(user=people.outsider, task=unequal.task)
    assert (report.count, report.groups) == (0, ())
    with translation.override("en"):
        assert report.finding == "No request has finished in this window."


def test_requests_that_name_no_group_are_said_to_be_so(floor: Any, people: Any) -> None:
    floor.request(origin=timezone.now() - dt.timedelta(minutes=5), valid=True)
    report = fairness_report(user=people.auditor, task=floor.task)
    assert report.without_group == 1
    with translation.override("en"):
        assert report.finding == "None of the 1 requests names its language, so there is nothing to compare."


def test_too_little_data_neither_passes_nor_fails(floor: Any, people: Any) -> None:
    for language in ("en", "zh-Hant"):
        floor.request(origin=timezone.now() - dt.timedelta(minutes=5), valid=True, groups={"language": language})
    report = fairness_report(user=people.auditor, task=floor.task)
    assert {group.verdict for group in report.groups} == {Verdict.INSUFFICIENT}
    assert report.worst is None
    assert "30" in report.finding


def test_other_thresholds_another_verdict_and_a_new_version(unequal: Any, people: Any) -> None:
    task = set_thresholds(user=people.operator, task=unequal.task, plan={"min_ratio": 0.1})
    assert task.version == 2
    report = fairness_report(user=people.auditor, task=task)
    assert report.group("zh-Hant").verdict is Verdict.PASS
    event = OutboxEntry.objects.get(kind="thresholds.changed")
    assert (event.actor, event.payload["after"]["min_ratio"]) == ("operator", 0.1)


def test_thresholds_that_cannot_be_are_refused_by_name(unequal: Any, people: Any) -> None:
    with pytest.raises(ValidationError) as refusal:
        set_thresholds(user=people.operator, task=unequal.task, plan={"min_ratio": 1.5})
    assert "fairness_plan" in refusal.value.message_dict
    with pytest.raises(PermissionDenied):
        set_thresholds(user=people.auditor, task=unequal.task, plan={"min_ratio": 0.5})


def test_the_plan_names_group_and_outcome(floor: Any, people: Any) -> None:
    floor.task.fairness_plan = {"group": "store__region", "favourable": "not_truncated"}
    for n in range(30):
        floor.request(
            origin=timezone.now() - dt.timedelta(minutes=5),
            groups={"store__region": "north" if n % 2 else "south"},
            truncated=n % 2 == 0,
        )
    report = fairness_report(user=people.auditor, task=floor.task)
    assert report.favourable is Favourable.NOT_TRUNCATED
    assert (report.group("north").favourable.rate, report.group("south").favourable.rate) == (1.0, 0.0)


def test_a_report_is_plain_json(unequal: Any, people: Any) -> None:
    plain = json.loads(json.dumps(fairness_report(user=people.auditor, task=unequal.task).as_json()))
    chinese = next(group for group in plain["groups"] if group["group"] == "zh-Hant")
    assert (chinese["verdict"], chinese["favourable"]["events"], chinese["cost_per_item"]) == (
        "fail",
        4,
        "0.0045000000",
    )

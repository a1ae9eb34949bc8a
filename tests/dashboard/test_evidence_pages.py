"""Fairness, controls and the ledger."""

import io
from typing import Any

import openpyxl
import pytest
from django.urls import reverse


def test_the_fairness_page_says_it_in_words_and_in_figures(world: Any, people: Any, as_person: Any) -> None:
    page = as_person(people.auditor).get(reverse("dashboard:fairness-task", args=[world.task.name]))
    text = page.content.decode()
    groups = {group.group: group for group in page.context["report"].groups}
    # Of nine finished: en has lines 1, 5, 7 valid, 3 failed, and line 1 of the running batch; zh-Hant has four, none
    # of them valid.
    assert (groups["en"].favourable.events, groups["en"].favourable.count) == (4, 5)
    assert (groups["zh-Hant"].favourable.events, groups["zh-Hant"].favourable.count) == (0, 4)
    assert str(groups["zh-Hant"].verdict) == "fail"
    assert "Traditional Chinese is served worse" in text
    assert "(37.6–96.4%)" in text  # Wilson's interval of 4 of 5
    chart = page.context["chart"]
    assert chart.figure["data"][0]["x"] == [80.0, 0.0]


def test_the_overview_warns_of_unequal_service(world: Any, people: Any, as_person: Any) -> None:
    page = as_person(people.operator).get("/")
    assert "Groups are served unequally" in page.content.decode()
    assert [task.name for task, _report in page.context["fairness"]] == ["descriptions"]


def test_each_count_leads_to_as_many_requests(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.auditor)
    report = client.get(reverse("dashboard:fairness-task", args=[world.task.name])).context["report"]
    for group in report.groups:
        query = report.services[group.group].requests_query
        assert client.get(f"/requests/?{query}").context["count"] == group.count


def test_thresholds_are_changed_by_those_who_may(world: Any, people: Any, as_person: Any) -> None:
    url = reverse("dashboard:fairness-task", args=[world.task.name])
    typed = {"group": "language", "min_ratio": "0.9", "min_count": "10", "min_events": "2", "confidence": "0.9"}
    assert as_person(people.auditor).post(url, typed).status_code == 403
    client = as_person(people.operator)
    client.post(url, typed)
    world.task.refresh_from_db()
    assert world.task.fairness_plan["min_ratio"] == 0.9
    assert world.task.fairness_plan["min_count"] == 10
    for field, value in (("min_ratio", "0"), ("confidence", "0.2"), ("min_count", "0"), ("group", "")):
        answer = client.post(url, {**typed, field: value})
        assert answer.status_code == 400
        assert field in answer.context["form"].errors, field


def test_the_coverage_page_lists_every_control_with_its_state(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.auditor)
    page = client.get("/controls/", follow=True)
    assert page.context["catalog"].id == "iso-iec-42001-2023"
    rows = [row for _heading, rows in page.context["sections"] for row in rows]
    assert len(rows) == 38
    assert sum(count for _state, _label, count in page.context["states"]) == 38
    assert len(client.get("/controls/nist-ai-rmf-1.0/").context["sections"]) > 4
    one_state = client.get("/controls/iso-iec-42001-2023/?state=not_mapped")
    shown = [row for _heading, rows in one_state.context["sections"] for row in rows]
    assert 0 < len(shown) < 38


def test_a_controls_figures_lead_down_to_their_requests(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.auditor)
    page = client.get("/controls/iso-iec-42001-2023/A.6.2.6/")
    text = page.content.decode()
    led = 0
    for row in page.context["items"]:
        measurement = row["item"].measurement
        assert row["next_question"] in text.replace("&#x27;", "'")
        if measurement is not None and measurement.requests_query:
            answer = client.get(f"/requests/?{measurement.requests_query}")
            assert answer.status_code == 200, measurement.key
            led += 1
    assert led >= 3


def test_an_unknown_catalog_or_control_is_no_page(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.auditor)
    for url in ("/controls/no-such/", "/controls/iso-iec-42001-2023/A.99/", "/controls/no-such/statement.xlsx"):
        assert client.get(url).status_code == 404


def test_an_approver_decides_about_a_control(world: Any, people: Any, as_person: Any) -> None:
    from governance.controls.selectors import applicability_of

    url = "/controls/iso-iec-42001-2023/A.4.2/"
    decision = {
        "applicable": "no",
        "justification": "Done by the parent company.",
        "origin": "contract",
        "implementation_status": "not_needed",
        "link": "https://intranet.example/ai",
    }
    assert as_person(people.operator).post(url, decision).status_code == 403
    client = as_person(people.approver)
    client.post(url, decision)
    found = applicability_of("iso-iec-42001-2023", "A.4.2")
    assert found is not None and found.applicable is False and found.updated_by == "approver"
    unfit = client.post(url, {**decision, "applicable": "yes"})
    assert unfit.status_code == 400 and unfit.context["form"].errors
    unreasoned = client.post(url, {**decision, "justification": ""})
    assert "justification" in unreasoned.context["form"].errors
    script = client.post(url, {**decision, "link": "javascript:alert(1)"})
    assert "link" in script.context["form"].errors


@pytest.mark.parametrize("url", ("/controls/matrix.xlsx", "/controls/iso-iec-42001-2023/statement.xlsx"))
def test_the_workbooks_open(world: Any, people: Any, as_person: Any, url: str) -> None:
    answer = as_person(people.auditor).get(url)
    assert "attachment" in answer["Content-Disposition"]
    book = openpyxl.load_workbook(io.BytesIO(answer.content))
    assert len(book.sheetnames) >= 2


def test_the_whole_ledger_is_verified_on_request(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.auditor)
    answer = client.post("/ledger/verify/", headers={"hx-request": "true"})
    assert answer.context["found"].intact
    assert "Intact" in answer.content.decode()


def test_only_an_administrator_sees_events_of_all_teams(world: Any, people: Any, as_person: Any) -> None:
    assert "foreign-task" not in as_person(people.auditor).get("/ledger/").content.decode()
    assert "foreign-task" in as_person(people.administrator).get("/ledger/").content.decode()


def test_the_overviews_batches_follow_themselves_until_none_runs(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.operator)
    assert 'hx-trigger="every 5s"' in client.get("/overview/batches/").content.decode()
    type(world.running).objects.filter(pk=world.running.pk).update(status="expired")
    part = client.get("/overview/batches/").content.decode()
    assert "hx-trigger" not in part
    assert "running.jsonl" in part and "<html" not in part

import base64
import json
from typing import Any

import pytest
from rest_framework.test import APIClient

from governance.ledger.models import OutboxEntry
from penstock.registry.models import Task

pytestmark = pytest.mark.django_db

NEW_TASK = {
    "name": "replies",
    "team": "shop",
    "title": "Replies",
    "purpose": "Drafts replies for a person to check.",
    "latency_class": "interactive",
    "model_release": "small-model",
    "budget_amount": "1000.00",
    "budget_currency": "TWD",
}


def test_a_task_is_created_changed_and_brought_to_life(signed_in: Any, people: Any, release: Any) -> None:
    operator, approver = signed_in(people.operator), signed_in(people.approver)
    created = operator.post("/api/tasks/", NEW_TASK, format="json")
    assert created.status_code == 201
    assert (created.data["status"], created.data["version"], created.data["owner"]) == ("draft", 1, "operator")
    assert created.data["transitions"] == ["submit"]
    changed = operator.patch("/api/tasks/replies/", {"system_prompt": "Be brief."}, format="json")
    assert (changed.status_code, changed.data["version"]) == (200, 2)
    assert operator.post("/api/tasks/replies/activate/").status_code == 403
    assert operator.post("/api/tasks/replies/submit/").data["status"] == "submitted"
    assert approver.post("/api/tasks/replies/activate/").data["status"] == "active"
    stopped = operator.post("/api/tasks/replies/suspend/", {"reason": "wrong tone"}, format="json")
    assert stopped.data["status"] == "suspended"
    assert OutboxEntry.objects.get(kind="task.suspended").payload["reason"] == "wrong tone"
    versions = operator.get("/api/tasks/replies/versions/").data
    assert [version["version"] for version in versions] == [2, 1]
    assert approver.post("/api/tasks/replies/retire/").data["status"] == "retired"


def test_a_change_of_state_that_the_table_does_not_hold_is_a_409(signed_in: Any, people: Any, task: Any) -> None:
    answer = signed_in(people.approver).post("/api/tasks/descriptions/activate/")
    assert answer.status_code == 409
    assert "Draft" in answer.data["detail"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "Bad Name"}, "name"),
        ({"name": "descriptions"}, "name"),
        ({"team": "elsewhere"}, "team"),
        ({"team": "none"}, "team"),
        ({"model_release": "none"}, "model_release"),
        ({"owner": "outsider"}, "owner"),
        ({"latency_class": "someday"}, "latency_class"),
        ({"objectives": [{"metric": "speed", "target": 1}]}, "objectives"),
        ({"output_contract": {"colour": 1}}, "output_contract"),
        ({"fairness_plan": []}, None),
        ({"fairness_plan": "strict"}, "fairness_plan"),
        ({"prompt_template": "5 $ each"}, "prompt_template"),
        ({"budget_currency": ""}, "non_field_errors"),
        ({"title": None}, "title"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    signed_in: Any, people: Any, task: Any, fields: dict[str, Any], named: str | None
) -> None:
    answer = signed_in(people.operator).post("/api/tasks/", {**NEW_TASK, **fields}, format="json")
    if named is None:
        assert answer.status_code == 201
        return
    assert answer.status_code == 400
    assert list(answer.data) == [named]
    assert not Task.objects.filter(name="replies").exists()


def test_those_who_only_read_get_403(signed_in: Any, people: Any, task: Any) -> None:
    auditor = signed_in(people.auditor)
    assert auditor.get("/api/tasks/descriptions/").status_code == 200
    assert auditor.post("/api/tasks/", NEW_TASK, format="json").status_code == 403
    assert auditor.patch("/api/tasks/descriptions/", {"title": "x"}, format="json").status_code == 403
    assert auditor.put("/api/rate-card/", {"name": "x"}, format="json").status_code in {400, 403}


ADDRESSES = [
    "/api/tasks/descriptions/",
    "/api/tasks/descriptions/versions/",
    "/api/tasks/descriptions/measurements/",
    "/api/batches/batch_1/",
    "/api/batches/batch_1/measurements/",
    "/api/requests/batch_req_8/",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_outsider_finds_nothing_of_another_team(
    signed_in: Any, by_key: Any, people: Any, batch: Any, address: str
) -> None:
    from penstock.accounts.models import Team

    elsewhere = Team.objects.get(slug="elsewhere")
    assert signed_in(people.operator).get(address).status_code == 200
    assert by_key(people.operator).get(address).status_code == 200
    assert signed_in(people.outsider).get(address).status_code == 404
    assert by_key(people.outsider, elsewhere).get(address).status_code == 404
    # A key opens its own team alone, whoever made it.
    assert by_key(people.administrator, elsewhere).get(address).status_code == 404
    assert APIClient().get(address).status_code == 401


@pytest.mark.parametrize("address", ["/api/tasks/", "/api/batches/", "/api/requests/", "/api/pilots/"])
def test_an_outsiders_lists_are_empty(signed_in: Any, people: Any, batch: Any, address: str) -> None:
    assert signed_in(people.outsider).get(address).data["results"] == []
    assert APIClient().get(address).status_code == 401


@pytest.mark.parametrize("act", ["submit", "activate", "suspend", "retire"])
def test_an_outsider_moves_nothing(signed_in: Any, people: Any, task: Any, act: str) -> None:
    outsider = signed_in(people.outsider)
    assert outsider.post(f"/api/tasks/descriptions/{act}/").status_code == 404
    assert outsider.patch("/api/tasks/descriptions/", {"title": "x"}, format="json").status_code == 404
    task.refresh_from_db()
    assert (task.status, task.version) == ("draft", 1)


def test_a_key_creates_tasks_in_its_own_team_alone(by_key: Any, people: Any, release: Any) -> None:
    from penstock.accounts.models import Membership, Role, Team

    elsewhere = Team.objects.get(slug="elsewhere")
    Membership.objects.create(user=people.operator, team=elsewhere, role=Role.OPERATOR)
    client = by_key(people.operator, elsewhere)
    assert client.post("/api/tasks/", NEW_TASK, format="json").status_code == 403
    assert client.post("/api/tasks/", {**NEW_TASK, "team": "elsewhere"}, format="json").status_code == 201
    assert OutboxEntry.objects.get(kind="task.created").actor.startswith("key:")


def test_a_session_needs_the_csrf_token_and_a_key_does_not(people: Any, by_key: Any, release: Any) -> None:
    browser = APIClient(enforce_csrf_checks=True)
    browser.force_login(people.operator)
    assert browser.post("/api/tasks/", NEW_TASK, format="json").status_code == 403
    assert by_key(people.operator).post("/api/tasks/", NEW_TASK, format="json").status_code == 201


def test_a_release_is_seen_by_all_and_approved_by_an_approver(signed_in: Any, people: Any, release: Any) -> None:
    type(release).objects.update(status="imported", approved_at=None)
    assert signed_in(people.outsider).get("/api/releases/").data["results"][0]["name"] == "small-model"
    assert signed_in(people.operator).post("/api/releases/small-model/approve/").status_code == 403
    approver = signed_in(people.approver)
    assert approver.post("/api/releases/small-model/approve/").data["approved_by"] == "approver"
    assert approver.post("/api/releases/small-model/approve/").status_code == 409
    assert approver.post("/api/releases/small-model/withdraw/").data["status"] == "withdrawn"
    assert "store_path" not in approver.get("/api/releases/small-model/").data


def test_a_releases_evaluations_come_with_it(signed_in: Any, people: Any, release: Any) -> None:
    assert signed_in(people.auditor).get("/api/releases/small-model/").data["evaluations"] == []
    release.evaluations.create(
        figures={"perplexity": {"value": 20.5, "low": None, "high": None}},
        text_name="heldout.txt",
        text_sha256="ee" * 32,
        reference_digest="dd" * 32,
        evaluated_by="operator",
    )
    (evaluation,) = signed_in(people.auditor).get("/api/releases/small-model/").data["evaluations"]
    assert evaluation["figures"]["perplexity"]["value"] == 20.5
    assert (evaluation["text_sha256"], evaluation["evaluated_by"]) == ("ee" * 32, "operator")


def test_the_list_of_requests_pages_in_line_order_and_leaves_texts_out(
    signed_in: Any, people: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.rest_api.serving import RowsInOrder

    monkeypatch.setattr(RowsInOrder, "page_size", 2)
    client = signed_in(people.auditor)
    lines, address = [], "/api/requests/?batch=batch_1"
    while address:
        page = client.get(address)
        assert b"secret prompt" not in page.content
        lines += [row["line"] for row in page.data["results"]]
        address = page.data["next"]
    assert lines == [1, 2, 3, 4, 5]
    seen, address = set(), "/api/requests/"
    while address:
        page = client.get(address).data
        seen |= {row["id"] for row in page["results"]}
        address = page["next"]
    assert len(seen) == 5
    detail = client.get("/api/requests/batch_req_8/").data
    assert detail["body"]["messages"][0]["content"] == "secret prompt 1"
    assert detail["output_text"] == "a fine cup"


def test_lists_are_filtered_by_task_and_status(signed_in: Any, people: Any, batch: Any) -> None:
    client = signed_in(people.operator)

    def count(address: str) -> int:
        return len(client.get(address).data["results"])

    assert count("/api/requests/?status=failed") == 1
    assert count("/api/requests/?status=succeeded&task=descriptions&batch=batch_1") == 4
    assert count("/api/requests/?task=none") == 0
    assert count("/api/batches/?status=in_progress&task=descriptions") == 1
    assert count("/api/batches/?status=completed") == 0
    assert client.get("/api/batches/?status=lost").status_code == 400
    assert client.get("/api/requests/?status=lost").status_code == 400


def test_a_batch_tells_its_progress(signed_in: Any, people: Any, batch: Any) -> None:
    progress = signed_in(people.operator).get("/api/batches/batch_1/").data["progress"]
    assert (progress["total"], progress["succeeded"], progress["failed"]) == (5, 4, 1)


def test_measurements_are_those_of_the_rows(signed_in: Any, people: Any, batch: Any) -> None:
    client = signed_in(people.operator)
    figures = client.get("/api/batches/batch_1/measurements/").data
    assert figures["window_start"] is None
    assert figures["summary"]["succeeded"] == 4
    assert figures["summary"]["output_tokens"] == 80
    assert figures["summary"]["error_rate"] == 0.2  # one of five, by hand
    assert figures["summary"]["output_tokens_per_second"] == 16.0  # 80 tokens in 5 seconds, by hand
    (objective,) = figures["objectives"]
    assert (objective["metric"], objective["verdict"], objective["value"]) == ("error_rate", "met", "0.2")
    of_task = client.get("/api/tasks/descriptions/measurements/?days=7").data
    assert of_task["summary"]["output_tokens"] in {0, None, 80}  # the last rows finish seconds from now
    for days in ("0", "-1", "x", "99999", "1.5", "²"):
        assert client.get(f"/api/tasks/descriptions/measurements/?days={days}").status_code == 400


def test_measurements_are_what_the_schema_says(signed_in: Any, people: Any, batch: Any) -> None:
    from penstock.rest_api.measurements import Measurements

    client = signed_in(people.operator)
    for address in ("/api/batches/batch_1/measurements/", "/api/tasks/descriptions/measurements/"):
        Measurements.model_validate_json(client.get(address).content)


def test_the_rate_card_is_read_by_all_and_replaced_by_a_new_one(signed_in: Any, people: Any) -> None:
    first = signed_in(people.auditor).get("/api/rate-card/").data
    card = {key: first[key] for key in first if key not in {"id", "created_at", "created_by"}}
    assert signed_in(people.auditor).put("/api/rate-card/", card, format="json").status_code == 403
    manager = signed_in(people.pilot_manager)
    changed = manager.put("/api/rate-card/", {**card, "power_watts": "250.0"}, format="json")
    assert changed.status_code == 200
    assert changed.data["power_watts"] == "250.0"
    assert changed.data["id"] != first["id"]
    bad = manager.put("/api/rate-card/", {**card, "utilization": "1.5"}, format="json")
    assert (bad.status_code, list(bad.data)) == (400, ["utilization"])
    assert manager.get("/api/rate-card/").data["id"] == changed.data["id"]


def test_the_schema_says_how_to_sign_in(client: Any) -> None:
    schema = client.get("/api/schema/?format=json").json()
    assert schema["openapi"].startswith("3.1")
    assert schema["components"]["securitySchemes"]["apiKey"]["scheme"] == "bearer"


def test_the_schema_is_generated_without_a_warning(tmp_path: Any) -> None:
    from django.core.management import call_command

    call_command("spectacular", "--validate", "--fail-on-warn", "--file", str(tmp_path / "schema.yaml"))


def test_the_docs_page_runs_no_inline_script(client: Any, settings: Any) -> None:
    settings.STORAGES = {
        **settings.STORAGES,
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    }
    page = client.get("/api/docs/").content.decode()
    scripts = page.split("<script")[1:]
    assert scripts
    assert all("src=" in script.split(">")[0] for script in scripts)


def test_text_that_cannot_be_stored_is_refused(signed_in: Any, people: Any, batch: Any) -> None:
    client = signed_in(people.operator)
    assert client.get("/api/batches/%00/").status_code == 404
    assert client.get("/api/requests/?task=%00").status_code == 400
    for broken in ("a\x00b", "a\ud800b"):
        body = {**NEW_TASK, "output_contract": {"forbidden_phrases": [broken]}}
        assert client.post("/api/tasks/", json.dumps(body), content_type="application/json").status_code == 400
    assert client.post("/api/tasks/", b"{", content_type="application/json").status_code == 400
    assert client.post("/api/tasks/", b"[1]", content_type="application/json").status_code == 400


@pytest.mark.parametrize("body", (b"[" * 100_000, b'{"a":' * 100_000))
def test_a_body_nested_too_deep_is_refused(signed_in: Any, people: Any, body: bytes) -> None:
    answer = signed_in(people.operator).post("/api/tasks/", body, content_type="application/json")
    assert answer.status_code == 400
    assert "nested too deep" in str(answer.data)


def test_a_cursor_that_was_not_made_here_leads_nowhere(signed_in: Any, people: Any) -> None:
    client = signed_in(people.operator)
    for position in ("x", "p=%00"):
        cursor = base64.b64encode(position.encode()).decode()
        assert client.get("/api/tasks/", {"cursor": cursor}).status_code in (200, 404)

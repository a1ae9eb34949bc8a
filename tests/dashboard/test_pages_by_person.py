"""Every page, by who asks for it. A page that is new has to be put in the table here."""

from collections.abc import Callable
from typing import Any

import pytest
from django.urls import reverse

from penstock.dashboard.urls import PAGES

# Pages that anybody signed in may see, whose content then is the person's own.
LISTS = (
    "overview",
    "overview-batches",
    "tasks",
    "releases",
    "batches",
    "batch-new",
    "requests",
    "fairness",
    "controls-catalog",
    "control",
    "ledger",
    "pilots",
    "pilot-new",
    "task-new",
    "rates",
    "keys",
    "key-new",
    "people",
    "person-new",
    "person-team",
    "person-password",
    "release",
)
# Pages of one team's things: to an outsider they do not exist.
THINGS = (
    "task",
    "task-edit",
    "batch",
    "batch-cancel",
    "request",
    "fairness-task",
    "pilot",
    "pilot-edit",
    "person-role",
    "key-revoke",
)
# What these give is looked at in tests of their own.
ELSEWHERE = (
    "host",
    "controls",
    "controls-matrix",
    "controls-statement",
    "task-act",
    "release-act",
    "pilot-act",
    "pilot-live",
    "pilot-report",
    "batch-live",
    "batch-charts",
    "file",
)
ONLY_POST = ("task-export", "batch-verify", "batch-export", "request-verify", "ledger-verify")


def arguments(world: Any) -> dict[str, dict[str, str]]:
    task = {"name": world.task.name}
    batch = {"batch_id": world.done.pk}
    request = {"request_id": world.request.pk}
    pilot = {"name": world.pilot.name}
    catalog = {"catalog_id": "iso-iec-42001-2023"}
    return {
        **dict.fromkeys(("task", "task-edit", "task-export", "fairness-task"), task),
        "task-act": {**task, "act": "suspend"},
        "release": {"name": world.release.name},
        "release-act": {"name": world.release.name, "act": "withdraw"},
        **dict.fromkeys(("batch", "batch-live", "batch-charts", "batch-cancel", "batch-verify", "batch-export"), batch),
        "file": {"file_id": world.file.pk},
        **dict.fromkeys(("request", "request-verify"), request),
        **dict.fromkeys(("controls-catalog", "controls-statement"), catalog),
        "control": {**catalog, "control_id": "A.6.2.6"},
        **dict.fromkeys(("pilot", "pilot-edit", "pilot-live"), pilot),
        "pilot-report": {**pilot, "language": "en"},
        "pilot-act": {**pilot, "act": "stop"},
        "key-revoke": {"prefix": world.key.prefix},
        "person-role": {"username": "operator"},
        "host": {"name": "night-host"},
    }


def address(name: str, world: Any) -> str:
    return reverse(f"dashboard:{name}", kwargs=arguments(world).get(name, {}))


def test_every_page_is_in_one_of_the_tables() -> None:
    assert sorted(PAGES) == sorted((*LISTS, *THINGS, *ELSEWHERE, *ONLY_POST))


def test_a_stranger_is_sent_to_the_sign_in_page(world: Any, client: Any) -> None:
    for name in PAGES:
        url = address(name, world)
        for answer in (client.get(url), client.post(url)):
            assert answer.status_code == 302, name
            assert answer["Location"].startswith(reverse("dashboard:sign-in")), name


@pytest.mark.parametrize("role", ("operator", "auditor", "administrator"))
def test_the_team_and_the_administrator_see_every_page(
    role: str, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    client = as_person(getattr(people, role))
    answers = {name: client.get(address(name, world)).status_code for name in (*LISTS, *THINGS)}
    assert {name: status for name, status in answers.items() if status != 200} == {}


def test_a_teams_things_do_not_exist_for_an_outsider(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    client = as_person(people.outsider)
    installations = {"ledger-verify", "release-act", "controls", "controls-matrix", "controls-statement"}
    for name in (*THINGS, *ONLY_POST, *ELSEWHERE):
        if name in installations:
            continue
        url = address(name, world)
        assert client.get(url).status_code in ((404, 405) if name in ONLY_POST else (404,)), name
        assert client.post(url).status_code in (404, 405), name


def test_no_list_shows_an_outsider_what_belongs_to_another_team(
    world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    client = as_person(people.outsider)
    for name in LISTS:
        page = client.get(address(name, world)).content.decode()
        for secret in (world.task.title, world.done.pk, world.request.custom_id, world.pilot.title, world.key.prefix):
            assert secret not in page, (name, secret)


def test_an_auditor_changes_nothing(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    client = as_person(people.auditor)
    for name, data in (
        ("task-act", {"reason": "x"}),
        ("batch-cancel", {}),
        ("pilot-act", {"decision": "stop", "reason": "x"}),
        ("control", {"applicable": "yes", "justification": "x", "origin": "risk", "implementation_status": "planned"}),
        ("key-revoke", {}),
        ("person-new", {"username": "new", "password": "another long phrase 1", "role": "operator"}),
    ):
        url = (
            address("batch-cancel", world).replace("done", "running")
            if name == "batch-cancel"
            else address(name, world)
        )
        assert client.post(url, data).status_code == 403, name
    world.task.refresh_from_db()
    assert world.task.status == "active"


def test_a_refusal_says_which_role_would_do(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    answer = as_person(people.auditor).post(address("task-act", world), {"reason": "x"})
    page = answer.content.decode()
    assert "This is not yours to do" in page
    assert "Approver" in page


def test_error_pages_are_in_the_houses_style_and_programs_get_json(
    world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    client = as_person(people.operator)
    page = client.get("/no/such/page/")
    assert page.status_code == 404
    assert "There is no such page" in page.content.decode()
    assert client.get("/api/no-such-thing/").json()["error"]["code"]


def test_an_error_of_the_server_shows_a_page_that_needs_no_database(client: Any) -> None:
    from django.test import RequestFactory

    from penstock.dashboard.views.frame import server_error

    answer = server_error(RequestFactory().get("/"))
    assert answer.status_code == 500
    assert b"Something went wrong here" in answer.content  # type: ignore[attr-defined]

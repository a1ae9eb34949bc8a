"""Rate card, API keys and people."""

import re
from decimal import Decimal
from typing import Any

import pytest
from django.urls import reverse


@pytest.fixture
def rates(db: None) -> dict[str, str]:
    return {
        "name": "Round",
        "currency": "TWD",
        "hardware_price": "31557.60",
        "lifetime_years": "1",
        "utilization": "1",
        "power_watts": "1000",
        "electricity_price_per_kwh": "3.6",
        "carbon_kg_per_kwh": "0.5",
    }


def test_the_page_shows_what_an_hour_costs(rates: dict[str, str], people: Any, as_person: Any) -> None:
    client = as_person(people.operator)
    assert "nobody's prices" in client.get("/settings/rates/").content.decode().replace("&#x27;", "'")
    client.post("/settings/rates/", rates)
    page = client.get("/settings/rates/")
    # 31,557.60 over a year of 31,557,600 seconds is 0.001 a second: 3.60 an hour; 1 kW at 3.60 a kWh is 3.60 an hour.
    assert page.context["hour_hardware"] == pytest.approx(Decimal("3.6"))
    assert page.context["hour_power"] == pytest.approx(Decimal("3.6"))
    assert page.context["hour"] == pytest.approx(Decimal("7.2"))
    assert "7.20" in page.content.decode()


@pytest.mark.parametrize(
    ("field", "value"),
    (
        ("utilization", "0"),
        ("utilization", "1.5"),
        ("lifetime_years", "0"),
        ("hardware_price", "-1"),
        ("power_watts", "many"),
        ("currency", "T1"),
        ("name", ""),
    ),
)
def test_a_wrong_rate_stands_beside_its_field(
    rates: dict[str, str], people: Any, as_person: Any, field: str, value: str
) -> None:
    from penstock.telemetry.models import RateCard

    before = RateCard.objects.count()
    answer = as_person(people.operator).post("/settings/rates/", {**rates, field: value})
    assert answer.status_code == 400
    assert field in answer.context["form"].errors
    assert RateCard.objects.filter(name="Round").count() == 0
    assert RateCard.objects.count() <= before + 1


def test_who_may_only_read_cannot_change_rates(rates: dict[str, str], people: Any, as_person: Any) -> None:
    client = as_person(people.auditor)
    assert client.post("/settings/rates/", rates).status_code == 403
    assert '<form class="stacked"' not in client.get("/settings/rates/").content.decode()


def test_a_key_is_shown_once_and_opens_the_api(world: Any, people: Any, as_person: Any) -> None:
    from penstock.accounts.authentication import authenticate_key

    client = as_person(people.operator)
    made = client.post(
        "/settings/keys/new/", {"name": "Exporter 2", "team": people.team.pk, "task_name": "descriptions"}
    )
    found = re.search(r"pk_[0-9a-f]{12}_[\w-]+", made.content.decode())
    assert found
    key = authenticate_key(found.group())
    assert key is not None and key.task_name == "descriptions"
    assert "no-store" in made["Cache-Control"]
    listed = client.get("/settings/keys/").content.decode()
    assert "Exporter 2" in listed
    assert found.group() not in listed
    client.post(reverse("dashboard:key-revoke", args=[key.prefix]))
    assert authenticate_key(found.group()) is None


@pytest.mark.parametrize(
    ("change", "field"),
    (
        ({"name": ""}, "name"),
        ({"task_name": "foreign-task"}, "task_name"),
        ({"expires_on": "2020-01-01"}, "expires_on"),
        ({"team": "999999"}, "team"),
    ),
)
def test_a_problem_of_a_key_stands_beside_its_field(
    world: Any, people: Any, as_person: Any, change: dict[str, str], field: str
) -> None:
    answer = as_person(people.operator).post(
        "/settings/keys/new/", {"name": "x", "team": people.team.pk, "task_name": "", **change}
    )
    assert answer.status_code == 400
    assert field in answer.context["form"].errors


def test_only_an_administrator_adds_people_and_teams(people: Any, as_person: Any) -> None:
    from penstock.accounts.models import Membership, Team, User

    person = {
        "username": "newcomer",
        "password": "quite a long phrase 7",
        "role": "auditor",
        "team": people.team.pk,
    }
    assert as_person(people.operator).post("/settings/people/new/", person).status_code == 403
    assert not User.objects.filter(username="newcomer").exists()
    client = as_person(people.administrator)
    assert client.post("/settings/people/new/", person).status_code == 302
    assert Membership.objects.filter(user__username="newcomer", role="auditor", team=people.team).exists()
    assert client.post("/settings/people/new-team/", {"name": "Finance", "slug": "finance"}).status_code == 302
    assert Team.objects.filter(slug="finance").exists()
    weak = client.post("/settings/people/new/", {**person, "username": "other", "password": "short"})
    assert "password" in weak.context["form"].errors
    taken = client.post("/settings/people/new/", person)
    assert "username" in taken.context["form"].errors


def test_a_role_is_given_and_taken(people: Any, as_person: Any) -> None:
    from penstock.accounts.models import Membership

    url = reverse("dashboard:person-role", args=["operator"])
    role = {"team": people.team.pk, "role": "approver"}
    assert as_person(people.operator).post(url, role).status_code == 400  # no team to choose
    client = as_person(people.administrator)
    client.post(url, role)
    assert Membership.objects.filter(user=people.operator, role="approver").exists()
    client.post(url, {**role, "take": "yes"})
    assert not Membership.objects.filter(user=people.operator, role="approver").exists()


def test_a_person_changes_their_own_password_and_stays_signed_in(people: Any, as_person: Any) -> None:
    client = as_person(people.operator)
    wrong = client.post("/settings/people/password/", {"current": "no", "password": "another long phrase 9"})
    assert "current" in wrong.context["form"].errors
    client.post("/settings/people/password/", {"current": "a long pass phrase 1", "password": "another long phrase 9"})
    people.operator.refresh_from_db()
    assert people.operator.check_password("another long phrase 9")
    assert client.get("/").status_code == 200


def test_the_form_for_a_new_person_offers_only_teams_that_one_may_see(people: Any, as_person: Any) -> None:
    offered = {
        who: set(as_person(who).get(reverse("dashboard:person-new")).context["form"].fields["team"].queryset)
        for who in (people.administrator, people.operator, people.outsider)
    }
    assert people.team in offered[people.administrator]
    assert people.team in offered[people.operator]
    assert people.team not in offered[people.outsider]

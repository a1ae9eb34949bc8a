from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from django.test import RequestFactory
from django.utils import timezone
from rest_framework.exceptions import AuthenticationFailed

from governance.ledger.models import OutboxEntry
from penstock.accounts.authentication import ApiKeyAuthentication, authenticate_key, bearer_token
from penstock.accounts.models import ApiKey, Membership, Role, User
from penstock.accounts.selectors import keys_visible_to, people_visible_to, roles_in
from penstock.accounts.services import (
    create_key,
    create_person,
    create_team,
    grant_role,
    revoke_key,
    revoke_role,
)

pytestmark = pytest.mark.django_db


def events(kind: str) -> list[OutboxEntry]:
    return list(OutboxEntry.objects.filter(kind=kind))


def test_a_key_is_shown_once_and_kept_only_as_a_digest(people: Any) -> None:
    key, token = create_key(user=people.operator, team=people.team, name="nightly")
    assert token.startswith(f"pk_{key.prefix}_")
    secret = token.split("_", 2)[2]
    assert secret not in str(ApiKey.objects.filter(pk=key.pk).values().get())
    (event,) = events("key.created")
    assert event.subject == f"key:{key.prefix}"
    assert event.actor == "operator"
    assert secret not in str(event.payload)


def test_a_key_is_known_by_its_whole_token(people: Any) -> None:
    key, token = create_key(user=people.operator, team=people.team, name="nightly")
    found = authenticate_key(token)
    assert found == key
    assert found is not None
    assert found.user.actor == f"key:{key.prefix}"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda token: token[:-1],
        lambda token: token + "x",
        lambda token: token.replace("pk_", "sk_"),
        lambda token: "pk_" + "0" * 12 + "_" + token.split("_", 2)[2],
        lambda token: "",
        lambda token: "pk_",
        lambda token: "pk__",
        lambda token: "pk_\x00_x",
        lambda token: token.split("_", 2)[1],
    ],
)
def test_anything_else_is_no_key(people: Any, spoil: Any) -> None:
    _key, token = create_key(user=people.operator, team=people.team, name="nightly")
    assert authenticate_key(spoil(token)) is None


def test_a_key_ends_when_it_expires(people: Any) -> None:
    key, token = create_key(
        user=people.operator, team=people.team, name="trial", expires_at=timezone.now() + timedelta(hours=1)
    )
    assert authenticate_key(token) is not None
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    assert authenticate_key(token) is None


def test_a_key_cannot_be_born_expired(people: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        create_key(user=people.operator, team=people.team, name="late", expires_at=timezone.now())
    assert "expires_at" in caught.value.message_dict


def test_a_revoked_key_ends_at_once_and_is_revoked_once(people: Any) -> None:
    key, token = create_key(user=people.operator, team=people.team, name="nightly")
    revoke_key(user=people.operator, key=key)
    first = ApiKey.objects.get(pk=key.pk).revoked_at
    revoke_key(user=people.administrator, key=key)
    assert authenticate_key(token) is None
    assert ApiKey.objects.get(pk=key.pk).revoked_at == first
    assert len(events("key.revoked")) == 1


def test_only_its_person_or_an_administrator_revokes_a_key(people: Any) -> None:
    key, _token = create_key(user=people.operator, team=people.team, name="nightly")
    for stranger in (people.auditor, people.outsider, people.approver):
        with pytest.raises(PermissionDenied):
            revoke_key(user=stranger, key=key)


def test_a_key_ends_when_its_person_leaves_the_team_or_is_switched_off(people: Any) -> None:
    _key, token = create_key(user=people.operator, team=people.team, name="nightly")
    revoke_role(actor=people.administrator, user=people.operator, team=people.team, role=Role.OPERATOR)
    assert authenticate_key(token) is None
    grant_role(actor=people.administrator, user=people.operator, team=people.team, role=Role.OPERATOR)
    assert authenticate_key(token) is not None
    User.objects.filter(pk=people.operator.pk).update(is_active=False)
    assert authenticate_key(token) is None


def test_those_who_only_read_get_no_key(people: Any) -> None:
    for reader in (people.auditor, people.approver, people.outsider):
        with pytest.raises(PermissionDenied):
            create_key(user=reader, team=people.team, name="sneaky")


def test_the_time_of_last_use_is_written_once_a_minute_at_most(people: Any) -> None:
    key, token = create_key(user=people.operator, team=people.team, name="nightly")
    assert key.last_used_at is None
    authenticate_key(token)
    first = ApiKey.objects.get(pk=key.pk).last_used_at
    authenticate_key(token)
    assert first is not None
    assert ApiKey.objects.get(pk=key.pk).last_used_at == first
    earlier = first - timedelta(minutes=2)
    ApiKey.objects.filter(pk=key.pk).update(last_used_at=earlier)
    authenticate_key(token)
    latest = ApiKey.objects.get(pk=key.pk).last_used_at
    assert latest is not None
    assert latest > earlier


def test_drf_gets_the_person_and_the_key_or_401(people: Any, rf: RequestFactory) -> None:
    from rest_framework.request import Request

    key, token = create_key(user=people.operator, team=people.team, name="nightly")
    backend = ApiKeyAuthentication()
    signed_in = backend.authenticate(Request(rf.get("/", headers={"authorization": f"Bearer {token}"})))
    assert signed_in == (people.operator, key)
    assert backend.authenticate(Request(rf.get("/"))) is None
    with pytest.raises(AuthenticationFailed):
        backend.authenticate(Request(rf.get("/", headers={"authorization": "Bearer nonsense"})))
    assert backend.authenticate_header(Request(rf.get("/"))).startswith("Bearer")


def test_bearer_is_the_only_scheme() -> None:
    assert bearer_token("Bearer abc") == "abc"
    assert bearer_token(b"bearer abc") == "abc"
    assert bearer_token("Basic abc") is None
    assert bearer_token("") is None


def test_an_administrator_adds_people_and_teams_and_grants_roles(people: Any) -> None:
    team = create_team(actor=people.administrator, slug="risk", name="Risk")
    person = create_person(actor=people.administrator, username="lin", password="correct horse battery")
    grant_role(actor=people.administrator, user=person, team=team, role=Role.AUDITOR)
    grant_role(actor=people.administrator, user=person, team=team, role=Role.AUDITOR)
    assert roles_in(person, team) == [Role.AUDITOR]
    assert [event.actor for event in events("person.created")] == ["admin"]
    assert len(events("role.granted")) == 1
    assert len(events("team.created")) == 1


def test_nobody_else_does(people: Any) -> None:
    with pytest.raises(PermissionDenied):
        create_person(actor=people.operator, username="friend", password="correct horse battery")
    with pytest.raises(PermissionDenied):
        create_team(actor=people.operator, slug="mine", name="Mine")
    with pytest.raises(PermissionDenied):
        grant_role(actor=people.operator, user=people.operator, team=people.team, role=Role.APPROVER)


def test_a_weak_password_and_a_taken_name_are_named(people: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        create_person(actor=None, username="lin", password="short")
    assert "password" in caught.value.message_dict
    with pytest.raises(ValidationError) as caught:
        create_person(actor=None, username="operator", password="correct horse battery")
    assert "username" in caught.value.message_dict


def test_an_unknown_role_is_refused(people: Any) -> None:
    with pytest.raises(ValidationError):
        grant_role(actor=None, user=people.operator, team=people.team, role="king")  # type: ignore[arg-type]


def test_an_outsider_sees_neither_keys_nor_people_of_another_team(people: Any) -> None:
    create_key(user=people.operator, team=people.team, name="nightly")
    assert keys_visible_to(people.auditor).count() == 1
    assert keys_visible_to(people.outsider).count() == 0
    assert list(people_visible_to(people.outsider)) == [people.outsider]
    assert people_visible_to(people.administrator).count() == User.objects.count()
    assert Membership.objects.count() == 6

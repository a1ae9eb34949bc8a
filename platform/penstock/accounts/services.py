"""Every write about people, teams, roles and keys."""

import hashlib
import secrets
from datetime import datetime

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.accounts.access import has_role, is_administrator, require_role
from penstock.accounts.models import ApiKey, Membership, Role, Team, User

KEY_PREFIX_BYTES = 6
KEY_SECRET_BYTES = 32
SYSTEM = "system"


def secret_digest(secret: str) -> str:
    """SHA-256 as hex. The secret has 256 random bits, so a slow password hash would add nothing but time."""
    return hashlib.sha256(secret.encode()).hexdigest()


@transaction.atomic
def create_key(
    *, user: User, team: Team, name: str, task_name: str = "", expires_at: datetime | None = None
) -> tuple[ApiKey, str]:
    """Makes a key for a program that acts for `user` in `team`; returns the row and the key, shown only now.

    Raises PermissionDenied for somebody who may only read, ValidationError naming the field for bad values.
    """
    require_role(user, team, Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER)
    if expires_at is not None and expires_at <= timezone.now():
        raise ValidationError({"expires_at": _("The expiry must lie in the future.")})
    prefix = secrets.token_hex(KEY_PREFIX_BYTES)
    secret = secrets.token_urlsafe(KEY_SECRET_BYTES)
    key = ApiKey(
        name=name.strip(),
        prefix=prefix,
        secret_digest=secret_digest(secret),
        team=team,
        user=user,
        task_name=task_name,
        expires_at=expires_at,
    )
    key.full_clean()
    key.save()
    record(
        kind="key.created",
        subject=f"key:{prefix}",
        payload={
            "name": key.name,
            "team": team.slug,
            "person": user.username,
            "task": task_name or None,
            "expires_at": expires_at.isoformat() if expires_at else None,
        },
        actor=user.actor,
    )
    return key, f"pk_{prefix}_{secret}"


@transaction.atomic
def revoke_key(*, user: User, key: ApiKey) -> ApiKey:
    """Ends a key at once; ending it again changes nothing. Its person or an administrator of its team may."""
    if key.user_id != user.pk and not has_role(user, key.team, Role.ADMINISTRATOR):
        raise PermissionDenied(_("Only the key's person or an administrator may revoke it."))
    now = timezone.now()
    if ApiKey.objects.filter(pk=key.pk, revoked_at=None).update(revoked_at=now):
        record(kind="key.revoked", subject=f"key:{key.prefix}", payload={"team": key.team.slug}, actor=user.actor)
    key.refresh_from_db()
    return key


@transaction.atomic
def create_person(
    *,
    actor: User | None,
    username: str,
    password: str,
    email: str = "",
    first_name: str = "",
    last_name: str = "",
    language: str = "",
    administrator: bool = False,
) -> User:
    """Adds a person. `actor=None` is the installation itself, from its own command line.

    Raises PermissionDenied unless the actor administers the installation, ValidationError naming the field.
    """
    _require_installation_administrator(actor)
    person = User(
        username=username,
        email=email,
        first_name=first_name,
        last_name=last_name,
        language=language,
        is_superuser=administrator,
        is_staff=administrator,
    )
    try:
        validate_password(password, person)
    except ValidationError as error:
        raise ValidationError({"password": error.messages}) from error
    person.set_password(password)
    person.full_clean()
    person.save()
    record(
        kind="person.created",
        subject=f"person:{username}",
        payload={"administrator": administrator},
        actor=_name(actor),
    )
    return person


@transaction.atomic
def create_team(*, actor: User | None, slug: str, name: str) -> Team:
    """Adds a team. Raises PermissionDenied or ValidationError as `create_person`."""
    _require_installation_administrator(actor)
    team = Team(slug=slug, name=name.strip())
    team.full_clean()
    team.save()
    record(kind="team.created", subject=f"team:{slug}", payload={"name": team.name}, actor=_name(actor))
    return team


def grant_role(*, actor: User | None, user: User, team: Team, role: Role) -> Membership:
    """Gives a person a role in a team; granting it again changes nothing. An administrator of the team may."""
    if actor is not None:
        require_role(actor, team, Role.ADMINISTRATOR)
    if role not in Role.values:
        known = ", ".join(Role.values)
        raise ValidationError(
            {"role": _("There is no role %(role)s: use one of %(known)s.") % {"role": role, "known": known}}
        )
    try:
        with transaction.atomic():
            membership = Membership.objects.create(user=user, team=team, role=role)
            record(
                kind="role.granted",
                subject=f"person:{user.username}",
                payload={"team": team.slug, "role": str(role)},
                actor=_name(actor),
            )
    except IntegrityError:  # somebody granted it already
        membership = Membership.objects.get(user=user, team=team, role=role)
    return membership


@transaction.atomic
def revoke_role(*, actor: User | None, user: User, team: Team, role: Role) -> None:
    """Takes a role from a person; keys that they made stop working once they have no role left in the team."""
    if actor is not None:
        require_role(actor, team, Role.ADMINISTRATOR)
    removed, _rows = Membership.objects.filter(user=user, team=team, role=role).delete()
    if removed:
        record(
            kind="role.revoked",
            subject=f"person:{user.username}",
            payload={"team": team.slug, "role": str(role)},
            actor=_name(actor),
        )


@transaction.atomic
def set_password(*, actor: User, user: User, password: str) -> None:
    """Gives a person another password: their own, or anybody's where the actor administers the installation.

    Raises PermissionDenied, or ValidationError on `password` saying what makes it too weak.
    """
    if actor.pk != user.pk:
        _require_installation_administrator(actor)
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise ValidationError({"password": error.messages}) from error
    user.set_password(password)
    user.save(update_fields=["password"])
    record(kind="password.changed", subject=f"person:{user.username}", payload={}, actor=_name(actor))


def set_language(*, user: User, language: str) -> None:
    """Keeps the language in which a person wants the interface; no event, since nobody else is touched."""
    User.objects.filter(pk=user.pk).update(language=language)
    user.language = language


def _require_installation_administrator(actor: User | None) -> None:
    if actor is not None and not is_administrator(actor):
        raise PermissionDenied(_("Only an administrator of the installation may do this."))


def _name(actor: User | None) -> str:
    return SYSTEM if actor is None else actor.actor

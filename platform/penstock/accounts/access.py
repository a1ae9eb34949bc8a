"""Who may see and do what. Every read goes through `visible_to`, every write through `require_role`."""

from typing import TypeVar

from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.utils.translation import gettext as _

from penstock.accounts.models import Membership, Role, Team, User

M = TypeVar("M", bound=Model)
Person = User | AnonymousUser


def is_administrator(user: Person) -> bool:
    return bool(user.is_active and user.is_superuser)


def teams_of(user: Person) -> QuerySet[Team]:
    """The teams whose things a person may see: all for an administrator, none for a stranger."""
    if not user.is_authenticated or not user.is_active:
        return Team.objects.none()
    if is_administrator(user):
        return Team.objects.all()
    return Team.objects.filter(memberships__user=user).distinct()


def visible_to(user: Person, rows: QuerySet[M], *, team: str = "team") -> QuerySet[M]:
    """The rows that a person may see; `team` is the lookup that leads from a row to its team."""
    if is_administrator(user):
        return rows
    return rows.filter(**{f"{team}__in": teams_of(user)})


def has_role(user: Person, team: Team | None, *roles: Role) -> bool:
    """Whether a person holds one of `roles` in `team` (in any team, where `team` is None)."""
    if not user.is_authenticated or not user.is_active:
        return False
    if is_administrator(user):
        return True
    memberships = Membership.objects.filter(user=user, role__in=[*roles, Role.ADMINISTRATOR])
    if team is not None:
        memberships = memberships.filter(team=team)
    return memberships.exists()


def require_role(user: Person, team: Team | None, *roles: Role) -> None:
    """Raises PermissionDenied, saying which roles would do, unless `has_role`."""
    if not has_role(user, team, *roles):
        wanted = ", ".join(str(role.label) for role in roles)
        raise PermissionDenied(_("This needs one of these roles in the team: %(roles)s.") % {"roles": wanted})

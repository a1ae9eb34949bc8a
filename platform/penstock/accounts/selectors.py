"""Every read about people, teams and keys."""

from django.db.models import QuerySet

from penstock.accounts.access import Person, is_administrator, teams_of, visible_to
from penstock.accounts.models import ApiKey, Membership, Role, Team, User


def teams_visible_to(user: Person) -> QuerySet[Team]:
    return teams_of(user)


def keys_visible_to(user: Person) -> QuerySet[ApiKey]:
    """Keys of the person's teams; no column of them gives a key away."""
    return visible_to(user, ApiKey.objects.select_related("team", "user"))


def people_visible_to(user: Person) -> QuerySet[User]:
    """Everybody for an administrator, else who shares a team with the person."""
    if is_administrator(user):
        return User.objects.all()
    return User.objects.filter(memberships__team__in=teams_of(user)).distinct()


def roles_in(user: Person, team: Team) -> list[Role]:
    """The roles that a person holds in a team, in the order of `Role`."""
    if not user.is_authenticated:
        return []
    held = set(Membership.objects.filter(user=user, team=team).values_list("role", flat=True))
    return [role for role in Role if role in held]

"""Whoever runs `penstock` on the machine itself acts as a person of the installation: the first administrator, unless
`--as` names another."""

from django.utils.translation import gettext as _

from penstock.accounts.models import Team, User


class NobodyToActAs(Exception):
    """No such person, or none at all yet."""


def administrator() -> User:
    user = User.objects.filter(is_superuser=True, is_active=True).order_by("date_joined").first()
    if user is None:
        raise NobodyToActAs(_("There is no administrator yet; `penstock up` makes one."))
    return user


def person(username: str) -> User:
    if not username:
        return administrator()
    try:
        return User.objects.get(username=username, is_active=True)
    except User.DoesNotExist:
        raise NobodyToActAs(_("Nobody here is called %s.") % username) from None


def team(slug: str) -> Team:
    """The team of that short name, or the first one where none is named."""
    teams = Team.objects.order_by("created_at")
    found = teams.filter(slug=slug).first() if slug else teams.first()
    if found is None:
        raise NobodyToActAs(
            _("There is no team called %(slug)s. Teams: %(teams)s")
            % {"slug": slug or "–", "teams": ", ".join(teams.values_list("slug", flat=True)) or "–"}
        )
    return found

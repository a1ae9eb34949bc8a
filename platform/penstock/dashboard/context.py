"""What every page's frame needs: the menu, the theme and who is looking."""

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from penstock import __version__
from penstock.accounts.access import is_administrator

THEME_COOKIE = "penstock_theme"
THEMES = ("auto", "light", "dark")


@dataclass(frozen=True, slots=True)
class MenuItem:
    label: str
    url: str
    current: bool


@dataclass(frozen=True, slots=True)
class MenuGroup:
    label: str
    items: tuple[MenuItem, ...]


def page(request: HttpRequest) -> dict[str, object]:
    theme = request.COOKIES.get(THEME_COOKIE, "auto")
    context: dict[str, Any] = {
        "theme": theme if theme in THEMES else "auto",
        "themes": (("auto", _("Auto")), ("light", _("Light")), ("dark", _("Dark"))),
        "languages": (("en", "English"), ("zh-hant", "繁體中文")),
        "penstock_version": __version__,
        "menu": (),
    }
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        context["menu"] = menu(request)
        context["viewer_is_administrator"] = is_administrator(user)
    return context


def menu(request: HttpRequest) -> tuple[MenuGroup, ...]:
    match = request.resolver_match
    section = (match.url_name or "").split("-")[0] if match is not None else ""

    def item(label: str, name: str, *sections: str) -> MenuItem:
        return MenuItem(label, reverse(f"dashboard:{name}"), section in sections)

    return (
        MenuGroup(
            _("Run"),
            (
                item(_("Overview"), "overview", "overview"),
                item(_("Tasks"), "tasks", "tasks", "task"),
                item(_("Batches"), "batches", "batches", "batch"),
                item(_("Requests"), "requests", "requests", "request"),
                item(_("Model releases"), "releases", "releases", "release"),
            ),
        ),
        MenuGroup(
            _("Evidence"),
            (
                item(_("Fairness"), "fairness", "fairness"),
                item(_("Controls"), "controls", "controls", "control"),
                item(_("Ledger"), "ledger", "ledger"),
            ),
        ),
        MenuGroup(_("Return"), (item(_("Pilots"), "pilots", "pilots", "pilot"),)),
        MenuGroup(
            _("Settings"),
            (
                item(_("Rate card"), "rates", "rates"),
                item(_("API keys"), "keys", "keys", "key"),
                item(_("People"), "people", "people", "person"),
            ),
        ),
    )

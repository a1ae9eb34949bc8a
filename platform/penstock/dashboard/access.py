"""Who looks, for views that only signed-in people reach."""

from typing import Protocol

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from penstock.accounts.models import User


class View(Protocol):
    def __call__(self, request: HttpRequest, /, *args: str, **kwargs: str) -> HttpResponseBase: ...


def viewer(request: HttpRequest) -> User:
    """The person behind a request to a page that is behind `login_required`."""
    user = request.user
    if not isinstance(user, User):
        raise TypeError("This page must be wrapped in login_required.")
    return user


__all__ = ["View", "login_required", "viewer"]

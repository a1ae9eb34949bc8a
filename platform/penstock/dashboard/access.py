"""Who looks, for views that only signed-in people reach."""

from django.http import HttpRequest

from penstock.accounts.models import User


def viewer(request: HttpRequest) -> User:
    """The person behind a request to a page that is behind `login_required`."""
    user = request.user
    if not isinstance(user, User):
        raise TypeError("This page must be wrapped in login_required.")
    return user

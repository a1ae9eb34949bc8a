"""API keys: `Authorization: Bearer pk_<prefix>_<secret>`."""

import hmac
from datetime import timedelta

from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from penstock.accounts.access import is_administrator
from penstock.accounts.models import ApiKey, Membership, User
from penstock.accounts.services import secret_digest

LAST_USED_EVERY = timedelta(minutes=1)
NO_DIGEST = "0" * 64


def authenticate_key(token: str) -> ApiKey | None:
    """The key that a token belongs to, or None if it is unknown, expired, revoked or its person has left.

    Digests are compared in constant time, also where the prefix is unknown. `last_used_at` is written once a minute
    at most. The key's `user.acting_key` is set, so that the ledger names the key.
    """
    scheme, _first, rest = token.partition("_")
    prefix, _second, secret = rest.partition("_")
    key = None
    if scheme == "pk" and prefix and secret and "\x00" not in prefix:
        key = ApiKey.objects.select_related("user", "team").filter(prefix=prefix).first()
    matches = hmac.compare_digest(secret_digest(secret), key.secret_digest if key else NO_DIGEST)
    if key is None or not matches or not _is_in_force(key):
        return None
    now = timezone.now()
    if key.last_used_at is None or now - key.last_used_at >= LAST_USED_EVERY:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
        key.last_used_at = now
    key.user.acting_key = key
    return key


def _is_in_force(key: ApiKey) -> bool:
    if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= timezone.now()):
        return False
    if not key.user.is_active:
        return False
    return is_administrator(key.user) or Membership.objects.filter(user=key.user, team=key.team).exists()


def bearer_token(header: bytes | str) -> str | None:
    """The token of an Authorization header, or None where the header is absent or of another scheme."""
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    scheme, _space, token = text.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class ApiKeyAuthentication(BaseAuthentication):
    """DRF: `request.user` is the key's person, `request.auth` the ApiKey. A bad key is 401, never 403."""

    def authenticate(self, request: Request) -> tuple[User, ApiKey] | None:
        token = bearer_token(get_authorization_header(request))
        if token is None:
            return None
        key = authenticate_key(token)
        if key is None:
            raise AuthenticationFailed(_("The API key is unknown, expired or revoked."))
        return key.user, key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="penstock"'

"""The door of /v1: every call comes by a key, every answer has a request id, every error has the envelope."""

import json
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.utils.translation import gettext as _
from django.views.decorators.csrf import csrf_exempt

from penstock.accounts.authentication import authenticate_key, bearer_token
from penstock.accounts.models import ApiKey, Team, User
from penstock.openai_api.errors import REALM, ApiError, response_to
from penstock.serving.bodies import unstorable_text


@dataclass(frozen=True, slots=True)
class Call:
    """A call by a key: what may be seen and done is what its person may, within its team."""

    request: HttpRequest
    key: ApiKey

    @property
    def user(self) -> User:
        return self.key.user

    @property
    def team(self) -> Team:
        return self.key.team

    def query(self, name: str, default: str = "") -> str:
        """Raises ApiError for text that PostgreSQL cannot take."""
        text = self.request.GET.get(name, default)
        if unstorable_text(text):
            raise ApiError(400, "invalid_value", _("The text holds U+0000; that is no character."), param=name)
        return text

    def query_integer(self, name: str, *, default: int, least: int, most: int) -> int:
        """Raises ApiError naming the parameter."""
        text = self.query(name, str(default))
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            message = _("%(name)s is a whole number from %(least)d to %(most)d, not '%(given)s'.") % {
                "name": name,
                "least": least,
                "most": most,
                "given": text,
            }
            raise ApiError(400, "invalid_value", message, param=name)
        return value

    def body(self) -> dict[str, Any]:
        """The JSON object of the body. Raises ApiError telling where it is broken."""
        try:
            value = json.loads(self.request.body, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            message = _("The body is not valid JSON: %(why)s (line %(line)d, column %(column)d).") % {
                "why": error.msg,
                "line": error.lineno,
                "column": error.colno,
            }
            raise ApiError(400, "invalid_json", message) from error
        except (UnicodeDecodeError, RecursionError, ValueError) as error:
            message = _("The body is not valid JSON: %(why)s.") % {"why": error}
            raise ApiError(400, "invalid_json", message) from error
        if not isinstance(value, dict):
            raise ApiError(400, "invalid_json", _("The body must be a JSON object."))
        if unstorable_text(value):
            message = _("The text holds U+0000 or half of a surrogate pair; neither is a character.")
            raise ApiError(400, "invalid_value", message)
        return value


Handler = Callable[..., HttpResponseBase]
LiveHandler = Callable[[Call], Coroutine[Any, Any, HttpResponseBase]]


def door(**handlers: Handler) -> Callable[..., HttpResponseBase]:
    """A view of one handler for each HTTP method (`GET=list_files, POST=create_file`)."""

    @csrf_exempt
    def view(request: HttpRequest, **parts: str) -> HttpResponseBase:
        try:
            handler = handlers.get(request.method or "")
            if handler is None:
                raise _wrong_method(request, handlers)
            response = handler(Call(request, _key(request)), **parts)
        except Exception as error:
            response = response_to(error, request)
        return _numbered(response)

    return view


def live_door(handler: LiveHandler) -> Callable[..., Coroutine[Any, Any, HttpResponseBase]]:
    """An asynchronous view for POST."""

    @csrf_exempt
    async def view(request: HttpRequest) -> HttpResponseBase:
        try:
            if request.method != "POST":
                raise _wrong_method(request, {"POST": handler})
            call = Call(request, await sync_to_async(_key)(request))
            response = await handler(call)
        except Exception as error:
            response = response_to(error, request)
        return _numbered(response)

    return view


@csrf_exempt
def nothing_here(request: HttpRequest, **_parts: str) -> HttpResponseBase:
    """The last route: an address that /v1 does not have."""
    message = _("There is no %(method)s %(path)s.") % {"method": request.method, "path": request.path}
    return _numbered(response_to(ApiError(404, "unknown_url", message), request))


def listing(rows: list[dict[str, Any]], *, has_more: bool) -> JsonResponse:
    """OpenAI's page of a list; its client asks for the next with `after=last_id`."""
    return JsonResponse(
        {
            "object": "list",
            "data": rows,
            "first_id": rows[0]["id"] if rows else None,
            "last_id": rows[-1]["id"] if rows else None,
            "has_more": has_more,
        }
    )


def _key(request: HttpRequest) -> ApiKey:
    headers = {"WWW-Authenticate": REALM}
    token = bearer_token(request.headers.get("authorization", ""))
    if not token:
        message = _("An API key is missing: send it as 'Authorization: Bearer pk_…'.")
        raise ApiError(401, "missing_api_key", message, headers=headers)
    key = authenticate_key(token)
    if key is None:
        raise ApiError(401, "invalid_api_key", _("The API key is unknown, expired or revoked."), headers=headers)
    return key


def _wrong_method(request: HttpRequest, handlers: dict[str, Any]) -> ApiError:
    allowed = ", ".join(sorted(handlers))
    message = _("%(method)s is not possible here; use %(allowed)s.") % {"method": request.method, "allowed": allowed}
    return ApiError(405, "method_not_allowed", message, headers={"Allow": allowed})


def _numbered(response: HttpResponseBase) -> HttpResponseBase:
    response["x-request-id"] = f"req_{secrets.token_hex(16)}"
    if not response.has_header("Cache-Control"):
        response["Cache-Control"] = "no-store"
    return response


def _refuse_constant(name: str) -> None:
    raise ValueError(_("%(name)s is no JSON number") % {"name": name})

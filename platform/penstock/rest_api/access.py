"""Whose rows a call to /api may touch, and the base of its views."""

from collections.abc import Callable
from typing import Any, TypeVar

from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.http import Http404
from django.utils.translation import gettext as _
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.generics import GenericAPIView
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request as ApiRequest
from rest_framework.response import Response

from penstock.accounts.models import ApiKey, Team, User
from penstock.rest_api.errors import handle
from penstock.serving.bodies import unstorable_text

M = TypeVar("M", bound=Model)


class Pages(CursorPagination):
    def decode_cursor(self, request: ApiRequest) -> Any:
        """Raises NotFound, as for any cursor that was not made here, for one that holds what PostgreSQL cannot take."""
        cursor = super().decode_cursor(request)
        if cursor is not None and unstorable_text(cursor.position):
            raise NotFound(self.invalid_cursor_message)
        return cursor


class ByName(Pages):
    ordering = "name"


class NewestFirst(Pages):
    ordering = ("-created_at", "-pk")
    # All rows of a batch are made at one moment; within it the cursor counts.
    offset_cutoff = 1_000_000


class Scoped(GenericAPIView[Any]):
    """A view whose rows are what its person may see; by a key, what the key's team has of that."""

    def get_exception_handler(self) -> Callable[[Exception, dict[str, Any]], Response | None]:
        return handle

    def initial(self, request: ApiRequest, *args: Any, **parts: Any) -> None:
        """Refuses text that PostgreSQL cannot take before anything reads it."""
        super().initial(request, *args, **parts)
        if unstorable_text(parts):
            raise Http404
        if unstorable_text([*request.query_params.values(), request.data]):
            raise ValidationError(_("The text holds U+0000 or half of a surrogate pair; neither is a character."))

    @property
    def person(self) -> User:
        user = self.request.user
        assert isinstance(user, User)  # IsAuthenticated stands before every view
        return user

    @property
    def key(self) -> ApiKey | None:
        return self.request.auth if isinstance(self.request.auth, ApiKey) else None

    def scoped(self, rows: QuerySet[M], *, team: str = "team") -> QuerySet[M]:
        """`rows` are from a selector that took `self.person`."""
        return rows if self.key is None else rows.filter(**{team: self.key.team})

    def may_act_for(self, team: Team) -> None:
        """Raises PermissionDenied where the key is another team's. Services check the person's role."""
        if self.key is not None and self.key.team_id != team.pk:
            raise PermissionDenied(_("The API key belongs to another team."))

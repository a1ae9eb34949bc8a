"""Pages of a newest-first list, by key instead of by number: the thousandth page costs what the first does."""

import base64
import binascii
import datetime as dt
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest

M = TypeVar("M", bound=Model)
ROWS = 50


@dataclass(frozen=True, slots=True)
class Page(Generic[M]):
    """Up to `ROWS` rows; `older` and `newest` are query strings with the filters kept, empty without such a page."""

    rows: list[M]
    older: str
    newest: str

    def __bool__(self) -> bool:
        return bool(self.rows)


def page_of(request: HttpRequest, rows: QuerySet[M], *, size: int = ROWS) -> Page[M]:
    """The page that `?before=` names, newest first by created_at and id. A broken cursor gives the first page."""
    filters = [(key, value) for key, values in request.GET.lists() for value in values if key != "before" and value]
    position = _decoded(request.GET.get("before", ""))
    rows = rows.order_by("-created_at", "-pk")
    if position is not None:
        created_at, key = position
        rows = rows.filter(Q(created_at__lt=created_at) | Q(created_at=created_at, pk__lt=key))
    found = list(rows[: size + 1])
    older = ""
    if len(found) > size:
        found = found[:size]
        older = urlencode([*filters, ("before", _encoded(found[-1]))])
    newest = (urlencode(filters) or "all") if position is not None else ""
    return Page(found, older, newest)


def _encoded(row: Any) -> str:
    return base64.urlsafe_b64encode(f"{row.created_at.isoformat()}|{row.pk}".encode()).decode()


def _decoded(cursor: str) -> tuple[dt.datetime, str] | None:
    try:
        created_at, separator, key = base64.urlsafe_b64decode(cursor.encode()).decode().partition("|")
        moment = dt.datetime.fromisoformat(created_at)
    except (ValueError, binascii.Error):
        return None
    return (moment, key) if separator and moment.tzinfo is not None else None

"""Pages of a list by key instead of by number: the thousandth page costs what the first does."""

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
    """Up to `ROWS` rows; `further` and `first` are query strings with the filters kept, empty without such a page."""

    rows: list[M]
    further: str
    first: str
    by_line: bool

    def __bool__(self) -> bool:
        return bool(self.rows)


def page_of(request: HttpRequest, rows: QuerySet[M], *, size: int = ROWS, by_line: bool = False) -> Page[M]:
    """The page that `?after=` names: newest first, or `by_line` of a batch's file. A broken cursor gives the first."""
    filters = [(key, value) for key, values in request.GET.lists() for value in values if key != "after" and value]
    cursor = _decoded(request.GET.get("after", ""))
    rows = rows.order_by("line", "pk") if by_line else rows.order_by("-created_at", "-pk")
    behind = None if cursor is None else _behind(*cursor, by_line=by_line)
    if behind is not None:
        rows = rows.filter(behind)
    found = list(rows[: size + 1])
    further = ""
    if len(found) > size:
        found = found[:size]
        further = urlencode([*filters, ("after", _encoded(found[-1], by_line=by_line))])
    first = (urlencode(filters) or "all") if behind is not None else ""
    return Page(found, further, first, by_line)


def _behind(position: str, key: str, *, by_line: bool) -> Q | None:
    if by_line:
        return Q(line__gt=int(position)) if position.isascii() and position.isdecimal() else None
    try:
        moment = dt.datetime.fromisoformat(position)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    return Q(created_at__lt=moment) | Q(created_at=moment, pk__lt=key)


def _encoded(row: Any, *, by_line: bool) -> str:
    position = str(row.line) if by_line else row.created_at.isoformat()
    return base64.urlsafe_b64encode(f"{position}|{row.pk}".encode()).decode()


def _decoded(cursor: str) -> tuple[str, str] | None:
    try:
        position, separator, key = base64.urlsafe_b64decode(cursor.encode()).decode().partition("|")
    except (ValueError, binascii.Error):
        return None
    return (position, key) if separator and "\x00" not in key else None

"""Figures as plain JSON values: amounts as text, so that no decimal turns into a binary fraction; times in UTC."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from typing import Any


def plain(value: Any) -> Any:
    """The same value in JSON's own types. Dataclasses become objects of their fields; the rest stays as it is."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, dt.datetime):
        return moment_text(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def moment_text(moment: dt.datetime) -> str:
    """RFC 3339 in UTC, with a Z."""
    return moment.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")

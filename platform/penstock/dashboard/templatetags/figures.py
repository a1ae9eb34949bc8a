"""How a figure is written, in one place: separators, units, durations, money, shares with their interval.

A figure that does not exist is written "–", with a title that says so: never 0, never an empty cell.
"""

import datetime as dt
from decimal import Decimal
from typing import Any

from django import template
from django.utils import formats, timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

register = template.Library()

Number = int | float | Decimal
# A template gives "" for a lookup that failed on its way, such as the cost of a request without usage.
Given = Number | str | None


def significant(value: Number, digits: int = 3) -> str:
    """`value` with about three significant digits and thousands separators: 0.0123, 1.23, 45.6, 1,234."""
    number = Decimal(str(value))
    if number == 0:
        return "0"
    places = digits - 1 - number.adjusted()
    if places <= 0:
        return f"{number:,.0f}"
    text = f"{number:,.{places}f}"
    # Rounding can carry into one digit more: 9.996 with three digits is 10.0, not 10.00.
    if Decimal(text.replace(",", "")).adjusted() > number.adjusted():
        text = f"{number:,.{max(places - 1, 0)}f}"
    return text


def nothing() -> SafeString:
    return format_html('<span class="none" title="{}">–</span>', _("No data"))


def with_unit(text: str, unit: str) -> SafeString:
    return format_html(
        '<span class="figure">{}<span class="unit">\N{NARROW NO-BREAK SPACE}{}</span></span>', text, unit
    )


@register.filter
def integer(value: Given) -> SafeString:
    """1234567 as 1,234,567."""
    return (
        nothing()
        if value is None or isinstance(value, str)
        else format_html('<span class="figure">{}</span>', f"{int(value):,}")
    )


@register.filter
def number(value: Given, unit: str = "") -> SafeString:
    """Three significant digits, with a unit if given."""
    if value is None or isinstance(value, str):
        return nothing()
    if unit:
        return with_unit(minus(significant(value)), unit)
    return format_html('<span class="figure">{}</span>', minus(significant(value)))


@register.filter
def rate(value: Given, unit: str = "") -> SafeString:
    """A rate over time, by default output tokens per second."""
    return number(value, unit or _("tok/s"))


@register.filter
def duration(value: Given | dt.timedelta) -> SafeString:
    """Seconds, in the unit that suits: 0.42 s as 420 ms, 75 as 1 min 15 s, 7500 as 2 h 5 min."""
    if value is None or isinstance(value, str):
        return nothing()
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else float(value)
    if seconds == 0:
        return with_unit("0", "s")
    if abs(seconds) < 0.9995:
        return with_unit(significant(seconds * 1000), "ms")
    if seconds < 59.95:
        return with_unit(significant(seconds), "s")
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, left = divmod(rest, 60)
    if days:
        return format_html('<span class="figure">{}</span>', _("%(d)d d %(h)d h") % {"d": days, "h": hours})
    if hours:
        return format_html('<span class="figure">{}</span>', _("%(h)d h %(m)d min") % {"h": hours, "m": minutes})
    return format_html('<span class="figure">{}</span>', _("%(m)d min %(s)d s") % {"m": minutes, "s": left})


@register.filter
def filesize(value: Given) -> SafeString:
    """Bytes, in decimal multiples as disks are sold: 90.6 MB."""
    if value is None or isinstance(value, str):
        return nothing()
    size = float(value)
    if size < 1000:
        return with_unit(f"{int(size)}", _("bytes"))
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.5 or unit == "TB":
            return with_unit(significant(size), unit)
    return nothing()


@register.filter
def money(value: Given, currency: str = "") -> SafeString:
    """An amount with its currency; small amounts keep three significant digits, since an item costs little."""
    if value is None or isinstance(value, str):
        return nothing()
    amount = Decimal(str(value))
    text = minus(f"{amount:,.2f}" if abs(amount) >= 1 or amount == 0 else significant(amount))
    return with_unit(text, currency) if currency else format_html('<span class="figure">{}</span>', text)


@register.filter
def percent(value: Given) -> SafeString:
    """A share between 0 and 1 as a percentage with one decimal, or none where it is whole."""
    return (
        nothing()
        if value is None or isinstance(value, str)
        else format_html('<span class="figure">{}</span>', percentage(value))
    )


def percentage(value: Number) -> str:
    text = f"{float(value) * 100:.1f}".removesuffix(".0")
    return minus(f"{'0' if text == '-0' else text}%")


def minus(text: str) -> str:
    """A minus sign that is as wide as a plus sign, instead of a hyphen."""
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


@register.simple_tag
def interval(low: Given, high: Given) -> SafeString:
    """A confidence interval of a share: (81.2–93.4%)."""
    if low is None or high is None or isinstance(low, str) or isinstance(high, str):
        return nothing()
    # Beside a minus sign a dash would be read as another.
    dash = _(" to ") if low < 0 else "–"
    return format_html(
        '<span class="interval">({}{}{})</span>', percentage(low).removesuffix("%"), dash, percentage(high)
    )


@register.filter
def times(value: Given) -> SafeString:
    """A multiple: 4.2×."""
    return (
        nothing()
        if value is None or isinstance(value, str)
        else format_html('<span class="figure">{}×</span>', significant(value))
    )


@register.filter
def moment(value: dt.datetime | str | None) -> SafeString:
    """A time as 2026-11-30 14:05:09 UTC, machine-readable too."""
    if value is None or isinstance(value, str):
        return nothing()
    utc = value.astimezone(dt.UTC)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        utc.isoformat(),
        f"{utc:%Y-%m-%d %H:%M:%S} UTC",
        f"{utc:%Y-%m-%d %H:%M}",
    )


@register.filter
def ago(value: dt.datetime | str | None) -> SafeString:
    """How long ago, in one unit, with the exact time as title."""
    if value is None or isinstance(value, str):
        return nothing()
    seconds = (timezone.now() - value).total_seconds()
    utc = value.astimezone(dt.UTC)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        utc.isoformat(),
        f"{utc:%Y-%m-%d %H:%M:%S} UTC",
        since(seconds),
    )


def since(seconds: float) -> str:
    if seconds < -1:
        return _("in %(time)s") % {"time": one_unit(-seconds)}
    if seconds < 1:
        return _("now")
    return _("%(time)s ago") % {"time": one_unit(seconds)}


def one_unit(seconds: float) -> str:
    count = int(seconds)
    if count < 60:
        return ngettext("%(n)d second", "%(n)d seconds", count) % {"n": count}
    count = int(seconds // 60)
    if count < 60:
        return ngettext("%(n)d minute", "%(n)d minutes", count) % {"n": count}
    count = int(seconds // 3600)
    if count < 48:
        return ngettext("%(n)d hour", "%(n)d hours", count) % {"n": count}
    count = int(seconds // 86_400)
    return ngettext("%(n)d day", "%(n)d days", count) % {"n": count}


@register.filter
def digest(value: str | None) -> SafeString:
    """The first twelve characters of a digest, the whole in its title."""
    if not value:
        return nothing()
    return format_html('<code class="digest" title="{}">{}…</code>', value, value[:12])


@register.filter
def day(value: dt.date | str | None) -> str | SafeString:
    return nothing() if value is None or isinstance(value, str) else formats.date_format(value, "Y-m-d")


@register.filter
def item(mapping: Any, key: Any) -> Any:
    """`mapping[key]`, or None."""
    try:
        return mapping[key]
    except (KeyError, IndexError, TypeError):
        return None

"""Statuses and verdicts as a word with a shape: colour never stands alone, and means the same on every page."""

from django import template
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import pgettext_lazy

register = template.Library()

# What kind of state it is decides colour and shape: good, bad, busy, waiting, warning, over (neutral).
SHAPES = {"good": "✓", "bad": "✕", "busy": "▶", "waiting": "◷", "warning": "▲", "over": "■"}
TONES = {
    # batches, requests, shards, baseline runs
    "validating": "busy",
    "in_progress": "busy",
    "finalizing": "busy",
    "completed": "good",
    "failed": "bad",
    "expired": "warning",
    "cancelling": "warning",
    "cancelled": "over",
    "queued": "waiting",
    "leased": "busy",
    "running": "busy",
    "succeeded": "good",
    # tasks and releases
    "draft": "waiting",
    "submitted": "busy",
    "active": "good",
    "suspended": "warning",
    "retired": "over",
    "imported": "waiting",
    "evaluated": "busy",
    "approved": "good",
    "withdrawn": "over",
    # pilots
    "planned": "waiting",
    "baseline": "busy",
    "decided": "good",
    # verdicts
    "met": "good",
    "not_met": "bad",
    "pass": "good",
    "fail": "bad",
    "insufficient_data": "waiting",
    "no_data": "waiting",
    # evidence behind controls: never better than "it is there"
    "within_threshold": "good",
    "outside_threshold": "bad",
    "recorded": "busy",
    "live": "good",
    "stale": "warning",
    "not_mapped": "over",
}
LABELS = {
    "met": pgettext_lazy("verdict on an objective", "Kept"),
    "not_met": pgettext_lazy("verdict on an objective", "Not kept"),
    "no_data": pgettext_lazy("verdict", "No data"),
    "pass": pgettext_lazy("verdict", "Pass"),
    "fail": pgettext_lazy("verdict", "Fail"),
    "insufficient_data": pgettext_lazy("verdict", "Insufficient data"),
    "within_threshold": pgettext_lazy("verdict on evidence", "Within threshold"),
    "outside_threshold": pgettext_lazy("verdict on evidence", "Outside threshold"),
    "recorded": pgettext_lazy("verdict on evidence", "Recorded"),
    "stale": pgettext_lazy("verdict on evidence", "Stale"),
    "live": pgettext_lazy("state of a control", "Live evidence"),
    "not_mapped": pgettext_lazy("state of a control", "By people"),
}

CLASSES = {
    "realtime": pgettext_lazy("latency class", "Realtime"),
    "interactive": pgettext_lazy("latency class", "Interactive"),
    "nearline": pgettext_lazy("latency class", "Nearline"),
    "batch": pgettext_lazy("latency class", "Batch"),
}


def key_of(state: object) -> str:
    return str(getattr(state, "value", state)).lower().replace(" ", "_").replace("-", "_")


@register.simple_tag
def mark(state: object, label: object = "") -> SafeString:
    """`{% mark batch.status batch.get_status_display %}`."""
    key = key_of(state)
    tone = TONES.get(key, "over")
    text = label or LABELS.get(key) or key.replace("_", " ")
    return format_html(
        '<span class="mark mark-{}"><span aria-hidden="true">{}</span>{}</span>', tone, SHAPES[tone], text
    )


@register.simple_tag
def yes_no(value: bool | None) -> SafeString:
    if value is None:
        return format_html('<span class="none" title="{}">–</span>', _("Not checked"))
    if value:
        return format_html('<span class="mark mark-good"><span aria-hidden="true">✓</span>{}</span>', _("yes"))
    return format_html('<span class="mark mark-bad"><span aria-hidden="true">✕</span>{}</span>', _("no"))


@register.filter
def short_class(latency_class: object) -> object:
    """A latency class in one word, where its whole label has no room."""
    return CLASSES.get(key_of(latency_class), latency_class)


@register.filter
def code(text: str) -> SafeString:
    """Plain text in which `backticks` mark what one types."""
    parts = escape(text).split("`")
    marked = [f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)]
    return mark_safe("".join(marked))  # noqa: S308  # escaped above

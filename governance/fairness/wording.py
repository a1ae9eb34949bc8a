"""A fairness result in plain words, in the active language."""

from decimal import ROUND_HALF_UP, Decimal

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from governance.fairness.outcomes import (
    FairnessReport,
    Favourable,
    GroupResult,
    Rate,
    Reason,
    Verdict,
)


def verdict_label(verdict: Verdict) -> str:
    return {
        Verdict.PASS: _("pass"),
        Verdict.FAIL: _("fail"),
        Verdict.INSUFFICIENT: _("insufficient data"),
    }[verdict]


def favourable_label(favourable: Favourable) -> str:
    """The compared outcome as a noun."""
    return {
        Favourable.VALID: _("a valid output"),
        Favourable.SERVED: _("an output without error or refusal"),
        Favourable.NOT_REFUSED: _("an output that is no refusal"),
        Favourable.NOT_TRUNCATED: _("an output that was not cut off"),
        Favourable.SUCCEEDED: _("an output"),
    }[favourable]


def explain(result: GroupResult, report: FairnessReport) -> str:
    """What a group's result means, and what it does not show, in one or two sentences."""
    words = {
        "group": result.group,
        "outcome": favourable_label(report.favourable),
        "rate": rate_text(result.favourable),
        "reference": report.reference or "",
        "reference_rate": rate_text(report.group(report.reference).favourable) if report.reference else "",
        "ratio": _number(result.ratio, 2),
        "threshold": _number(float(report.thresholds.min_ratio), 2),
        "count": result.favourable.count,
        "min_count": report.thresholds.min_count,
        "min_events": report.thresholds.min_events,
    }
    if result.reason is Reason.FEW_REQUESTS:
        sentence = _(
            "Too few requests to judge %(group)s: %(count)d, where at least %(min_count)d are needed. "
            "It neither passes nor fails."
        )
    elif result.reason is Reason.FEW_EVENTS:
        sentence = _(
            "%(group)s cannot be judged yet: even at the best group's rate, fewer than %(min_events)d of its "
            "requests would be expected to get %(outcome)s."
        )
    elif result.reason is Reason.ONE_GROUP:
        sentence = _(
            "%(rate)s of the requests of %(group)s got %(outcome)s; there is no other group large enough to "
            "compare it with."
        )
    elif result.reason is Reason.NO_FAVOURABLE:
        sentence = _("No group got %(outcome)s even once, so there is nothing to compare %(group)s with.")
    elif result.reason is Reason.REFERENCE:
        sentence = _(
            "%(group)s is the best-served group: %(rate)s of its requests got %(outcome)s. "
            "The other groups are compared with it."
        )
    elif result.reason is Reason.BELOW:
        sentence = _(
            "%(group)s is served worse: %(rate)s of its requests got %(outcome)s, against %(reference_rate)s for "
            "%(reference)s. The ratio is %(ratio)s, below the screening threshold of %(threshold)s."
        )
    else:
        sentence = _(
            "%(rate)s of the requests of %(group)s got %(outcome)s, against %(reference_rate)s for %(reference)s. "
            "The ratio is %(ratio)s, not below the screening threshold of %(threshold)s; this does not show that "
            "both are served equally."
        )
    text = sentence % words
    return f"{text} {_doubt(result)}" if result.straddles_threshold else text


def rate_text(rate: Rate) -> str:
    """A rate with its interval, as `93.8 % (79.9 to 98.3 %)`; a dash where nothing was counted."""
    if rate.rate is None or rate.interval is None:
        return "–"
    return _("%(rate)s %% (%(low)s to %(high)s %%)") % {
        "rate": _number(rate.rate * 100, 1),
        "low": _number(rate.interval.low * 100, 1),
        "high": _number(rate.interval.high * 100, 1),
    }


def _doubt(result: GroupResult) -> str:
    if result.verdict is Verdict.FAIL:
        return _("The data would also allow a ratio above the threshold; more requests would tell.")
    return _("The data would also allow a ratio below the threshold; more requests would tell.")


def _number(value: float | None, places: int) -> str:
    if value is None:
        return "–"
    # Rounded here: number_format cuts digits off.
    rounded = Decimal(str(value)).quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP)
    return str(number_format(rounded, decimal_pos=places))

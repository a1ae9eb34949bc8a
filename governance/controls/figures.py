"""Measured values as people read them."""

import datetime as dt
from decimal import ROUND_HALF_UP, Decimal

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from governance.controls.rules import Threshold
from governance.controls.sources import Measurement


def figure_text(value: Decimal | float | int | None, unit: str) -> str:
    """A value with its unit in the active language; a dash where there is none.

    Rates are shown as per cent, everything else in its own unit; digits are rounded for reading, never for judging.
    """
    if value is None:
        return "–"
    if unit == "ratio":
        return _("%(value)s %%") % {"value": number_format(_round(value, 2, shift=2))}
    if unit == "seconds":
        return _("%(value)s s") % {"value": number_format(_round(value, 3))}
    if unit == "tokens_per_second":
        return _("%(value)s tokens/s") % {"value": number_format(_round(value, 1))}
    if unit == "kWh":
        return _("%(value)s kWh") % {"value": number_format(_round(value, 6))}
    if unit == "multiple":
        return _("%(value)s times") % {"value": number_format(_round(value, 2))}
    if unit == "count":
        return str(number_format(_round(value, 0), force_grouping=True))
    return f"{unit} {number_format(_round(value, 6), force_grouping=True)}"


def measurement_text(measurement: Measurement | None) -> str:
    """A measurement's value with its unit; a dash where there is none."""
    return figure_text(None, "") if measurement is None else figure_text(measurement.value, measurement.unit)


def threshold_text(threshold: Threshold | None) -> str:
    """A threshold as `≤ 5 %`; a dash where the figure is only recorded."""
    if threshold is None:
        return "–"
    sign = "≤" if threshold.op == "<=" else "≥"
    return f"{sign} {figure_text(threshold.value, threshold.unit)}"


def age_text(age: dt.timedelta | None) -> str:
    """How long ago, in the largest fitting unit; a dash where nothing was measured."""
    if age is None:
        return "–"
    minutes = max(0, int(age.total_seconds() // 60))
    if minutes < 60:
        return _("%(count)d min ago") % {"count": minutes}
    if minutes < 48 * 60:
        return _("%(count)d h ago") % {"count": minutes // 60}
    return _("%(count)d days ago") % {"count": minutes // (24 * 60)}


def _round(value: Decimal | float | int, places: int, *, shift: int = 0) -> Decimal:
    """At most `places` decimals, half up, without trailing zeros; two significant digits where that would leave zero
    of a figure that is not. `shift` moves the point right (2: per cent)."""
    exact = (value if isinstance(value, Decimal) else Decimal(str(value))).scaleb(shift)
    rounded = exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP)
    if exact and not rounded:
        rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), rounding=ROUND_HALF_UP)
    return rounded.quantize(Decimal(1)) if rounded == rounded.to_integral() else rounded.normalize()

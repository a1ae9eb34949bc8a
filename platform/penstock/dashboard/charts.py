"""Charts as plain data: a Plotly figure, and the same numbers as a table.

Colours mean the same on every page: blue throughput, purple money, green what went well, orange what failed.
A figure names colours by the style sheet's custom properties ("@series-1"); `dashboard.js` puts in what they come to.
Plotly itself is never imported here: the browser draws.
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from governance.fairness.outcomes import FairnessReport, Verdict
from penstock.dashboard.templatetags.figures import percentage, significant
from penstock.pilots.returns import Returns
from penstock.telemetry.summary import Day, TimelinePoint


@dataclass(frozen=True, slots=True)
class Chart:
    """`rows` hold one cell a column, as shown; the first is the row's heading."""

    id: str
    title: str
    figure: dict[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    subtitle: str = ""


def throughput(points: Sequence[TimelinePoint]) -> Chart:
    """Output tokens per second over a batch's time."""
    seconds = [(point.end - points[0].start).total_seconds() for point in points]
    rates = [point.output_tokens_per_second for point in points]
    return Chart(
        id="chart-throughput",
        title=_("How fast did it run?"),
        subtitle=_("Output tokens per second, over the batch's running time"),
        figure={
            "data": [
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [0.0, *[round(value, 3) for value in seconds]],
                    "y": [round(rates[0], 2), *[round(value, 2) for value in rates]],
                    "line": {"color": "@series-1", "width": 2, "shape": "vh"},
                    "fill": "tozeroy",
                    "fillcolor": "@series-1/0.12",
                    "hovertemplate": _("%(y)s tokens/s at %(x)s s") % {"y": "%{y:,.0f}", "x": "%{x:.1f}"}
                    + "<extra></extra>",
                }
            ],
            "layout": {
                "xaxis": {"title": {"text": _("Seconds since the first request started")}, "rangemode": "tozero"},
                "yaxis": {"title": {"text": _("Output tokens/s")}, "rangemode": "tozero"},
                "showlegend": False,
            },
        },
        columns=(_("From, s"), _("To, s"), _("Output tokens/s"), _("Finished"), _("Errors")),
        rows=[
            (
                f"{(point.start - points[0].start).total_seconds():.2f}",
                f"{(point.end - points[0].start).total_seconds():.2f}",
                significant(point.output_tokens_per_second),
                f"{point.succeeded:,}",
                f"{point.errors:,}",
            )
            for point in points
        ],
    )


def cost(points: Sequence[TimelinePoint]) -> Chart | None:
    """Cost so far over a batch's time; None where nothing was reckoned."""
    known = [point for point in points if point.cost_so_far is not None]
    if not known:
        return None
    currency = known[0].currency
    start = points[0].start
    return Chart(
        id="chart-cost",
        title=_("What did it cost?"),
        subtitle=_("Cost of the finished requests so far, by the rate card in force"),
        figure={
            "data": [
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [0.0, *[round((point.end - start).total_seconds(), 3) for point in known]],
                    "y": [0.0, *[float(point.cost_so_far or 0) for point in known]],
                    "line": {"color": "@series-4", "width": 2, "shape": "hv"},
                    "hovertemplate": "%{y:.4~f} " + currency + "<extra></extra>",
                }
            ],
            "layout": {
                "xaxis": {"title": {"text": _("Seconds since the first request started")}, "rangemode": "tozero"},
                "yaxis": {"title": {"text": currency}, "rangemode": "tozero"},
                "showlegend": False,
            },
        },
        columns=(_("Until, s"), _("Cost, %(currency)s") % {"currency": currency}, _("So far")),
        rows=[
            (
                f"{(point.end - start).total_seconds():.2f}",
                significant(point.cost or 0),
                significant(point.cost_so_far or 0),
            )
            for point in known
        ],
    )


def daily_tokens(days: Sequence[Day]) -> Chart:
    """Output tokens a day."""
    return Chart(
        id="chart-daily-tokens",
        title=_("How much ran each day?"),
        subtitle=_("Output tokens a day (UTC)"),
        figure=bars(
            [day.date for day in days],
            [day.output_tokens for day in days],
            colour="@series-1",
            unit=_("Output tokens"),
            hover="%{y:,.0f} " + _("output tokens"),
        ),
        columns=(_("Day"), _("Finished requests"), _("Errors"), _("Output tokens")),
        rows=[
            (day.date.isoformat(), f"{day.finished:,}", f"{day.errors:,}", f"{day.output_tokens:,}")
            for day in reversed(days)
        ],
    )


def daily_cost(days: Sequence[Day]) -> Chart | None:
    """Cost a day, in the one currency that the days have; None where there is none, or several."""
    currencies = {day.currency for day in days if day.cost is not None}
    if len(currencies) != 1:
        return None
    currency = currencies.pop()
    return Chart(
        id="chart-daily-cost",
        title=_("What did each day cost?"),
        subtitle=_("Cost of finished requests, %(currency)s a day (UTC)") % {"currency": currency},
        figure=bars(
            [day.date for day in days],
            [float(day.cost or 0) for day in days],
            colour="@series-4",
            unit=currency,
            hover="%{y:.4~f} " + currency,
        ),
        columns=(_("Day"), _("Cost, %(currency)s") % {"currency": currency}, _("Energy, kWh")),
        rows=[
            (
                day.date.isoformat(),
                "–" if day.cost is None else significant(day.cost),
                "–" if day.energy_kwh is None else significant(day.energy_kwh),
            )
            for day in reversed(days)
        ],
    )


def bars(dates: Sequence[dt.date], values: Sequence[float], *, colour: str, unit: str, hover: str) -> dict[str, Any]:
    return {
        "data": [
            {
                "type": "bar",
                "x": [date.isoformat() for date in dates],
                "y": list(values),
                "marker": {"color": colour},
                "hovertemplate": "%{x|%Y-%m-%d}<br>" + hover + "<extra></extra>",
            }
        ],
        "layout": {
            "xaxis": {"type": "date", "tickformat": "%m-%d", "range": _day_range(dates)},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "bargap": 0.25,
            "showlegend": False,
        },
    }


def _day_range(dates: Sequence[dt.date]) -> list[str]:
    if not dates:
        return []
    half = dt.timedelta(hours=12)
    first = dt.datetime.combine(dates[0], dt.time())
    last = dt.datetime.combine(dates[-1], dt.time())
    return [(first - half).isoformat(), (last + half).isoformat()]


def fairness(report: FairnessReport, *, outcome: str) -> Chart | None:
    """The favourable rate of each group with its Wilson interval, and the threshold below the best group's."""
    groups = [group for group in report.groups if group.favourable.rate is not None]
    if not groups:
        return None
    colours = {Verdict.PASS: "@series-3", Verdict.FAIL: "@series-2", Verdict.INSUFFICIENT: "@over"}
    symbols = {Verdict.PASS: "circle", Verdict.FAIL: "x", Verdict.INSUFFICIENT: "circle-open"}
    rates = [(group.favourable.rate or 0.0) * 100 for group in groups]
    intervals = [group.favourable.interval for group in groups]
    spans = list(zip(intervals, rates, strict=True))
    shapes = []
    annotations = []
    reference = next((group for group in groups if group.group == report.reference), None)
    if reference is not None and reference.favourable.rate:
        limit = float(report.thresholds.min_ratio) * reference.favourable.rate * 100
        line = {"color": "@ink-soft", "width": 1.5, "dash": "dash"}
        ends = {"x0": limit, "x1": limit, "y0": 0, "y1": 1}
        shapes.append({"type": "line", "xref": "x", "yref": "paper", **ends, "line": line})
        annotations.append(
            {
                "x": limit,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"color": "@ink-soft", "size": 11},
                "text": _("%(ratio)s × best group") % {"ratio": significant(report.thresholds.min_ratio, 2)},
            }
        )
    return Chart(
        id="chart-fairness",
        title=_("Do all groups get %(outcome)s equally often?") % {"outcome": outcome},
        subtitle=_("Rate of each group with its %(confidence)s Wilson interval")
        % {"confidence": percentage(report.thresholds.confidence)},
        figure={
            "data": [
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": rates,
                    "y": [group.group for group in groups],
                    "error_x": {
                        "type": "data",
                        "symmetric": False,
                        "array": [at.high * 100 - rate if at else 0 for at, rate in spans],
                        "arrayminus": [rate - at.low * 100 if at else 0 for at, rate in spans],
                        "color": "@ink-soft",
                        "thickness": 1.5,
                        "width": 7,
                    },
                    "marker": {
                        "size": 11,
                        "color": [colours[group.verdict] for group in groups],
                        "symbol": [symbols[group.verdict] for group in groups],
                    },
                    "hovertemplate": "%{y}: %{x:.1f}%<extra></extra>",
                }
            ],
            "layout": {
                "xaxis": {"title": {"text": _("percent of requests")}, "range": [-2, 102], "ticksuffix": "%"},
                "yaxis": {"type": "category", "autorange": "reversed"},
                "shapes": shapes,
                "annotations": annotations,
                "margin": {"t": 24},
                "showlegend": False,
            },
        },
        columns=(_("Group"), _("Favourable"), _("Counted"), _("Rate"), _("Low"), _("High")),
        rows=[
            (
                group.group,
                f"{group.favourable.events:,}",
                f"{group.favourable.count:,}",
                percentage(group.favourable.rate or 0),
                percentage(at.low) if at else "–",
                percentage(at.high) if at else "–",
            )
            for group, at in zip(groups, intervals, strict=True)
        ],
    )


def sensitivity(returns: Returns) -> Chart | None:
    """A tornado: the net present value over 12 months with one assumption low or high, the others held."""
    if not returns.sensitivity or returns.npv_12_months is None:
        return None
    rows = sorted(returns.sensitivity, key=lambda row: row.spread)
    base = float(returns.npv_12_months)
    names = [row.label for row in rows]

    def side(values: Sequence[float], name: str, colour: str) -> dict[str, Any]:
        return {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": [value - base for value in values],
            "base": base,
            "marker": {"color": colour},
            "hovertemplate": "%{y}<extra>" + name + "</extra>",
        }

    currency = returns.currency
    return Chart(
        id="chart-sensitivity",
        title=_("On which assumption does the return hang most?"),
        subtitle=_("Net present value over 12 months, %(currency)s, with one assumption moved and the others held")
        % {"currency": currency},
        figure={
            "data": [
                side([float(row.npv_at_low) for row in rows], _("assumption low"), "@series-4/0.45"),
                side([float(row.npv_at_high) for row in rows], _("assumption high"), "@series-4"),
            ],
            "layout": {
                "barmode": "overlay",
                "bargap": 0.35,
                "xaxis": {"title": {"text": currency}},
                "yaxis": {"type": "category"},
            },
        },
        columns=(_("Assumption"), _("Low"), _("High"), _("At low"), _("At high")),
        rows=[
            (
                f"{row.label} ({row.unit})" if row.unit else row.label,
                significant(row.low),
                significant(row.high),
                f"{row.npv_at_low:,.2f}",
                f"{row.npv_at_high:,.2f}",
            )
            for row in reversed(rows)
        ],
    )

"""Charts of what an engine did while it held a batch's rows."""

from collections.abc import Mapping, Sequence

from django.utils.translation import gettext as _

from penstock.dashboard.charts import Chart
from penstock.dashboard.templatetags.figures import percentage, significant


def batch_size(points: Sequence[Sequence[float]], *, key: str) -> Chart | None:
    """Sequences in the engine's steps over the time of a run. points: (seconds since its first step, sequences)."""
    if not points:
        return None
    return Chart(
        id=f"chart-batch-size-{key}",
        title=_("How many ran at a time?"),
        subtitle=_("Sequences a step, this batch's rows and whatever ran beside them"),
        figure={
            "data": [
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [seconds for seconds, _sequences in points],
                    "y": [sequences for _seconds, sequences in points],
                    "line": {"color": "@series-1", "width": 2, "shape": "hv"},
                    "fill": "tozeroy",
                    "fillcolor": "@series-1/0.12",
                    "hovertemplate": _("%(y)s sequences at %(x)s s") % {"y": "%{y:.1f}", "x": "%{x:.1f}"}
                    + "<extra></extra>",
                }
            ],
            "layout": {
                "xaxis": {"title": {"text": _("Seconds since the first step")}, "rangemode": "tozero"},
                "yaxis": {"title": {"text": _("Sequences a step")}, "rangemode": "tozero"},
                "showlegend": False,
            },
        },
        columns=(_("From, s"), _("Sequences a step")),
        rows=[(f"{seconds:.2f}", significant(sequences)) for seconds, sequences in points],
    )


def where_time_went(shares: Mapping[str, float], *, key: str) -> Chart | None:
    """The shares of an engine's time, as `serving.hosting.runs.time_shares` has them."""
    names = {
        "disk": (_("waiting for the disk"), "@series-2"),
        "memory": (_("reading memory"), "@series-1"),
        "arithmetic": (_("arithmetic"), "@series-3"),
        "other": (_("other work in steps"), "@series-4"),
        "idle": (_("between steps"), "@over"),
    }
    known = [(*names[name], shares[name]) for name in names if name in shares]
    if not known:
        return None
    return Chart(
        id=f"chart-time-{key}",
        title=_("What did the time go into?"),
        subtitle=_(
            "Shares of the time from the first step to the last; memory and arithmetic at this machine's limits"
        ),
        figure={
            "data": [
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": label,
                    "y": [""],
                    "x": [round(100 * share, 2)],
                    "marker": {"color": colour},
                    "hovertemplate": "%{x:.1f}%<extra>" + label + "</extra>",
                }
                for label, colour, share in known
            ],
            "layout": {
                "barmode": "stack",
                "height": 190,
                "xaxis": {"title": {"text": _("percent of the time")}, "range": [0, 100], "ticksuffix": "%"},
                "yaxis": {"showticklabels": False},
                "showlegend": True,
                "legend": {"y": 1.3, "traceorder": "normal"},
            },
        },
        columns=(_("Part"), _("Share")),
        rows=[(label, percentage(share)) for label, _colour, share in known],
    )

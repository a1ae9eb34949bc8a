"""A release's evaluation as rows for its page."""

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from penstock.dashboard.templatetags.figures import minus, significant
from penstock.registry.models import ReleaseEvaluation


@dataclass(frozen=True, slots=True)
class FigureRow:
    """`value` and `interval` as they are shown; an empty interval where there were too few windows for one."""

    label: str
    value: str
    interval: str


def rows_of(evaluation: ReleaseEvaluation) -> list[FigureRow]:
    """Perplexities, agreement, divergence, and the task's score where one was given."""
    figures: dict[str, Any] = evaluation.figures
    rows = [
        _row(_("Perplexity"), figures["perplexity"]),
        _row(_("Perplexity of the reference"), figures["reference_perplexity"]),
        _row(_("Change of perplexity"), figures["perplexity_change"], percent=True),
        _row(_("Same most likely token as the reference"), figures["top1_agreement"], percent=True),
        _row(_("Divergence from the reference (KL), nats a token"), figures["kl_mean_nats"]),
        FigureRow(_("The same, 99th percentile"), _shown(figures["kl_p99_nats"], False), ""),
    ]
    task = figures.get("task")
    if task is not None:
        items = _("items: %(n)s") % {"n": f"{task['items']:,}"}
        for label, key in ((_("Task score"), "accuracy"), (_("Task score of the reference"), "reference_accuracy")):
            figure = {"value": task[key], "low": task[f"{key}_low"], "high": task[f"{key}_high"]}
            rows.append(_row(f"{label} ({items})", figure, percent=True))
    return rows


def described(evaluation: ReleaseEvaluation) -> dict[str, Any]:
    """What was run: the arithmetic, the reference and its arithmetic, and on how many tokens."""
    figures: dict[str, Any] = evaluation.figures
    reference = figures["reference"]
    return {
        "compute": figures["model"]["compute"],
        "reference": _("%(source)s (%(quantization)s), computed in %(compute)s")
        % {key: reference[key] for key in ("source", "quantization", "compute")},
        "scored_tokens": figures["scored_tokens"],
    }


def _row(label: str, figure: dict[str, Any], *, percent: bool = False) -> FigureRow:
    low, high = figure["low"], figure["high"]
    interval = ""
    if low is not None and high is not None:
        interval = _("%(low)s to %(high)s") % {"low": _shown(low, percent), "high": _shown(high, percent)}
    return FigureRow(label, _shown(figure["value"], percent), interval)


def _shown(value: float, percent: bool) -> str:
    return minus(significant(100 * value) + "%" if percent else significant(value))

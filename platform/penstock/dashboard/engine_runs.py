"""Engine runs as a page shows them: where the model lay, what was predicted, what came, and what bound it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from penstock.dashboard.charts import Chart
from penstock.dashboard.engine_charts import batch_size, where_time_went
from penstock.serving.models import Batch, EngineRun
from penstock.serving.selectors import runs_of_batch, spells_of_batch

BOUND_BY: dict[str, Promise] = {
    "disk": _("The disk: the engine waited for weights that do not fit into memory. More memory, or 4-bit weights."),
    "memory": _("Memory bandwidth: weights and cache are read as fast as memory gives them. A larger batch uses more."),
    "arithmetic": _("Arithmetic: the processor's products run near their limit. Only more cores would help."),
    "overhead": _("Overhead: the work between the large products, such as norms, attention and sampling."),
    "idle": _("Idle: there was not enough work for the engine. Larger batches, or more requests at a time."),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens a second. planned: by the plan, for the work that it was made for; predicted: for the steps that came;
    ratio: of what was measured to the latter, or to the plan where that is all there is.
    """

    name: str | Promise
    planned: float | None
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        promise = self.predicted or self.planned
        return self.measured / promise if promise and self.measured else None


@dataclass(frozen=True, slots=True)
class ShownRun:
    """measured: of the engine since it was loaded, or while it held rows of one batch: between `began` and `ended`."""

    run: EngineRun
    measured: dict[str, Any]
    placement: str
    rates: tuple[Compared, ...]
    is_planned: bool
    """A model that fits whole is loaded without a plan."""
    is_predicted: bool
    """Whether it is known what the steps that came should have taken."""
    planned_for: str
    """The work that the plan was made for: what came may have been other work."""
    bound_by: str | Promise
    streamed_share: float | None
    """Of the time of its steps, that the engine waited for the disk."""
    is_over: bool = False
    began: datetime | None = None
    ended: datetime | None = None
    charts: tuple[Chart, ...] = ()


def shown_of_batch(batch: Batch) -> tuple[list[ShownRun], bool]:
    """How a batch ran, and whether the figures are of the batch's own time.

    A batch of before spells were recorded has only the figures of whole engines.
    """
    spells = [
        replace(
            shown(spell.engine_run, spell.measured),
            began=spell.began_at,
            is_over=spell.ended_at is not None,
            ended=spell.ended_at,
            charts=tuple(
                chart
                for chart in (
                    batch_size(spell.measured.get("batch_size_over_time") or [], key=str(spell.pk)),
                    where_time_went(spell.measured.get("shares") or {}, key=str(spell.pk)),
                )
                if chart is not None
            ),
        )
        for spell in spells_of_batch(batch)
    ]
    return (spells, True) if spells else ([shown(run) for run in runs_of_batch(batch)], False)


def shown(run: EngineRun, measured: dict[str, Any] | None = None) -> ShownRun:
    """measured: of the engine since it was loaded, unless given."""
    planned: dict[str, Any] = (run.plan or {}).get("predicted") or {}
    measured = run.measured if measured is None else measured
    predicted: dict[str, Any] = measured.get("predicted") or {}
    rates = tuple(
        Compared(name, planned.get(key), predicted.get(key), measured.get(key))
        for name, key in (
            (_("Prompts"), "prefill_tokens_per_s"),
            (_("Output, while decoding"), "decode_tokens_per_s"),
            (_("Output, over all"), "output_tokens_per_s"),
        )
    )
    busy = measured.get("busy_seconds")
    waited = measured["waited_seconds"] / busy if busy and measured.get("streamed_bytes") else None
    return ShownRun(
        run=run,
        measured=measured,
        placement=placement(run),
        rates=rates,
        is_planned=bool(planned),
        is_predicted=bool(predicted),
        planned_for=planned_for(run.plan or {}) if planned else "",
        bound_by=BOUND_BY.get(measured.get("bound_by", ""), ""),
        streamed_share=waited,
        is_over=run.ended_at is not None,
    )


def planned_for(plan: Mapping[str, Any]) -> str:
    """The workload of a plan, in words; "" where it was made for none."""
    workload = plan.get("workload")
    if not workload:
        return ""
    return gettext("prompts of %(prompt)s tokens and answers of %(new)s, %(batch)s sequences at a time") % {
        "prompt": f"{workload['prompt']['mean']:,.0f}",
        "new": f"{workload['new']['mean']:,.0f}",
        "batch": f"{plan['max_batch']:,}",
    }


def placement(run: EngineRun) -> str:
    """Where the model's parts lie, in a sentence."""
    device = run.plan["placement"].get("device") if run.plan else None
    if run.plan and device is not None:
        pinned, hosted = len(run.plan["placement"]["pinned"]), len(run.plan["placement"]["hosted"])
        return gettext(
            "On %(device)s: %(pinned)d layers stay there, %(hosted)d are copied from the host's memory in each step, "
            "any others are read from disk."
        ) % {"device": device, "pinned": pinned, "hosted": hosted}
    if not run.plan or not run.plan["placement"]["ring"]:
        return gettext("All weights in memory.")
    pinned, spilled = len(run.plan["placement"]["pinned"]), len(run.plan["placement"]["spilled"])
    text = ngettext(
        "%(n)d layer stays in memory, the others are read from disk in each step.",
        "%(n)d layers stay in memory, the others are read from disk in each step.",
        pinned,
    ) % {"n": pinned}
    if spilled:
        text += " " + ngettext(
            "The cache of %(n)d layer lies on disk.", "The cache of %(n)d layers lies on disk.", spilled
        ) % {"n": spilled}
    return text

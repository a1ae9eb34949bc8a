"""A task's objectives held against what its requests did."""

from dataclasses import dataclass
from decimal import Decimal

from django.db.models import QuerySet, TextChoices
from django.utils.translation import gettext_lazy as _

from penstock.registry.contracts import Metric, Objective, parse_objectives
from penstock.registry.models import Task
from penstock.serving.models import Request
from penstock.telemetry.summary import Summary, summarize


class ObjectiveVerdict(TextChoices):
    MET = "met", _("met")
    NOT_MET = "not_met", _("not met")
    NO_DATA = "no_data", _("no data")


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """`value` is in `unit`, which is the objective's; None where nothing could be measured, or where the cost was
    reckoned in another currency than the target."""

    objective: Objective
    value: Decimal | None
    unit: str
    verdict: ObjectiveVerdict


def judge(*, task: Task, requests: QuerySet[Request]) -> list[ObjectiveResult]:
    """Each objective of the task, in its order, over `requests` (of the task, over a window or of one batch)."""
    objectives = parse_objectives(task.objectives)
    if not objectives:
        return []
    return judge_summary(objectives, summarize(requests, per="active"))


def judge_summary(objectives: list[Objective], summary: Summary) -> list[ObjectiveResult]:
    return [_judge(objective, _value(objective, summary)) for objective in objectives]


def _judge(objective: Objective, value: Decimal | None) -> ObjectiveResult:
    if value is None:
        verdict = ObjectiveVerdict.NO_DATA
    else:
        verdict = ObjectiveVerdict.MET if objective.is_met_by(value) else ObjectiveVerdict.NOT_MET
    return ObjectiveResult(objective, value, objective.unit, verdict)


def _value(objective: Objective, summary: Summary) -> Decimal | None:
    metric: Metric = objective.metric
    if metric == "cost_per_1k_output_tokens":
        return summary.cost_per_1k_output_tokens if summary.currency == objective.unit else None
    figure: float | None = getattr(summary, metric)
    # The shortest decimal form: 19 of 20 is 0.95 and meets a target of 0.95.
    return None if figure is None else Decimal(repr(float(figure)))

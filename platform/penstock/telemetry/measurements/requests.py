"""Figures of requests: how many, how fast, how well, at what cost, for whom."""

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

from django.db.models import F, Max, Q
from django.db.models.functions import Coalesce

from governance.controls.sources import Measurement
from governance.fairness.outcomes import Verdict
from penstock.registry.contracts import parse_objectives
from penstock.serving.models import Batch
from penstock.telemetry.measurements.window import Figure, Window, narrowed
from penstock.telemetry.objectives import ObjectiveVerdict, judge_summary
from penstock.telemetry.rates import current_rate_card


def request_count(key: str, window: Window) -> Measurement:
    summary = window.summary
    return window.measured(
        key,
        summary.finished,
        "count",
        count=summary.finished,
        query=window.requests_query(),
        by_status=dict(summary.by_status),
    )


def error_rate(key: str, window: Window) -> Measurement:
    """Leads to the requests that failed or expired; to all, if none did."""
    summary = window.summary
    errors = sum(summary.errors_by_code.values())
    return window.measured(
        key,
        summary.error_rate,
        "ratio",
        count=summary.succeeded + errors,
        query=window.requests_query(status="errors") if errors else window.requests_query(),
        errors=errors,
        errors_by_code=dict(summary.errors_by_code),
    )


def ttft_p95(key: str, window: Window) -> Measurement:
    count = window.requests.filter(status="succeeded", ttft_seconds__isnull=False).count()
    value = window.summary.ttft_p95_seconds
    return window.measured(key, value, "seconds", count=count, query=window.requests_query(status="succeeded"))


def duration_p95(key: str, window: Window) -> Measurement:
    count = window.requests.filter(status="succeeded", duration_seconds__isnull=False).count()
    value = window.summary.duration_p95_seconds
    return window.measured(key, value, "seconds", count=count, query=window.requests_query(status="succeeded"))


def output_tokens_per_second(key: str, window: Window) -> Measurement:
    """Over the time in which at least one request ran."""
    summary = window.summary
    count = window.requests.filter(started_at__isnull=False).count()
    return window.measured(
        key,
        summary.output_tokens_per_second,
        "tokens_per_second",
        count=count,
        query=window.requests_query(),
        output_tokens=summary.output_tokens,
        active_seconds=summary.active_seconds,
    )


def valid_rate(key: str, window: Window) -> Measurement:
    """Leads to the outputs that were not valid; to all successes, if none was."""
    summary = window.summary
    invalid = summary.assessed - summary.valid
    filters = {"status": "succeeded", "valid": "no"} if invalid else {"status": "succeeded"}
    return window.measured(
        key,
        summary.valid_rate,
        "ratio",
        count=summary.assessed,
        query=window.requests_query(**filters),
        valid=summary.valid,
        invalid=invalid,
    )


def deadline_met_rate(key: str, window: Window) -> Measurement:
    """Of the batches that ran to their end or ran out of time: those completed within their completion window."""
    ended = Batch.objects.filter(status__in=[Batch.Status.COMPLETED, Batch.Status.EXPIRED]).annotate(
        ended_at=Coalesce("completed_at", "expired_at")
    )
    ended = narrowed(ended.filter(ended_at__gte=window.start, ended_at__lt=window.end), window.scope, "task")
    if window.batch:
        ended = ended.filter(pk=window.batch.pk)
    late = Q(status=Batch.Status.EXPIRED) | Q(completed_at__gt=F("expires_at"))
    count, late_ids = ended.count(), list(ended.filter(late).order_by("pk").values_list("pk", flat=True)[:100])
    missed = ended.filter(late).count()
    return window.measured(
        key,
        (count - missed) / count if count else None,
        "ratio",
        count=count,
        at=ended.aggregate(newest=Max("ended_at"))["newest"] or window.end,
        query=urlencode({"batch": late_ids[0]}) if len(late_ids) == 1 else None,
        late_batches=late_ids or None,
    )


def objectives_met_rate(key: str, window: Window) -> Measurement:
    """Of the objectives of all tasks that could be judged; `count` is the number of these objectives."""
    met, missed = 0, []
    for task in window.tasks.filter(pk__in=window.summaries_by_task).order_by("pk"):
        for result in judge_summary(parse_objectives(task.objectives), window.summaries_by_task[task.pk]):
            if result.verdict == ObjectiveVerdict.MET:
                met += 1
            elif result.verdict == ObjectiveVerdict.NOT_MET:
                missed.append(
                    {
                        "task": task.name,
                        "metric": result.objective.metric,
                        "value": str(result.value),
                        "target": str(result.objective.target),
                        "unit": result.unit,
                    }
                )
    count = met + len(missed)
    return window.measured(
        key,
        met / count if count else None,
        "ratio",
        count=count,
        query=window.requests_query(),
        missed=missed or None,
    )


def cost_total(key: str, window: Window) -> Measurement:
    """No figure where costs were reckoned in several currencies; `details` lists the sums."""
    summary = window.summary
    return window.measured(
        key,
        summary.cost_total,
        summary.currency or current_rate_card().currency,
        count=summary.finished if summary.costs else 0,
        query=window.requests_query(),
        costs={money.currency: str(money.amount) for money in summary.costs},
    )


def cost_per_1k_output_tokens(key: str, window: Window) -> Measurement:
    summary = window.summary
    return window.measured(
        key,
        summary.cost_per_1k_output_tokens,
        summary.currency or current_rate_card().currency,
        count=summary.finished if summary.costs else 0,
        query=window.requests_query(),
        output_tokens=summary.output_tokens,
    )


def energy_kwh(key: str, window: Window) -> Measurement:
    summary = window.summary
    return window.measured(
        key,
        summary.energy_kwh,
        "kWh",
        count=summary.finished if summary.costs else 0,
        query=window.requests_query(),
        source=summary.energy_source,
        carbon_kg=None if summary.carbon_kg is None else str(summary.carbon_kg),
    )


def groups_failing(key: str, window: Window) -> Measurement:
    """None until some group could be judged: that none failed is no news where none could."""
    judged = [report for report in window.fairness if any(g.verdict is not Verdict.INSUFFICIENT for g in report.groups)]
    failing = {report.task.name: [group.group for group in report.failing] for report in judged if report.failing}
    return _fairness(key, window, sum(len(names) for names in failing.values()) if judged else None, "count", failing)


def groups_insufficient(key: str, window: Window) -> Measurement:
    named = {
        report.task.name: [group.group for group in report.insufficient]
        for report in window.fairness
        if report.insufficient
    }
    value = sum(len(names) for names in named.values()) if window.fairness else None
    return _fairness(key, window, value, "count", named)


def lowest_ratio(key: str, window: Window) -> Measurement:
    worst = {
        report.task.name: report.worst for report in window.fairness if report.worst and report.worst.ratio is not None
    }
    value = min((group.ratio for group in worst.values() if group.ratio is not None), default=None)
    named = {task: [group.group] for task, group in worst.items() if group.ratio == value}
    return _fairness(key, window, value, "ratio", named)


def _fairness(
    key: str, window: Window, value: float | int | None, unit: str, named: Mapping[str, list[str]]
) -> Measurement:
    """Leads to the requests of the one group that is named, or else to all."""
    query = window.requests_query()
    if len(named) == 1:
        [(task, groups)] = named.items()
        if len(groups) == 1:
            report = next(report for report in window.fairness if report.task.name == task)
            query = report.services[groups[0]].requests_query
        else:
            query = urlencode({**dict(parse_qsl(query)), "task": task})
    return window.measured(
        key,
        value,
        unit,
        count=sum(report.count - report.without_group for report in window.fairness),
        query=query,
        groups={task: list(groups) for task, groups in named.items()} or None,
        without_group=sum(report.without_group for report in window.fairness),
    )


REQUEST_FIGURES: Mapping[str, Figure] = {
    "requests.count": request_count,
    "requests.error_rate": error_rate,
    "requests.ttft_p95_seconds": ttft_p95,
    "requests.duration_p95_seconds": duration_p95,
    "requests.output_tokens_per_second": output_tokens_per_second,
    "requests.valid_rate": valid_rate,
    "batches.deadline_met_rate": deadline_met_rate,
    "objectives.met_rate": objectives_met_rate,
    "cost.total": cost_total,
    "cost.per_1k_output_tokens": cost_per_1k_output_tokens,
    "energy.kwh": energy_kwh,
    "fairness.groups_failing": groups_failing,
    "fairness.groups_insufficient": groups_insufficient,
    "fairness.lowest_ratio": lowest_ratio,
}

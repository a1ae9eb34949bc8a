"""Fairness of service: how a task's groups were served. `governance.fairness` computes; this room supplies the rows."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import ROUND_HALF_UP, Decimal
from typing import Any
from urllib.parse import urlencode

from django.db.models import QuerySet
from django.db.models.fields.json import KeyTextTransform
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import get_language_info
from django.utils.translation import gettext as _

from governance.fairness import outcomes
from governance.fairness.outcomes import Favourable, GroupResult, OutcomeRow, Rate, Thresholds, Verdict
from governance.fairness.wording import explain
from penstock.accounts.access import visible_to
from penstock.accounts.models import User
from penstock.registry.contracts import FairnessPlan, parse_fairness_plan
from penstock.registry.models import Task
from penstock.registry.services.tasks import update_task
from penstock.serving.models import Batch, Request
from penstock.telemetry.aggregates import NOT_STOPPED
from penstock.telemetry.json_values import moment_text, plain
from penstock.telemetry.summary import Summary, summarize_by

ROWS_AT_A_TIME = 5000
LANGUAGE_TAGS = {"zh-tw": "zh-hant", "zh-hk": "zh-hant", "zh-cn": "zh-hans"}


@dataclass(frozen=True, slots=True)
class GroupService:
    """One group's latency and cost beside its verdict; `*_ratio` is to the best-served group, 1 or more."""

    label: str
    summary: Summary
    ttft_ratio: float | None
    cost_ratio: float | None
    requests_query: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessReport(outcomes.FairnessReport):
    """How a task's groups were served over a window, or in one batch.

    Requests that somebody cancelled are left out; errors are in. `services` has an entry for each group by its name.
    `currency` is empty, and costs are zero, where the requests were reckoned in more than one currency.
    """

    task: Task
    batch: Batch | None
    plan: FairnessPlan
    window_start: dt.datetime
    window_end: dt.datetime
    currency: str
    services: Mapping[str, GroupService]
    requests_query: str

    @property
    def worst(self) -> GroupResult | None:
        """The group with the lowest ratio among those that could be judged."""
        judged = [
            group
            for group in self.groups
            if group.verdict is not Verdict.INSUFFICIENT and group.group != self.reference and group.ratio is not None
        ]
        return min(judged, key=lambda group: group.ratio or 0.0, default=None)

    @property
    def finding(self) -> str:
        """The report in one sentence, in the active language."""
        return _finding(self)

    def explain(self, group: GroupResult) -> str:
        """What one group's result means, in the active language."""
        return explain(group, self)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, with the sentences in the active language."""
        report = {field.name: plain(getattr(self, field.name)) for field in fields(outcomes.FairnessReport)}
        for group in report["groups"]:
            service = self.services[group["group"]]
            group |= {
                "label": service.label,
                "explanation": explain(self.group(group["group"]), self),
                "ttft_p95_seconds": service.summary.ttft_p95_seconds,
                "ttft_ratio": service.ttft_ratio,
                "cost_ratio": service.cost_ratio,
                "requests_query": service.requests_query,
            }
        return {
            "task": self.task.name,
            "task_version": self.task.version,
            "batch": self.batch.pk if self.batch else None,
            "plan": self.plan.model_dump(mode="json"),
            "window_start": plain(self.window_start),
            "window_end": plain(self.window_end),
            "currency": self.currency or None,
            "finding": self.finding,
            "requests_query": self.requests_query,
            **report,
        }


def fairness_report(*, user: User, task: Task, batch: Batch | None = None, window_days: int = 90) -> FairnessReport:
    """The groups of a task's requests that finished within the window (all of a batch's, where one is given).

    A person who may not see the task gets a report over no requests.
    """
    now = timezone.now()
    if batch is None:
        return report_on(task=task, requests=visible_to(user, Request.objects.all()), days=window_days, now=now)
    return report_on(task=task, requests=visible_to(user, Request.objects.all()), batch=batch, now=now)


def report_on(
    *,
    task: Task,
    requests: QuerySet[Request],
    now: dt.datetime,
    batch: Batch | None = None,
    days: int = 90,
) -> FairnessReport:
    """As `fairness_report`, over the task's part of `requests`."""
    # scipy takes a second to load: only a process that reports pays for it.
    from governance.fairness.report import group_report

    plan = parse_fairness_plan(task.fairness_plan)
    requests = requests.order_by().filter(NOT_STOPPED, task=task)
    start, query = now - dt.timedelta(days=days), {"task": task.name, "status": "finished"}
    if batch is not None:
        start = batch.created_at
        requests = requests.filter(batch=batch)
        query["batch"] = batch.pk
    else:
        requests = requests.filter(finished_at__gte=start, finished_at__lt=now)
        query |= {"since": moment_text(start), "until": moment_text(now)}
    rows, currency = _rows(requests, plan)
    report = group_report(rows, thresholds(plan), None if plan.favourable == "valid" else Favourable(plan.favourable))
    services = _services(requests, [group.group for group in report.groups], plan=plan, query=query)
    return FairnessReport(
        **{field.name: getattr(report, field.name) for field in fields(report)},
        task=task,
        batch=batch,
        plan=plan,
        window_start=start,
        window_end=now,
        currency=currency,
        services=services,
        requests_query=urlencode(query),
    )


def set_thresholds(*, user: User, task: Task, plan: FairnessPlan | Mapping[str, Any]) -> Task:
    """Changes how a task's groups are judged, as a new version of the task; fields not given stay as they are.

    The ledger gets `thresholds.changed` with what stood before. Raises PermissionDenied, or ValidationError under
    `fairness_plan`.
    """
    changes = plan.model_dump() if isinstance(plan, FairnessPlan) else dict(plan)
    return update_task(user=user, task=task, fairness_plan={**task.fairness_plan, **changes})


def thresholds(plan: FairnessPlan) -> Thresholds:
    return Thresholds(
        min_ratio=Decimal(repr(plan.min_ratio)),
        min_count=plan.min_count,
        min_events=plan.min_events,
        confidence=plan.confidence,
    )


def group_label(key: str, value: str) -> str:
    """A group as people call it: languages by their name in the active language, anything else as it is."""
    if key == "language":
        tag = LANGUAGE_TAGS.get(value.lower(), value.lower())
        try:
            return str(get_language_info(tag)["name_translated"])
        except KeyError:
            return value
    return value


def _rows(requests: QuerySet[Request], plan: FairnessPlan) -> tuple[list[OutcomeRow], str]:
    group_of_row = KeyTextTransform(plan.group, "groups")
    columns = requests.values_list(
        group_of_row, "valid", "refused", "truncated", "status", "ttft_seconds", "output_tokens", "prompt_tokens",
        "usage__cost", "usage__currency",
    )  # fmt: skip
    found = list(columns.iterator(chunk_size=ROWS_AT_A_TIME))
    currencies = {row[-1] for row in found if row[-1]}
    comparable = len(currencies) == 1
    rows = [
        OutcomeRow(
            group=group or "",
            valid=valid,
            refused=refused,
            truncated=truncated,
            error=status != Request.Status.SUCCEEDED,
            # A request that failed has no latency to compare, see `aggregates`.
            ttft_seconds=ttft if status == Request.Status.SUCCEEDED else None,
            output_tokens=output_tokens or 0,
            prompt_tokens=prompt_tokens or 0,
            cost=cost if comparable and cost is not None else Decimal(0),
        )
        for group, valid, refused, truncated, status, ttft, output_tokens, prompt_tokens, cost, _currency in found
    ]
    return rows, currencies.pop() if comparable else ""


def _services(
    requests: QuerySet[Request], groups: list[str], *, plan: FairnessPlan, query: Mapping[str, str]
) -> dict[str, GroupService]:
    by_group = requests.annotate(group=KeyTextTransform(plan.group, "groups"))
    summaries = summarize_by(by_group, "group") if groups else {}
    latencies = [s.ttft_p50_seconds for group in groups if (s := summaries[group]).ttft_p50_seconds]
    costs = [s.cost_per_item for group in groups if (s := summaries[group]).cost_per_item]
    fastest, cheapest = min(latencies, default=None), min(costs, default=None)
    services = {}
    for group in groups:
        summary = summaries[group]
        services[group] = GroupService(
            label=group_label(plan.group, group),
            summary=summary,
            ttft_ratio=summary.ttft_p50_seconds / fastest if fastest and summary.ttft_p50_seconds else None,
            cost_ratio=float(summary.cost_per_item / cheapest) if cheapest and summary.cost_per_item else None,
            requests_query=urlencode({**query, "group": f"{plan.group}:{group}"}),
        )
    return services


def _finding(report: FairnessReport) -> str:
    worst = report.worst
    if not report.groups:
        if report.count:
            return _("None of the %(count)d requests names its %(group)s, so there is nothing to compare.") % {
                "count": report.count,
                "group": report.plan.group,
            }
        return _("No request has finished in this window.")
    if worst is None or report.reference is None:
        first = report.insufficient[0]
        return explain(first, report)
    best = report.group(report.reference)
    words = {
        "outcome": _outcome(report.favourable),
        "group": group_label(report.plan.group, worst.group),
        "rate": _percent(worst.favourable),
        "best": group_label(report.plan.group, best.group),
        "best_rate": _percent(best.favourable),
        "ratio": _number(worst.ratio),
        "threshold": _number(float(report.thresholds.min_ratio)),
    }
    if worst.ratio_interval is not None:
        words["ratio"] = _("%(ratio)s [%(low)s, %(high)s]") % {
            "ratio": words["ratio"],
            "low": _number(worst.ratio_interval.low),
            "high": _number(worst.ratio_interval.high),
        }
    if worst.verdict is Verdict.FAIL:
        sentence = _(
            "%(outcome)s: %(group)s %(rate)s, %(best)s %(best_rate)s; "
            "ratio %(ratio)s is below the %(threshold)s threshold."
        )
    else:
        sentence = _(
            "%(outcome)s: %(group)s %(rate)s, %(best)s %(best_rate)s; "
            "ratio %(ratio)s is not below the %(threshold)s threshold."
        )
    return sentence % words


def _outcome(favourable: Favourable) -> str:
    return {
        Favourable.VALID: _("Valid answers"),
        Favourable.SERVED: _("Answers without error or refusal"),
        Favourable.NOT_REFUSED: _("Answers that are no refusal"),
        Favourable.NOT_TRUNCATED: _("Answers not cut off"),
        Favourable.SUCCEEDED: _("Requests that succeeded"),
    }[favourable]


def _percent(rate: Rate) -> str:
    if rate.rate is None:
        return "–"
    share = Decimal(str(rate.rate * 100)).quantize(Decimal(1), rounding=ROUND_HALF_UP)
    return _("%(value)s %%") % {"value": number_format(share)}


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return str(number_format(Decimal(str(value)).quantize(Decimal("0.01"), rounding=ROUND_HALF_UP), decimal_pos=2))

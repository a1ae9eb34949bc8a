"""Whose figures, over which time; what several figures are reckoned from is queried once."""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

from django.db.models import Max, QuerySet
from django.utils import timezone

from governance.controls.sources import Measurement, Scope
from penstock.registry.models import Task
from penstock.serving.models import Batch, Request
from penstock.telemetry.fairness import FairnessReport, report_on
from penstock.telemetry.json_values import moment_text
from penstock.telemetry.summary import Summary, summarize, summarize_by

Figure = Callable[[str, "Window"], Measurement]


@dataclass
class Window:
    """The last `days` days of a scope's tasks, up to now; or all of one batch, which is then of the scope's task."""

    scope: Scope
    days: int
    end: dt.datetime = field(default_factory=timezone.now)
    batch: Batch | None = None

    @property
    def start(self) -> dt.datetime:
        return self.batch.created_at if self.batch else self.end - dt.timedelta(days=self.days)

    @cached_property
    def tasks(self) -> QuerySet[Task]:
        return narrowed(Task.objects.all(), self.scope, "pk")

    @property
    def is_narrowed(self) -> bool:
        """Whether anything at all is left out."""
        return self.scope.task_id is not None or self.scope.visible_task_ids is not None

    @cached_property
    def task_names(self) -> list[str]:
        return list(self.tasks.values_list("name", flat=True))

    @cached_property
    def task(self) -> Task | None:
        return self.tasks.first() if self.scope.task_id is not None else None

    @property
    def requests(self) -> QuerySet[Request]:
        """What finished within the window."""
        finished = narrowed(Request.objects.filter(finished_at__lt=self.end), self.scope, "task")
        return finished.filter(batch=self.batch) if self.batch else finished.filter(finished_at__gte=self.start)

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.requests, per="active")

    @cached_property
    def newest(self) -> dt.datetime:
        """When the newest of the window's requests finished; the window's end if there is none."""
        newest: dt.datetime | None = self.requests.aggregate(newest=Max("finished_at"))["newest"]
        return newest or self.end

    @cached_property
    def summaries_by_task(self) -> dict[Any, Summary]:
        return summarize_by(self.requests, "task_id")

    @cached_property
    def fairness(self) -> list[FairnessReport]:
        """A report for each task of which some request named a group."""
        tasks = self.tasks.filter(pk__in=self.requests.exclude(groups={}).values("task")).order_by("pk")
        reports = [report_on(task=task, requests=Request.objects.all(), days=self.days, now=self.end) for task in tasks]
        return [report for report in reports if report.groups]

    def requests_query(self, **filters: str) -> str:
        """The query string of the list of this window's requests, narrowed by `filters`."""
        query = {"task": self.task.name} if self.task else {}
        return urlencode(
            {**query, "status": "finished", **filters, "since": moment_text(self.start), "until": moment_text(self.end)}
        )

    def measured(
        self,
        key: str,
        value: Decimal | float | int | None,
        unit: str,
        *,
        count: int,
        at: dt.datetime | None = None,
        start: dt.datetime | None = None,
        query: str | None = None,
        **details: Any,
    ) -> Measurement:
        """A measurement over this window. `at`: by default the time of the newest request; `start`: of the oldest
        record, where a figure describes a state that began before the window."""
        return Measurement(
            key=key,
            value=value,
            unit=unit,
            window_start=self.start if start is None else min(start, self.start),
            window_end=self.end,
            count=count,
            measured_at=at or self.newest,
            details={name: detail for name, detail in details.items() if detail is not None},
            requests_query=query,
        )


def narrowed(rows: QuerySet[Any], scope: Scope, task: str) -> QuerySet[Any]:
    """The rows of the scope's tasks; `task` is the lookup that leads to a row's task."""
    if scope.visible_task_ids is not None:
        rows = rows.filter(**{f"{task}__in": scope.visible_task_ids})
    if scope.task_id is not None:
        rows = rows.filter(**{task: scope.task_id})
    return rows

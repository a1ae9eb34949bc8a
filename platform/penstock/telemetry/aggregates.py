"""The aggregates that every figure is made of, computed by PostgreSQL over the request rows.

One definition of a percentile, everywhere: `percentile_cont`, linear interpolation between the two nearest ranks
(Hyndman and Fan 1996, type 7; numpy's default). The p-th percentile of n sorted values lies at rank p * (n - 1).
"""

from typing import Any

from django.contrib.postgres.fields import DateTimeRangeField
from django.db.models import Aggregate, Case, Count, DecimalField, F, FloatField, Func, Max, Min, Q, Sum, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Greatest

from penstock.serving.models import Request

Status = Request.Status
SUCCEEDED = Q(status=Status.SUCCEEDED)
FINISHED = Q(status__in=Request.FINISHED)
# What a person stopped is no error of the system's.
ERRORS = Q(status__in=[Status.FAILED, Status.EXPIRED])
NOT_STOPPED = Q(status__in=[Status.SUCCEEDED, Status.FAILED, Status.EXPIRED])


class Percentile(Aggregate):
    """`percentile_cont` of a numeric expression; None over no rows. `fraction` lies between 0 and 1."""

    function = "PERCENTILE_CONT"
    template = "%(function)s(%(fraction)s) WITHIN GROUP (ORDER BY %(expressions)s)"

    def __init__(self, expression: str | Combinable, *, fraction: float, **extra: Any) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
        super().__init__(expression, fraction=float(fraction), output_field=FloatField(), **extra)


class ActiveSeconds(Aggregate):
    """Seconds in which at least one of the rows was running: the length of the union of their spans.

    Rows that have not both started and finished are left out. None over no rows.
    """

    template = (
        "(SELECT EXTRACT(EPOCH FROM SUM(UPPER(span) - LOWER(span)))::double precision"
        " FROM UNNEST(RANGE_AGG(%(expressions)s)) AS spans(span))"
    )

    def __init__(self, start: str, end: str) -> None:
        # Two hosts' clocks may differ: a range that ends before it starts would be an error in PostgreSQL.
        span = Func(F(start), Greatest(F(start), F(end)), function="TSTZRANGE", output_field=DateTimeRangeField())
        both = Q(**{f"{start}__isnull": False, f"{end}__isnull": False})
        super().__init__(Case(When(both, then=span)), output_field=FloatField())


def _latency(field: str, *percents: int) -> dict[str, Aggregate]:
    """Latencies count succeeded requests only: a request that fails at once is not a fast one."""
    return {
        f"{field}_p{percent}": Percentile(F(f"{field}_seconds"), fraction=percent / 100, filter=SUCCEEDED)
        for percent in percents
    }


def summary_aggregates() -> dict[str, Aggregate]:
    """Everything that a summary is reckoned from, in one pass over the requests and their usage rows."""
    return {
        **{f"status_{status}": Count("pk", filter=Q(status=status)) for status in Status.values},
        "finished": Count("pk", filter=FINISHED),
        "assessed": Count("pk", filter=SUCCEEDED & Q(valid__isnull=False)),
        "valid_count": Count("pk", filter=SUCCEEDED & Q(valid=True)),
        "refused_count": Count("pk", filter=SUCCEEDED & Q(refused=True)),
        "truncated_count": Count("pk", filter=SUCCEEDED & Q(truncated=True)),
        "with_deadline": Count("pk", filter=NOT_STOPPED & Q(batch__isnull=False)),
        "within_deadline": Count("pk", filter=SUCCEEDED & Q(finished_at__lte=F("batch__expires_at"))),
        "sum_prompt_tokens": Sum("prompt_tokens", filter=FINISHED),
        "sum_output_tokens": Sum("output_tokens", filter=FINISHED),
        "first_started_at": Min("started_at"),
        "last_finished_at": Max("finished_at", filter=Q(started_at__isnull=False)),
        "active": ActiveSeconds("started_at", "finished_at"),
        **_latency("ttft", 50, 95, 99),
        **_latency("duration", 50, 95, 99),
        **_latency("queued", 50, 95),
        "used": Count("usage"),
        "measured_count": Count("usage", filter=Q(usage__energy_source="measured", usage__compute_seconds__gt=0)),
        "estimated_count": Count("usage", filter=Q(usage__energy_source="estimated", usage__compute_seconds__gt=0)),
        "sum_compute_seconds": Sum("usage__compute_seconds"),
        "sum_energy_kwh": Sum("usage__energy_kwh"),
        "sum_carbon_kg": Sum(
            F("usage__energy_kwh") * F("usage__rate_card__carbon_kg_per_kwh"),
            output_field=DecimalField(max_digits=30, decimal_places=16),
        ),
    }

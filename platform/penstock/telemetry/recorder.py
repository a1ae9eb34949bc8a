"""Writes what each finished request used and cost, in the transaction that records its result."""

from collections.abc import Sequence
from decimal import Decimal

from penstock.serving.models import Request
from penstock.telemetry.energy import PowerMeter, power_meter
from penstock.telemetry.models import RateCard, Usage
from penstock.telemetry.rates import current_rate_card, energy_kwh, host_cost_per_second

COST_DIGITS = Decimal("1e-10")
ENERGY_DIGITS = Decimal("1e-12")
ROWS_PER_INSERT = 1000


def record_usage(requests: Sequence[Request], *, meter: PowerMeter | None = None) -> None:
    """Writes one usage row for each of `requests`, all just finished; call within their transaction.

    A request's `compute_seconds` is its share of the host's busy seconds, so the costs of all rows add up to the cost
    of the busy time, and energy to that of the busy time. Failed and cancelled requests cost what they used; one that
    never ran cost nothing. A second row for a request violates the primary key and raises `IntegrityError`: the
    flush that tried to write a result twice must not succeed. `meter` is this host's own unless given.
    """
    if not requests:
        return
    card = current_rate_card()
    measured = _measured_watts(requests, meter)
    per_second = host_cost_per_second(card)
    Usage.objects.bulk_create(
        [
            _usage(
                request, card=card, cost_per_second=per_second, measured_watts=measured if _ran_here(request) else None
            )
            for request in requests
        ],
        batch_size=ROWS_PER_INSERT,
    )


def _usage(request: Request, *, card: RateCard, cost_per_second: Decimal, measured_watts: Decimal | None) -> Usage:
    assert request.finished_at is not None, "only finished requests have a usage"
    # Through the shortest decimal form: the very number that the row shows, not its binary neighbour.
    seconds = Decimal(repr(request.compute_seconds or 0.0))
    watts = card.power_watts if measured_watts is None else measured_watts
    return Usage(
        request=request,
        batch_id=request.batch_id,
        team_id=request.team_id,
        task_id=request.task_id,
        model_release_id=request.model_release_id,
        finished_at=request.finished_at,
        prompt_tokens=request.prompt_tokens or 0,
        output_tokens=request.output_tokens or 0,
        compute_seconds=request.compute_seconds or 0.0,
        cost=(cost_per_second * seconds).quantize(COST_DIGITS),
        currency=card.currency,
        energy_kwh=energy_kwh(watts=watts, seconds=seconds).quantize(ENERGY_DIGITS),
        energy_source=Usage.EnergySource.ESTIMATED if measured_watts is None else Usage.EnergySource.MEASURED,
        rate_card=card,
    )


def _ran_here(request: Request) -> bool:
    """A shard's results are written by the worker that computed them. Those of single requests are written by the web
    process, which may run on another machine, whose power says nothing about theirs."""
    return request.shard_id is not None and bool(request.compute_seconds)


def _measured_watts(requests: Sequence[Request], meter: PowerMeter | None) -> Decimal | None:
    """Mean power over the spell in which those of `requests` ran that ran here, where this host measures it."""
    spans = [
        (request.started_at, request.finished_at)
        for request in requests
        if _ran_here(request) and request.started_at and request.finished_at
    ]
    if not spans:
        return None
    return (meter or power_meter()).mean_watts(min(start for start, _ in spans), max(end for _, end in spans))

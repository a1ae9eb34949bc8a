"""The two ways of running the same items, each with its figures: from rows to sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from penstock.pilots import arithmetic
from penstock.pilots.models import BaselineItem, BaselineRun, Pilot
from penstock.serving.models import Batch, Request
from penstock.telemetry.models import RateCard
from penstock.telemetry.rates import energy_kwh, host_cost_per_second


@dataclass(frozen=True, slots=True)
class ItemFigures:
    """One item, one way. `seconds` is its own time in the baseline, its share of the busy time in the trial."""

    custom_id: str
    delivered: bool
    prompt_tokens: int
    output_tokens: int
    seconds: float
    valid: bool | None
    output_text: str


@dataclass(frozen=True, slots=True)
class Way:
    """Figures of one way. Items that failed count in `items` and in the time, and nowhere else. Costs are in the
    currency of the pilot's rate card; None where there is nothing to reckon from."""

    items: int
    delivered: int
    prompt_tokens: int
    output_tokens: int
    seconds: Decimal
    items_per_second: float | None
    output_tokens_per_second: float | None
    seconds_per_item: Decimal | None
    assessed: int
    valid: int
    valid_rate: float | None
    valid_rate_low: float | None
    valid_rate_high: float | None
    cost_total: Decimal
    cost_per_item: Decimal | None
    cost_per_valid_item: Decimal | None
    cost_per_1k_output_tokens: Decimal | None
    machine_hours_per_month: Decimal | None
    hosts_needed: int | None
    energy_kwh_per_1k_items: Decimal | None
    carbon_kg_per_1k_items: Decimal | None


def way(items: Sequence[ItemFigures], seconds: Decimal, *, card: RateCard, items_per_month: int) -> Way:
    """The figures of `items` that took `seconds` of the host together."""
    delivered = [item for item in items if item.delivered]
    count = len(delivered)
    output_tokens = sum(item.output_tokens for item in delivered)
    assessed = sum(item.valid is not None for item in delivered)
    valid = sum(item.valid is True for item in delivered)
    interval = arithmetic.wilson(valid, assessed)
    cost = host_cost_per_second(card) * seconds
    per_item = seconds / count if count else None
    hours = None if per_item is None else arithmetic.machine_hours(items_per_month, per_item)
    energy = energy_kwh(watts=card.power_watts, seconds=seconds)
    return Way(
        items=len(items),
        delivered=count,
        prompt_tokens=sum(item.prompt_tokens for item in delivered),
        output_tokens=output_tokens,
        seconds=seconds,
        items_per_second=float(count / seconds) if seconds else None,
        output_tokens_per_second=float(output_tokens / seconds) if seconds else None,
        seconds_per_item=per_item,
        assessed=assessed,
        valid=valid,
        valid_rate=valid / assessed if assessed else None,
        valid_rate_low=interval.low if interval else None,
        valid_rate_high=interval.high if interval else None,
        cost_total=cost,
        cost_per_item=_each(cost, count),
        cost_per_valid_item=_each(cost, valid),
        cost_per_1k_output_tokens=_each(cost * 1000, output_tokens),
        machine_hours_per_month=hours,
        hosts_needed=None if hours is None else arithmetic.hosts_needed(hours),
        energy_kwh_per_1k_items=_each(energy * 1000, count),
        carbon_kg_per_1k_items=_each(energy * 1000 * card.carbon_kg_per_kwh, count),
    )


def baseline_items(run: BaselineRun) -> list[ItemFigures]:
    return [
        ItemFigures(
            custom_id=item.custom_id,
            delivered=True,
            prompt_tokens=item.prompt_tokens,
            output_tokens=item.output_tokens,
            seconds=item.duration_seconds,
            valid=item.valid,
            output_text=item.output_text,
        )
        for item in BaselineItem.objects.filter(run=run).order_by("pk")
    ]


def baseline_seconds(items: Sequence[ItemFigures]) -> Decimal:
    """One after the other: the sum of the items' durations."""
    return sum((arithmetic.seconds(item.seconds) for item in items), Decimal(0))


def trial_requests(batch: Batch) -> list[Request]:
    return list(batch.requests.order_by("line"))


def trial_items(requests: Sequence[Request]) -> list[ItemFigures]:
    return [
        ItemFigures(
            custom_id=request.custom_id,
            delivered=request.status == Request.Status.SUCCEEDED,
            prompt_tokens=request.prompt_tokens or 0,
            output_tokens=request.output_tokens or 0,
            seconds=request.compute_seconds or 0.0,
            valid=request.valid,
            output_text=request.output_text,
        )
        for request in requests
    ]


def trial_seconds(requests: Sequence[Request]) -> Decimal | None:
    """All together: from the first request's start to the last one's end. None where none ran."""
    starts = [request.started_at for request in requests if request.started_at and request.finished_at]
    ends = [request.finished_at for request in requests if request.started_at and request.finished_at]
    return arithmetic.seconds((max(ends) - min(starts)).total_seconds()) if starts else None


def pairs(baseline: Sequence[ItemFigures], trial: Sequence[ItemFigures]) -> list[arithmetic.Pair]:
    """The items that both ways have, in the order of the baseline."""
    by_id = {item.custom_id: item for item in trial}
    return [
        arithmetic.Pair(
            baseline_seconds=before.seconds,
            trial_share=after.seconds,
            baseline_tokens=before.output_tokens,
            trial_tokens=after.output_tokens if after.delivered else 0,
            delivered=after.delivered,
        )
        for before in baseline
        if (after := by_id.get(before.custom_id)) is not None
    ]


def identical_outputs(baseline: Sequence[ItemFigures], trial: Sequence[ItemFigures]) -> int:
    texts = {item.custom_id: item.output_text for item in trial if item.delivered}
    return sum(texts.get(item.custom_id) == item.output_text for item in baseline)


def complete_trial(pilot: Pilot) -> Batch | None:
    batch = pilot.trial_batch
    return batch if batch is not None and batch.status == Batch.Status.COMPLETED else None


def _each(amount: Decimal, count: int) -> Decimal | None:
    return amount / count if count else None

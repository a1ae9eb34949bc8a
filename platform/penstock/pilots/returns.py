"""What a pilot returned: both ways measured, compared, and turned into money over a rate card.

Every figure leads back to rows: the items of the measured baseline run and the requests of the trial batch. What they
mean is told in `how`, in the language in force; `remarks` says what a reader must know before using any of it.
"""

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from penstock.pilots import arithmetic, ways, wording
from penstock.pilots.measuring import work_meanwhile
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.selectors import measured_run
from penstock.pilots.sensitivity import Case, SensitivityRow, sensitivity
from penstock.pilots.ways import ItemFigures, Way
from penstock.serving.models import EngineHost, Request


@dataclass(frozen=True, slots=True)
class Quality:
    """Valid rates compared. `difference` is the trial's less the baseline's, as a share; `verdict` one of
    `non_inferior`, `inferior`, `undecided`, `not_assessed`."""

    difference: float | None
    low: float | None
    high: float | None
    margin: float
    verdict: str
    remark: str


@dataclass(frozen=True, slots=True)
class Returns:
    """Figures of a pilot; None where a way is not measured yet, or where there is nothing to reckon from.

    Money is in `currency`, shares lie between 0 and 1, intervals have the confidence `confidence`.
    """

    complete: bool
    currency: str
    sample_items: int
    items_per_month: int
    confidence: float

    baseline: Way | None
    trial: Way | None
    paired_items: int
    identical_outputs: int | None

    throughput_multiple: float | None
    throughput_multiple_low: float | None
    throughput_multiple_high: float | None
    token_throughput_multiple: float | None
    token_throughput_multiple_low: float | None
    token_throughput_multiple_high: float | None

    saving_per_item: Decimal | None
    saving_per_month: Decimal | None
    power_saving_per_month: Decimal | None
    hardware_saving_per_month: Decimal | None
    introduction_cost: Decimal
    payback_months: Decimal | None
    payback_remark: str
    discount_rate: Decimal
    npv_12_months: Decimal | None
    npv_36_months: Decimal | None

    quality: Quality | None
    sensitivity: tuple[SensitivityRow, ...]

    baseline_disturbed_by: int | None
    trial_disturbed_by: int | None
    how: Mapping[str, str]
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values: amounts as text."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def returns(pilot: Pilot) -> Returns:
    """The figures of `pilot` as its rows stand now, with its texts in the language in force."""
    run, batch, card = measured_run(pilot), ways.complete_trial(pilot), pilot.rate_card
    before = ways.baseline_items(run) if run else []
    requests = ways.trial_requests(batch) if batch else []
    after = ways.trial_items(requests)
    trial_seconds = ways.trial_seconds(requests)

    baseline = trial = None
    if run:
        spent = ways.baseline_seconds(before)
        baseline = ways.way(before, spent, card=card, items_per_month=pilot.items_per_month)
    if trial_seconds is not None:
        trial = ways.way(after, trial_seconds, card=card, items_per_month=pilot.items_per_month)

    pairs = ways.pairs(before, after)
    by_items, by_tokens = (
        arithmetic.multiple_intervals(pairs, float(trial_seconds))
        if trial_seconds is not None and len(pairs) == len(before) == len(after)
        else (None, None)
    )
    case = _case(pilot, baseline, trial)
    quality = _quality(baseline, trial) if baseline and trial else None
    baseline_disturbed_by = _disturbed_by(run)
    trial_disturbed_by = _trial_disturbed_by(requests) if trial else None
    return Returns(
        complete=case is not None,
        currency=card.currency,
        sample_items=pilot.sample_items,
        items_per_month=pilot.items_per_month,
        confidence=arithmetic.CONFIDENCE,
        baseline=baseline,
        trial=trial,
        paired_items=len(pairs),
        identical_outputs=ways.identical_outputs(before, after) if baseline and trial else None,
        throughput_multiple=_ratio(trial, baseline, "items_per_second"),
        throughput_multiple_low=by_items.low if by_items else None,
        throughput_multiple_high=by_items.high if by_items else None,
        token_throughput_multiple=_ratio(trial, baseline, "output_tokens_per_second"),
        token_throughput_multiple_low=by_tokens.low if by_tokens else None,
        token_throughput_multiple_high=by_tokens.high if by_tokens else None,
        saving_per_item=_saving_per_item(baseline, trial),
        saving_per_month=case.saving_per_month if case else None,
        power_saving_per_month=case.power_saving_per_month if case else None,
        hardware_saving_per_month=case.hardware_saving_per_month if case else None,
        introduction_cost=pilot.introduction_cost,
        payback_months=arithmetic.payback_months(pilot.introduction_cost, case.saving_per_month) if case else None,
        payback_remark=wording.payback_remark(case),
        discount_rate=pilot.discount_rate,
        npv_12_months=case.npv(12) if case else None,
        npv_36_months=case.npv(36) if case else None,
        quality=quality,
        sensitivity=tuple(sensitivity(case, by_items)) if case else (),
        baseline_disturbed_by=baseline_disturbed_by,
        trial_disturbed_by=trial_disturbed_by,
        how=wording.how(pilot, run, pairs=len(pairs)),
        remarks=tuple(
            wording.remarks(
                pilot,
                baseline=baseline,
                trial=trial,
                baseline_disturbed_by=baseline_disturbed_by,
                trial_disturbed_by=trial_disturbed_by,
                hosts=EngineHost.objects.count(),
                interruptions=int(run.method.get("interruptions", 0)) if run else 0,
            )
        ),
    )


def _case(pilot: Pilot, baseline: Way | None, trial: Way | None) -> Case | None:
    if baseline is None or trial is None:
        return None
    if baseline.seconds_per_item is None or trial.seconds_per_item is None:
        return None
    return Case(
        card=pilot.rate_card,
        items_per_month=pilot.items_per_month,
        introduction_cost=pilot.introduction_cost,
        discount_rate=pilot.discount_rate,
        baseline_seconds_per_item=baseline.seconds_per_item,
        trial_seconds_per_item=trial.seconds_per_item,
    )


def _quality(baseline: Way, trial: Way) -> Quality:
    interval = arithmetic.difference_interval(trial.valid, trial.assessed, baseline.valid, baseline.assessed)
    if interval is None or trial.valid_rate is None or baseline.valid_rate is None:
        verdict, difference = "not_assessed", None
    else:
        difference = trial.valid_rate - baseline.valid_rate
        if interval.low > -arithmetic.MARGIN:
            verdict = "non_inferior"
        elif interval.high < -arithmetic.MARGIN:
            verdict = "inferior"
        else:
            verdict = "undecided"
    return Quality(
        difference=difference,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        margin=arithmetic.MARGIN,
        verdict=verdict,
        remark=wording.quality_remark(verdict, arithmetic.MARGIN),
    )


def _ratio(trial: Way | None, baseline: Way | None, rate: str) -> float | None:
    after, before = (getattr(one, rate) if one else None for one in (trial, baseline))
    return after / before if after is not None and before else None


def _saving_per_item(baseline: Way | None, trial: Way | None) -> Decimal | None:
    if baseline is None or trial is None or baseline.cost_per_item is None or trial.cost_per_item is None:
        return None
    return baseline.cost_per_item - trial.cost_per_item


def _disturbed_by(run: BaselineRun | None) -> int | None:
    return None if run is None else int(run.method.get("work_meanwhile", 0))


def _trial_disturbed_by(requests: Sequence[Request]) -> int:
    spans = [(request.started_at, request.finished_at) for request in requests]
    known = [(start, end) for start, end in spans if start is not None and end is not None]
    whole = (min(start for start, _ in known), max(end for _, end in known))
    return work_meanwhile([whole], besides_batch=requests[0].batch_id)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, dt.datetime | dt.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


__all__ = ["ItemFigures", "Quality", "Returns", "SensitivityRow", "Way", "returns"]

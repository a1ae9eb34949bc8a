"""Group rates, ratios and verdicts; scipy and fairlearn compute.

Rates carry Wilson intervals (Wilson 1927; `scipy.stats.binomtest`). Ratios of favourable rates carry Katz's log
interval (Katz et al. 1978; `scipy.stats.contingency.relative_risk`). Verdicts compare the ratio itself with the
threshold, as screening does, and say whether its interval would allow the other verdict. Overlapping intervals are
never taken as a sign of equality. No correction is made for the number of groups.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from scipy.stats import binomtest
from scipy.stats.contingency import relative_risk

from governance.fairness.outcomes import (
    FairnessReport,
    Favourable,
    GroupResult,
    Interval,
    OutcomeRow,
    Rate,
    Reason,
    Thresholds,
    Verdict,
)


def group_report(
    rows: Sequence[OutcomeRow], thresholds: Thresholds | None = None, favourable: Favourable | None = None
) -> FairnessReport:
    """Compare the groups that the rows name with the best-served one of those that are large enough.

    The compared outcome, unless `favourable` names one, is `Favourable.VALID` where any row's output was checked and
    `Favourable.SERVED` otherwise.
    """
    limits = thresholds or Thresholds()
    named: dict[str, list[OutcomeRow]] = {}
    for row in rows:
        if row.group:
            named.setdefault(row.group, []).append(row)
    if favourable is None:
        favourable = Favourable.VALID if any(row.valid is not None for row in rows if row.group) else Favourable.SERVED
    outcomes = {
        group: [outcome for row in named[group] if (outcome := _favourable(row, favourable)) is not None]
        for group in sorted(named)
    }
    rates = {group: wilson(sum(found), len(found), limits.confidence) for group, found in outcomes.items()}
    reference = _reference(rates, limits)
    ratios = _ratios(outcomes, reference)
    cheapest = min((_mean_cost(group_rows) for group_rows in named.values()), default=Decimal(0))
    return FairnessReport(
        thresholds=limits,
        favourable=favourable,
        reference=reference,
        groups=tuple(
            _group_result(group, named[group], rates, _judge(group, rates, reference, ratios, limits), cheapest, limits)
            for group in rates
        ),
        count=len(rows),
        without_group=sum(1 for row in rows if not row.group),
    )


def wilson(events: int, count: int, confidence: float = 0.95) -> Rate:
    """A rate with its Wilson score interval (without continuity correction)."""
    if count == 0:
        return Rate(events=events, count=count, rate=None, interval=None)
    interval = binomtest(events, count).proportion_ci(confidence_level=confidence, method="wilson")
    return Rate(
        events=events,
        count=count,
        rate=events / count,
        interval=Interval(low=float(interval.low), high=float(interval.high)),
    )


def ratio_interval(group: Rate, reference: Rate, confidence: float = 0.95) -> Interval | None:
    """Katz's log interval of the ratio of two rates; None where it is not defined (no event in one of them)."""
    if not group.events or not reference.events:
        return None
    interval = relative_risk(group.events, group.count, reference.events, reference.count).confidence_interval(
        confidence_level=confidence
    )
    return Interval(low=float(interval.low), high=float(interval.high))


@dataclass(frozen=True, slots=True)
class _Judgement:
    ratio: float | None
    interval: Interval | None
    verdict: Verdict
    reason: Reason
    straddles: bool


def _favourable(row: OutcomeRow, outcome: Favourable) -> bool | None:
    match outcome:
        case Favourable.SERVED:
            return row.served
        case Favourable.SUCCEEDED:
            return not row.error
        case Favourable.NOT_TRUNCATED:
            return not row.error and not row.truncated
        case Favourable.NOT_REFUSED:
            return False if row.error else None if row.refused is None else not row.refused
        case Favourable.VALID:
            return False if row.error else row.valid


def _reference(rates: Mapping[str, Rate], limits: Thresholds) -> str | None:
    """The group with the highest rate among those large enough to be relied on, the larger one of two equals."""
    candidates = [group for group, rate in rates.items() if rate.count >= limits.min_count]
    if not candidates:
        return None
    return max(candidates, key=lambda group: (rates[group].rate or 0.0, rates[group].count))


def _ratios(outcomes: Mapping[str, Sequence[bool]], reference: str | None) -> dict[str, float]:
    """Each group's favourable rate over the reference's; empty where there is no rate to divide by."""
    if reference is None or not any(outcomes[reference]):
        return {}
    # fairlearn brings scikit-learn along: imported here so that a process that shows no fairness never loads it.
    from fairlearn.metrics import MetricFrame, selection_rate

    labels = [group for group, found in outcomes.items() for _ in found]
    flat = [int(outcome) for found in outcomes.values() for outcome in found]
    frame = MetricFrame(metrics=selection_rate, y_true=flat, y_pred=flat, sensitive_features=labels)
    by_group = frame.by_group
    return {str(group): float(rate) / float(by_group[reference]) for group, rate in by_group.items()}


def _judge(
    group: str,
    rates: Mapping[str, Rate],
    reference: str | None,
    ratios: Mapping[str, float],
    limits: Thresholds,
) -> _Judgement:
    rate = rates[group]
    if rate.count < limits.min_count or reference is None:
        return _insufficient(Reason.FEW_REQUESTS, ratios.get(group))
    best = rates[reference]
    if not best.events:
        return _insufficient(Reason.NO_FAVOURABLE, None)
    if group == reference:
        if all(other.count < limits.min_count for name, other in rates.items() if name != group):
            return _insufficient(Reason.ONE_GROUP, 1.0)
        return _Judgement(1.0, None, Verdict.PASS, Reason.REFERENCE, straddles=False)
    interval = ratio_interval(rate, best, limits.confidence)
    # Fractions: 20 of 30 against 25 of 30 is exactly 0.8, and 0.7999999999999999 in floats.
    expected_events = Fraction(rate.count * best.events, best.count)
    if expected_events < limits.min_events:
        return _insufficient(Reason.FEW_EVENTS, ratios[group], interval)
    threshold = Fraction(limits.min_ratio)
    passes = Fraction(rate.events * best.count, rate.count * best.events) >= threshold
    return _Judgement(
        ratio=ratios[group],
        interval=interval,
        verdict=Verdict.PASS if passes else Verdict.FAIL,
        reason=Reason.ABOVE if passes else Reason.BELOW,
        straddles=interval is not None and interval.low < threshold <= interval.high,
    )


def _insufficient(reason: Reason, ratio: float | None, interval: Interval | None = None) -> _Judgement:
    return _Judgement(ratio, interval, Verdict.INSUFFICIENT, reason, straddles=False)


def _mean_cost(rows: Sequence[OutcomeRow]) -> Decimal:
    return sum((row.cost for row in rows), Decimal(0)) / len(rows)


def _group_result(
    group: str,
    rows: Sequence[OutcomeRow],
    rates: Mapping[str, Rate],
    judgement: _Judgement,
    cheapest: Decimal,
    limits: Thresholds,
) -> GroupResult:
    def rate(values: Sequence[bool | None]) -> Rate:
        known = [value for value in values if value is not None]
        return wilson(sum(known), len(known), limits.confidence)

    first_tokens = [row.ttft_seconds for row in rows if row.ttft_seconds is not None]
    cost = _mean_cost(rows)
    return GroupResult(
        group=group,
        count=len(rows),
        favourable=rates[group],
        valid=rate([row.valid for row in rows]),
        refused=rate([row.refused for row in rows]),
        truncated=rate([row.truncated for row in rows]),
        error=rate([row.error for row in rows]),
        ttft_mean_seconds=statistics.fmean(first_tokens) if first_tokens else None,
        ttft_p50_seconds=statistics.median(first_tokens) if first_tokens else None,
        prompt_tokens_per_item=statistics.fmean(row.prompt_tokens for row in rows),
        output_tokens_per_item=statistics.fmean(row.output_tokens for row in rows),
        cost_per_item=cost,
        cost_multiple=float(cost / cheapest) if cheapest else None,
        ratio=judgement.ratio,
        ratio_interval=judgement.interval,
        verdict=judgement.verdict,
        reason=judgement.reason,
        straddles_threshold=judgement.straddles,
    )

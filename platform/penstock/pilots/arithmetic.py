"""The sums behind a return: pure functions, money in Decimal. Formulas stand beside their sources."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from scipy.stats import binomtest

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 20_260_101
"""Fixed, so that the same measurements give the same interval."""

HOURS_PER_MONTH = Decimal("730.5")
"""365.25 / 12 days of 24 hours."""

MARGIN = 0.10
"""A trial is non-inferior if its valid rate lies at most this far below the baseline's (ten percentage points)."""


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Pair:
    """One item both ways. `trial_share` is its share of the trial's busy time, in any unit; `delivered` says whether
    the trial gave an output."""

    baseline_seconds: float
    trial_share: float
    baseline_tokens: int
    trial_tokens: int
    delivered: bool = True


def seconds(value: float) -> Decimal:
    """The very number that a row shows, not its binary neighbour."""
    return Decimal(repr(value))


def multiple_intervals(pairs: Sequence[Pair], trial_seconds: float) -> tuple[Interval | None, Interval | None]:
    """Percentile bootstrap intervals of the throughput multiple, by items and by output tokens.

    Items are drawn with replacement, each with both its times (Efron and Tibshirani, An Introduction to the Bootstrap,
    1993, sections 8 and 13.3). A drawn set's baseline time is the sum of its items' times; its trial time is the
    trial's wall time in proportion to the items' shares of busy time. So the interval tells how far the multiple
    depends on which items were taken; it does not tell how far a second run would differ. None for fewer than two
    items, or where nothing was busy.
    """
    shares = np.array([pair.trial_share for pair in pairs])
    if len(pairs) < 2 or trial_seconds <= 0 or shares.sum() <= 0:
        return None, None
    draws = np.random.default_rng(SEED).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    baseline = np.array([pair.baseline_seconds for pair in pairs])[draws].sum(axis=1)
    trial = trial_seconds * shares[draws].sum(axis=1) / shares.sum()
    possible = (baseline > 0) & (trial > 0)

    def interval(baseline_amounts: list[float], trial_amounts: list[float]) -> Interval | None:
        before = np.array(baseline_amounts)[draws].sum(axis=1)
        after = np.array(trial_amounts)[draws].sum(axis=1)
        usable = possible & (before > 0)
        if not usable.all():
            return None
        multiples = (after / trial) / (before / baseline)
        low, high = np.percentile(multiples, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
        return Interval(float(low), float(high))

    return (
        interval([1.0] * len(pairs), [float(pair.delivered) for pair in pairs]),
        interval([float(pair.baseline_tokens) for pair in pairs], [float(pair.trial_tokens) for pair in pairs]),
    )


def wilson(events: int, count: int) -> Interval | None:
    """Wilson's score interval of a rate (Wilson 1927); None where nothing was counted."""
    if count == 0:
        return None
    found = binomtest(events, count).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return Interval(float(found.low), float(found.high))


def difference_interval(events: int, count: int, base_events: int, base_count: int) -> Interval | None:
    """Interval of `events/count - base_events/base_count`: Newcombe's hybrid score interval (Statistics in Medicine 17,
    1998, pages 873 to 890, method 10), for independent rates. The same items ran both ways, which makes it a little
    wider than need be, never narrower, as long as an item that does well one way tends to do well the other way.
    """
    rate, base = wilson(events, count), wilson(base_events, base_count)
    if rate is None or base is None:
        return None
    p, q = events / count, base_events / base_count
    return Interval(
        low=p - q - math.hypot(p - rate.low, base.high - q),
        high=p - q + math.hypot(rate.high - p, q - base.low),
    )


def payback_months(introduction_cost: Decimal, saving_per_month: Decimal) -> Decimal | None:
    """Months until savings have paid the introduction; None where nothing is saved."""
    return introduction_cost / saving_per_month if saving_per_month > 0 else None


def net_present_value(
    introduction_cost: Decimal, saving_per_month: Decimal, *, months: int, discount_rate: Decimal
) -> Decimal:
    """Savings at the end of each month, discounted to the start, less the introduction.

    The month's factor is the twelfth root of the year's: `(1 + rate) ** (1/12)`.
    """
    factor = (1 + discount_rate) ** (Decimal(1) / 12)
    return sum((saving_per_month / factor**month for month in range(1, months + 1)), -introduction_cost)


def machine_hours(items: int, seconds_per_item: Decimal) -> Decimal:
    return items * seconds_per_item / 3600


def hosts_needed(hours_per_month: Decimal) -> int:
    """Hosts that run day and night."""
    return max(1, math.ceil(hours_per_month / HOURS_PER_MONTH))

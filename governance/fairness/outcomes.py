"""What goes into a fairness report, and what comes out of it."""

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """One finished request of one group.

    `valid` and `refused` are None where they were not checked (no output contract, or the request failed).
    `ttft_seconds` is None where no token came. Requests that their owner cancelled do not belong here.
    """

    group: str
    valid: bool | None
    refused: bool | None
    truncated: bool
    error: bool
    ttft_seconds: float | None
    output_tokens: int
    prompt_tokens: int
    cost: Decimal

    @property
    def served(self) -> bool:
        return not self.error and not self.refused


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The organization's screening policy; none of these numbers is a legal limit.

    `min_ratio`: the least acceptable ratio to the best-served group. 0.80 is a common screening default; outside
    employment law in the United States the four-fifths rule has no standing.
    `min_count`: requests that a group needs before it is judged.
    `min_events`: favourable outcomes that a group of this size would be expected to have at the best group's rate;
    with fewer, chance alone could make the ratio. (An expected count, so that a group with none at all is judged.)
    `confidence`: of all intervals.
    """

    min_ratio: Decimal = Decimal("0.80")
    min_count: int = 30
    min_events: int = 5
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.min_ratio <= 1:
            raise ValueError(f"min_ratio must be above 0 and at most 1, got {self.min_ratio}")
        if self.min_count < 1:
            raise ValueError(f"min_count must be at least 1, got {self.min_count}")
        if self.min_events < 0:
            raise ValueError(f"min_events must not be negative, got {self.min_events}")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {self.confidence}")


class Favourable(StrEnum):
    """The outcome that is compared between groups."""

    VALID = "valid"
    """The output kept the task's output contract; an error counts against it, an unchecked output not at all."""
    SERVED = "served"
    """An output came, without error or refusal: used where no output of the rows was checked."""
    NOT_REFUSED = "not_refused"
    """An output that is no refusal; an error counts against it, an unchecked output not at all."""
    NOT_TRUNCATED = "not_truncated"
    """An output that was not cut off at the token limit; an error counts against it."""
    SUCCEEDED = "succeeded"
    """Any output."""


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INSUFFICIENT = "insufficient_data"


class Reason(StrEnum):
    """Why a group has its verdict."""

    REFERENCE = "reference"
    ABOVE = "ratio_at_or_above_threshold"
    BELOW = "ratio_below_threshold"
    FEW_REQUESTS = "too_few_requests"
    FEW_EVENTS = "too_few_expected_events"
    ONE_GROUP = "only_one_group_to_compare"
    NO_FAVOURABLE = "no_favourable_outcome_in_any_group"


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rate:
    """`events` of `count`; rate and Wilson interval are None where `count` is 0."""

    events: int
    count: int
    rate: float | None
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class GroupResult:
    """One group's service. Means are per request of the group; `ttft_*` over the requests that had a first token."""

    group: str
    count: int
    favourable: Rate
    valid: Rate
    refused: Rate
    truncated: Rate
    error: Rate
    ttft_mean_seconds: float | None
    ttft_p50_seconds: float | None
    prompt_tokens_per_item: float
    output_tokens_per_item: float
    cost_per_item: Decimal
    cost_multiple: float | None
    """Cost per item in multiples of the cheapest group's; None where that costs nothing."""
    ratio: float | None
    """Favourable rate over the reference group's."""
    ratio_interval: Interval | None
    """Katz's log interval; None for the reference itself, and where either group has no favourable outcome."""
    verdict: Verdict
    reason: Reason
    straddles_threshold: bool
    """The ratio's interval holds values on both sides of the threshold: the verdict could turn with more data."""


@dataclass(frozen=True, slots=True)
class FairnessReport:
    """All groups by name. `without_group` rows named no group; they are counted, and not judged."""

    thresholds: Thresholds
    favourable: Favourable
    reference: str | None
    groups: tuple[GroupResult, ...]
    count: int
    without_group: int

    @property
    def failing(self) -> tuple[GroupResult, ...]:
        return tuple(group for group in self.groups if group.verdict is Verdict.FAIL)

    @property
    def insufficient(self) -> tuple[GroupResult, ...]:
        return tuple(group for group in self.groups if group.verdict is Verdict.INSUFFICIENT)

    @property
    def lowest_ratio(self) -> float | None:
        """The lowest ratio among the groups that could be judged; None with fewer than two."""
        ratios = [
            group.ratio
            for group in self.groups
            if group.verdict is not Verdict.INSUFFICIENT
            and group.reason is not Reason.REFERENCE
            and group.ratio is not None
        ]
        return min(ratios, default=None)

    def group(self, name: str) -> GroupResult:
        """The result of a group; KeyError if no row named it."""
        for group in self.groups:
            if group.group == name:
                return group
        raise KeyError(name)

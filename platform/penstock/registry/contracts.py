"""What may stand in a task's JSON columns: objectives and the fairness plan.

Everything that enters is checked by these models, and what they dump is what is stored.
"""

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, Self, TypeVar

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from pydantic import ValidationError as PydanticValidationError

from penstock.registry.output_contract import OutputContract

Metric = Literal[
    "ttft_p95_seconds",
    "duration_p95_seconds",
    "deadline_met_rate",
    "error_rate",
    "valid_rate",
    "output_tokens_per_second",
    "cost_per_1k_output_tokens",
]

# The unit of each metric; a cost's unit is the currency's ISO 4217 code.
UNITS: Mapping[Metric, str] = {
    "ttft_p95_seconds": "s",
    "duration_p95_seconds": "s",
    "deadline_met_rate": "ratio",
    "error_rate": "ratio",
    "valid_rate": "ratio",
    "output_tokens_per_second": "tokens/s",
    "cost_per_1k_output_tokens": "",
}
MORE_IS_BETTER: frozenset[Metric] = frozenset({"deadline_met_rate", "valid_rate", "output_tokens_per_second"})


class Objective(BaseModel):
    """A target for a task. `unit` may be left out, but for a cost, whose unit is its currency."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: Metric
    target: Decimal = Field(ge=0, max_digits=18, decimal_places=8)
    unit: str = ""

    @model_validator(mode="before")
    @classmethod
    def _unit_of_the_metric(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and not data.get("unit") and data.get("metric") in UNITS:
            return {**data, "unit": UNITS[data["metric"]]}
        return data

    @model_validator(mode="after")
    def _unit_fits(self) -> Self:
        expected = UNITS[self.metric]
        if expected and self.unit != expected:
            raise ValueError(
                _("The unit of %(metric)s is “%(right)s”, not “%(given)s”.")
                % {"metric": self.metric, "right": expected, "given": self.unit}
            )
        if not expected and not (len(self.unit) == 3 and self.unit.isascii() and self.unit.isupper()):
            raise ValueError(
                _("The unit of %(metric)s is a currency code of three letters, such as TWD.") % {"metric": self.metric}
            )
        if expected == "ratio" and self.target > 1:
            raise ValueError(_("%(metric)s is a share: 0 to 1, which is 0 to 100 per cent.") % {"metric": self.metric})
        return self

    @property
    def more_is_better(self) -> bool:
        return self.metric in MORE_IS_BETTER

    def is_met_by(self, value: Decimal) -> bool:
        """Whether a value reaches the target; the target itself does."""
        return value >= self.target if self.more_is_better else value <= self.target


class FairnessPlan(BaseModel):
    """How groups are compared: by which metadata key, against which thresholds.

    `min_ratio` 0.80 is the four-fifths rule (29 CFR 1607.4 D). Below `min_count` requests in a group, or `min_events`
    favourable and unfavourable outcomes over all, the verdict is "insufficient data". `confidence` is that of the
    Wilson intervals.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: str = Field(default="language", min_length=1, max_length=64)
    min_ratio: float = Field(default=0.80, gt=0, le=1)
    min_count: int = Field(default=30, ge=1)
    min_events: int = Field(default=5, ge=0)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    favourable: Literal["valid", "not_refused", "not_truncated", "succeeded"] = "valid"


_OBJECTIVES: TypeAdapter[list[Objective]] = TypeAdapter(list[Objective])
T = TypeVar("T")


def parse_objectives(value: Any) -> list[Objective]:
    """Raises Django's ValidationError under `objectives`, each message beginning with the place within the list."""
    objectives = _checked("objectives", lambda: _OBJECTIVES.validate_python(value or []))
    metrics = [objective.metric for objective in objectives]
    for metric in metrics:
        if metrics.count(metric) > 1:
            raise ValidationError({"objectives": _("%(metric)s is given more than once.") % {"metric": metric}})
    return objectives


def parse_fairness_plan(value: Any) -> FairnessPlan:
    """Raises Django's ValidationError under `fairness_plan`. Nothing given means the default thresholds."""
    return _checked("fairness_plan", lambda: FairnessPlan.model_validate(value or {}))


def parse_output_contract(value: Any) -> OutputContract:
    """Raises Django's ValidationError under `output_contract`."""
    return _checked("output_contract", lambda: OutputContract.model_validate(value or {}))


def dump_objectives(objectives: Iterable[Objective]) -> list[dict[str, Any]]:
    """JSON for storage; targets as text, so that no decimal turns into a binary fraction."""
    return [objective.model_dump(mode="json") for objective in objectives]


def _checked(field: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except PydanticValidationError as error:
        messages = []
        for problem in error.errors(include_url=False):
            place = ".".join(str(part) for part in problem["loc"])
            # Our own sentences come as they are; pydantic would put its English "Value error, " before them.
            message = problem["ctx"]["error"] if problem["type"] == "value_error" else problem["msg"]
            messages.append(f"{place}: {message}" if place else str(message))
        raise ValidationError({field: messages}) from error

"""Reads `rules.yaml`: which measurement says something about which control."""

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property, lru_cache
from importlib import resources
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from governance.catalogs.loader import CatalogError, Text, get_catalog

FILE = resources.files("governance.controls") / "rules.yaml"

Unit = Literal["count", "ratio", "seconds", "tokens_per_second", "currency", "kWh", "multiple"]


class RulesError(Exception):
    """The rules cannot be used: says which rule and field, and what would be right."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class MeasurementDefinition(_Strict):
    """A measurement that a source may supply, with the unit that it must have."""

    key: str = Field(pattern=r"^[a-z]+\.[a-z0-9_]+$")
    unit: Unit
    title: Text


class Threshold(_Strict):
    """A limit that a figure is held against: organization policy, not law; `value` is in `unit`."""

    op: Literal["<=", ">="]
    value: Decimal
    unit: Unit

    def holds(self, value: Decimal | float | int) -> bool:
        """Whether a figure keeps to the limit. Floats are compared by their shortest decimal form, so that a rate
        printed as 0.95 is 0.95."""
        figure = value if isinstance(value, Decimal) else Decimal(str(value))
        return figure <= self.value if self.op == "<=" else figure >= self.value


class Rule(_Strict):
    """One measurement as evidence for some controls."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    measurement: str
    controls: dict[str, tuple[str, ...]] = Field(min_length=1)
    freshness_hours: int = Field(gt=0)
    threshold: Threshold | None = None
    shows: Text
    next_question: Text


class Rules(_Strict):
    """All definitions and rules, checked against each other and against the catalogs."""

    measurement_list: tuple[MeasurementDefinition, ...] = Field(alias="measurements")
    rules: tuple[Rule, ...]

    @cached_property
    def measurements(self) -> Mapping[str, MeasurementDefinition]:
        """The definitions by key."""
        return {definition.key: definition for definition in self.measurement_list}

    def for_control(self, catalog_id: str, control_id: str) -> tuple[Rule, ...]:
        """The rules that name a control, in the order of the file."""
        return tuple(rule for rule in self.rules if control_id in rule.controls.get(catalog_id, ()))

    @model_validator(mode="after")
    def _references_hold(self) -> Self:
        for what, ids in (
            ("measurement keys", [definition.key for definition in self.measurement_list]),
            ("rule identifiers", [rule.id for rule in self.rules]),
        ):
            twice = [identifier for identifier, count in Counter(ids).items() if count > 1]
            if twice:
                raise ValueError(f"{what} must be unique; repeated: {', '.join(twice)}")
        for rule in self.rules:
            definition = self.measurements.get(rule.measurement)
            if definition is None:
                raise ValueError(f"rule {rule.id} names an undefined measurement {rule.measurement}")
            if rule.threshold is not None and rule.threshold.unit != definition.unit:
                raise ValueError(
                    f"rule {rule.id}: the threshold's unit must be {definition.unit}, not {rule.threshold.unit}"
                )
            for catalog_id, control_ids in rule.controls.items():
                try:
                    catalog = get_catalog(catalog_id)
                    for control_id in control_ids:
                        catalog.control(control_id)
                except CatalogError as error:
                    raise ValueError(f"rule {rule.id}: {error}") from error
        return self


def parse_rules(raw: bytes) -> Rules:
    """Read rules from the bytes of a YAML file. Raises `RulesError` with the field at fault."""
    try:
        return Rules.model_validate(yaml.safe_load(raw))
    except yaml.YAMLError as error:
        raise RulesError(f"rules.yaml is not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "rules"
        raise RulesError(f"rules.yaml: {where}: {first['msg']}") from error


@lru_cache(maxsize=1)
def load_rules() -> Rules:
    """The rules that ship with Penstock; read once a process."""
    return parse_rules(FILE.read_bytes())

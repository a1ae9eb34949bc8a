"""How far the return depends on each assumption: one moved at a time, the others held."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal

from django.utils.translation import gettext as _

from penstock.pilots import arithmetic
from penstock.telemetry.models import RateCard
from penstock.telemetry.rates import FIELDS, hardware_cost_per_second, host_cost_per_second, power_cost_per_second

HALF = Decimal("0.5")
LEAST_UTILIZATION = Decimal("0.01")


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that the return is reckoned from. Seconds are of the host, per item delivered."""

    card: RateCard
    items_per_month: int
    introduction_cost: Decimal
    discount_rate: Decimal
    baseline_seconds_per_item: Decimal
    trial_seconds_per_item: Decimal

    @property
    def seconds_saved_per_month(self) -> Decimal:
        return (self.baseline_seconds_per_item - self.trial_seconds_per_item) * self.items_per_month

    @property
    def saving_per_month(self) -> Decimal:
        return host_cost_per_second(self.card) * self.seconds_saved_per_month

    @property
    def power_saving_per_month(self) -> Decimal:
        """The part that is electricity: money that is no longer spent."""
        return power_cost_per_second(self.card) * self.seconds_saved_per_month

    @property
    def hardware_saving_per_month(self) -> Decimal:
        """The part that is use of the host: money only where the hours freed are used, or a host is not bought."""
        return hardware_cost_per_second(self.card) * self.seconds_saved_per_month

    def npv(self, months: int) -> Decimal:
        return arithmetic.net_present_value(
            self.introduction_cost, self.saving_per_month, months=months, discount_rate=self.discount_rate
        )


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """What the net present value over twelve months becomes with one assumption at its low, and at its high value."""

    factor: str
    label: str
    unit: str
    low: Decimal
    high: Decimal
    npv_at_low: Decimal
    npv_at_high: Decimal

    @property
    def spread(self) -> Decimal:
        return abs(self.npv_at_high - self.npv_at_low)


def sensitivity(case: Case, multiple: arithmetic.Interval | None) -> list[SensitivityRow]:
    """The rows of a tornado chart, the widest first: each assumption halved and raised by half, and the throughput
    multiple at the ends of its interval."""
    currency = case.card.currency
    rows = [
        _row(
            case,
            "utilization",
            _("Share of hours in use"),
            "",
            max(LEAST_UTILIZATION, case.card.utilization * HALF),
            min(Decimal(1), case.card.utilization * (1 + HALF)),
            lambda value: replace(case, card=_with(case.card, utilization=value)),
        ),
        _around(
            case,
            "electricity_price",
            _("Electricity price"),
            _("%(currency)s/kWh") % {"currency": currency},
            case.card.electricity_price_per_kwh,
            lambda value: replace(case, card=_with(case.card, electricity_price_per_kwh=value)),
        ),
        _around(
            case,
            "hardware_price",
            _("Hardware price"),
            currency,
            case.card.hardware_price,
            lambda value: replace(case, card=_with(case.card, hardware_price=value)),
        ),
        _around(
            case,
            "items_per_month",
            _("Items a month"),
            "",
            Decimal(case.items_per_month),
            lambda value: replace(case, items_per_month=int(value)),
        ),
        _around(
            case,
            "introduction_cost",
            _("Cost of introduction (staff, training, set-up)"),
            currency,
            case.introduction_cost,
            lambda value: replace(case, introduction_cost=value),
        ),
    ]
    if multiple is not None and multiple.low > 0:
        rows.append(
            _row(
                case,
                "throughput_multiple",
                _("Throughput multiple (ends of its interval)"),
                "×",
                Decimal(repr(multiple.low)),
                Decimal(repr(multiple.high)),
                lambda value: replace(case, trial_seconds_per_item=case.baseline_seconds_per_item / value),
            )
        )
    return sorted(rows, key=lambda row: (-row.spread, row.factor))


def _around(
    case: Case, factor: str, label: str, unit: str, value: Decimal, changed: Callable[[Decimal], Case]
) -> SensitivityRow:
    return _row(case, factor, label, unit, value * HALF, value * (1 + HALF), changed)


def _row(
    case: Case, factor: str, label: str, unit: str, low: Decimal, high: Decimal, changed: Callable[[Decimal], Case]
) -> SensitivityRow:
    return SensitivityRow(
        factor=factor,
        label=label,
        unit=unit,
        low=low,
        high=high,
        npv_at_low=changed(low).npv(12),
        npv_at_high=changed(high).npv(12),
    )


def _with(card: RateCard, **changes: Decimal) -> RateCard:
    """A card that is kept nowhere."""
    return RateCard(**{**{name: getattr(card, name) for name in FIELDS}, **changes})

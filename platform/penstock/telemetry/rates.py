"""What a second of the host costs, and the cards that say so. Decimal throughout; currency stands beside every sum.

Formulas, beside the figures that they give:

    busy seconds bought  = lifetime_years * 365.25 * 24 * 3600 * utilization
    hardware per second  = hardware_price / busy seconds bought
    power per second     = power_watts / 1000 * electricity_price_per_kwh / 3600
    cost per second      = hardware per second + power per second
    energy in kWh        = watts * seconds / 3 600 000

Straight-line depreciation without interest or residual value; idle hours are paid for by the busy ones.
"""

from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from governance.ledger.services import record
from penstock.accounts.access import require_role
from penstock.accounts.models import Role, User
from penstock.telemetry.models import RateCard

SECONDS_PER_YEAR = Decimal("365.25") * 24 * 3600
JOULES_PER_KWH = Decimal(3_600_000)

FIELDS = (
    "name",
    "currency",
    "hardware_price",
    "lifetime_years",
    "utilization",
    "power_watts",
    "electricity_price_per_kwh",
    "carbon_kg_per_kwh",
)
EXAMPLE: dict[str, str | Decimal] = {
    "name": gettext_noop("Example rates: edit before use"),
    "currency": "TWD",
    "hardware_price": Decimal("36000.00"),
    "lifetime_years": Decimal("4.00"),
    "utilization": Decimal("0.500"),
    "power_watts": Decimal("120.0"),
    "electricity_price_per_kwh": Decimal("4.5000"),
    "carbon_kg_per_kwh": Decimal("0.4740"),
}
"""An ordinary workstation in Taiwan, made up as an example: nobody's prices. The grid factor is Taiwan's of 2024."""


def hardware_cost_per_second(card: RateCard) -> Decimal:
    """Purchase price spread over the busy seconds of the host's life, in `card.currency`."""
    return card.hardware_price / (card.lifetime_years * SECONDS_PER_YEAR * card.utilization)


def power_cost_per_second(card: RateCard) -> Decimal:
    """Electricity for a second under load, in `card.currency`."""
    return card.power_watts / 1000 * card.electricity_price_per_kwh / 3600


def host_cost_per_second(card: RateCard) -> Decimal:
    """What a busy second of the host costs, in `card.currency`."""
    return hardware_cost_per_second(card) + power_cost_per_second(card)


def energy_kwh(*, watts: Decimal, seconds: Decimal) -> Decimal:
    return watts * seconds / JOULES_PER_KWH


def current_rate_card() -> RateCard:
    """The card in force. An installation that has none yet gets the example card: a result is never lost for want
    of a price, and the card's name says that it is an example."""
    return RateCard.objects.filter(current=True).first() or default_rate_card()


def default_rate_card() -> RateCard:
    """Puts the example card in force where there is none; returns the card that is in force."""
    with transaction.atomic():
        _let_nobody_else_change_cards()
        in_force = RateCard.objects.filter(current=True).first()
        if in_force is None:
            in_force = RateCard.objects.create(
                **{**EXAMPLE, "name": _(str(EXAMPLE["name"]))}, current=True, created_by="system"
            )
            _record_change(in_force, previous=None, actor="system")
        return in_force


@transaction.atomic
def set_rate_card(*, user: User, **fields: Any) -> RateCard:
    """Puts a new card in force and keeps the old one, so that old figures keep their rates.

    Fields not given are taken from the card in force. Raises `PermissionDenied`, or `ValidationError` naming the
    field.
    """
    require_role(user, None, Role.OPERATOR, Role.PILOT_MANAGER, Role.ADMINISTRATOR)
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ValidationError(_("A rate card has no such field: %(names)s.") % {"names": ", ".join(unknown)})
    _let_nobody_else_change_cards()
    previous = current_rate_card()
    values = {name: fields.get(name, getattr(previous, name)) for name in FIELDS}
    values["currency"] = str(values["currency"]).strip().upper()
    card = RateCard(**values, current=True, created_by=user.actor)
    _check(card)
    RateCard.objects.filter(pk=previous.pk).update(current=False)
    card.save(force_insert=True)
    card.refresh_from_db()
    _record_change(card, previous=previous, actor=user.actor)
    return card


def _let_nobody_else_change_cards() -> None:
    """Holds other changers off until this transaction ends; readers and the writers of usage go on."""
    with connection.cursor() as cursor:
        cursor.execute("LOCK TABLE telemetry_ratecard IN SHARE ROW EXCLUSIVE MODE")


def _check(card: RateCard) -> None:
    card.clean_fields(exclude=["created_by"])
    if not Decimal(0) < card.utilization <= 1:
        raise ValidationError({"utilization": _("The share of hours in use lies above 0 and is at most 1.")})
    if len(card.currency) != 3 or not card.currency.isascii() or not card.currency.isalpha():
        raise ValidationError({"currency": _("A currency is three letters, as in ISO 4217: TWD, EUR, USD.")})


def _record_change(card: RateCard, *, previous: RateCard | None, actor: str) -> None:
    record(
        kind="rate_card.changed",
        subject=f"rate_card:{card.pk}",
        payload={
            "previous": previous.pk if previous else None,
            # Decimals as text: canonical JSON has binary floats only.
            **{name: str(getattr(card, name)) for name in FIELDS},
        },
        actor=actor,
    )

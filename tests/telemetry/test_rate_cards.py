"""What a second of the host costs, by hand."""

from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import IntegrityError, transaction

from governance.ledger.models import OutboxEntry
from penstock.telemetry.models import RateCard
from penstock.telemetry.rates import (
    current_rate_card,
    default_rate_card,
    hardware_cost_per_second,
    host_cost_per_second,
    power_cost_per_second,
    set_rate_card,
)


def test_a_round_card_costs_what_it_should_by_hand(round_card: RateCard) -> None:
    # 1 year * 31,557,600 s * 0.5 = 15,778,800 busy seconds for 15,778.80; 0.36 kW * 5 a kWh / 3600 s.
    assert hardware_cost_per_second(round_card) == Decimal("0.001")
    assert power_cost_per_second(round_card) == Decimal("0.0005")
    assert host_cost_per_second(round_card) == Decimal("0.0015")


def test_the_example_card_says_that_it_is_one_and_costs_what_its_figures_say(db: None) -> None:
    card = default_rate_card()
    assert "xample" in card.name
    # bc: 36000/(4*31557600*0.5) + 0.12*4.5/3600 = 0.000570385580... + 0.00015
    assert host_cost_per_second(card).quantize(Decimal("1e-9")) == Decimal("0.000720386")


def test_an_installation_gets_the_example_card_once(db: None) -> None:
    first = current_rate_card()
    assert default_rate_card() == current_rate_card() == first
    assert RateCard.objects.count() == 1
    assert OutboxEntry.objects.filter(kind="rate_card.changed").count() == 1


def test_a_change_makes_a_new_card_and_leaves_the_old_one_as_it_was(people: Any, round_card: RateCard) -> None:
    new = set_rate_card(user=people.operator, electricity_price_per_kwh=Decimal("6"))
    assert current_rate_card() == new
    assert new.hardware_price == round_card.hardware_price
    round_card.refresh_from_db()
    assert (round_card.current, round_card.electricity_price_per_kwh) == (False, Decimal("5"))


def test_a_change_is_in_the_ledger_with_who_and_what(people: Any, round_card: RateCard) -> None:
    new = set_rate_card(user=people.pilot_manager, power_watts=Decimal("90"))
    event = OutboxEntry.objects.get(kind="rate_card.changed")
    assert (event.actor, event.subject) == ("pilot", f"rate_card:{new.pk}")
    assert event.payload["power_watts"] == "90.0"
    assert event.payload["previous"] == round_card.pk


@pytest.mark.parametrize("who", ["auditor", "approver", "task_owner"])
def test_other_roles_may_not_change_rates(people: Any, round_card: RateCard, who: str) -> None:
    with pytest.raises(PermissionDenied):
        set_rate_card(user=getattr(people, who), power_watts=Decimal("1"))
    assert current_rate_card() == round_card


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("utilization", Decimal("1.5")),
        ("utilization", Decimal("0")),
        ("lifetime_years", Decimal("0")),
        ("hardware_price", Decimal("-1")),
        ("power_watts", "many"),
        ("currency", "NT$"),
    ],
)
def test_a_bad_figure_is_refused_by_name_and_changes_nothing(
    people: Any, round_card: RateCard, field: str, value: object
) -> None:
    with pytest.raises(ValidationError) as refusal:
        set_rate_card(user=people.operator, **{field: value})
    assert list(refusal.value.message_dict) == [field]
    assert current_rate_card() == round_card
    assert not OutboxEntry.objects.exists()


def test_an_unknown_field_is_refused(people: Any, round_card: RateCard) -> None:
    with pytest.raises(ValidationError, match="discount"):
        set_rate_card(user=people.operator, discount=1)


def test_the_database_admits_one_card_in_force(round_card: RateCard) -> None:
    round_card.pk = None
    with pytest.raises(IntegrityError), transaction.atomic():
        round_card.save(force_insert=True)

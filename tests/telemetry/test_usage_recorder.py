"""Usage rows: what each request used and cost, in the transaction of its result."""

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.db.models import Sum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.serving.models import Request, Shard
from penstock.telemetry.models import RateCard, Usage
from penstock.telemetry.rates import host_cost_per_second
from penstock.telemetry.recorder import record_usage


def test_a_request_costs_its_compute_seconds(floor: Any, round_card: RateCard) -> None:
    request = floor.request(seconds=9, compute_seconds=2.5, prompt_tokens=20, output_tokens=40)
    record_usage([request])
    usage = Usage.objects.get(request=request)
    assert usage.cost == Decimal("0.00375")  # 2.5 s * 0.0015
    assert usage.energy_kwh == Decimal("0.00025")  # 360 W * 2.5 s / 3,600,000
    assert (usage.currency, usage.energy_source) == ("TWD", "estimated")
    assert (usage.prompt_tokens, usage.output_tokens, usage.compute_seconds) == (20, 40, 2.5)
    assert (usage.batch, usage.task, usage.team) == (floor.batch, floor.task, floor.team)
    assert (usage.finished_at, usage.rate_card) == (request.finished_at, round_card)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_what_a_lost_request_computed_is_paid_for(floor: Any, round_card: RateCard, status: str) -> None:
    record_usage([floor.request(status=status, compute_seconds=4.0)])
    assert Usage.objects.get().cost == Decimal("0.006")


def test_a_request_that_never_ran_costs_nothing(floor: Any, round_card: RateCard) -> None:
    record_usage([floor.request(status="expired", start=None, seconds=60)])
    usage = Usage.objects.get()
    assert (usage.cost, usage.energy_kwh) == (Decimal(0), Decimal(0))
    assert usage.output_tokens == 0


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shares=st.lists(st.floats(min_value=0, max_value=3600, allow_nan=False), min_size=1, max_size=12))
def test_the_rows_add_up_to_the_cost_of_the_busy_time(floor: Any, round_card: RateCard, shares: list[float]) -> None:
    with transaction.atomic():
        record_usage([floor.request(compute_seconds=share) for share in shares])
        busy_seconds = sum((Decimal(repr(share)) for share in shares), Decimal(0))
        sums = Usage.objects.aggregate(cost=Sum("cost"), energy=Sum("energy_kwh"))
        # Each row is rounded to the column's last digit, half a unit at most.
        assert abs(sums["cost"] - busy_seconds * host_cost_per_second(round_card)) <= len(shares) * Decimal("0.5e-10")
        assert abs(sums["energy"] - busy_seconds * 360 / 3_600_000) <= len(shares) * Decimal("0.5e-12")
        transaction.set_rollback(True)


def test_usage_is_gone_with_the_result_when_the_flush_fails(floor: Any, round_card: RateCard) -> None:
    request = floor.request(compute_seconds=1.0)
    with pytest.raises(RuntimeError), transaction.atomic():
        Request.objects.filter(pk=request.pk).update(output_text="x")
        record_usage([request])
        raise RuntimeError
    assert not Usage.objects.exists()


def test_a_result_written_twice_is_refused(floor: Any, round_card: RateCard) -> None:
    request = floor.request(compute_seconds=1.0)
    record_usage([request])
    with pytest.raises(IntegrityError), transaction.atomic():
        record_usage([request])
    assert Usage.objects.count() == 1


def test_a_result_is_not_lost_for_want_of_a_rate_card(floor: Any) -> None:
    record_usage([floor.request(compute_seconds=1.0)])
    assert Usage.objects.get().rate_card.name.startswith("Example")


def test_old_usage_keeps_the_rates_it_was_reckoned_with(floor: Any, people: Any, round_card: RateCard) -> None:
    from penstock.telemetry.rates import set_rate_card

    record_usage([floor.request(compute_seconds=1.0)])
    set_rate_card(user=people.operator, hardware_price=Decimal("31557.60"))
    record_usage([floor.request(compute_seconds=1.0)])
    assert list(Usage.objects.order_by("cost").values_list("cost", flat=True)) == [Decimal("0.0015"), Decimal("0.0025")]


def test_recording_takes_the_same_number_of_queries_for_many(
    floor: Any, round_card: RateCard, django_assert_num_queries: Any
) -> None:
    rows = [floor.request(compute_seconds=0.1, origin=dt.datetime(2026, 1, 1, tzinfo=dt.UTC)) for _ in range(50)]
    with django_assert_num_queries(2):
        record_usage(rows)


class Meter:
    """A host that draws 90 watts."""

    def mean_watts(self, start: dt.datetime, end: dt.datetime) -> Decimal | None:
        return Decimal("90")


def test_energy_is_measured_where_the_writing_host_computed_and_measures(floor: Any, round_card: RateCard) -> None:
    shard = Shard.objects.create(batch=floor.batch, number=0)
    here = floor.request(compute_seconds=40.0, shard=shard)
    elsewhere = floor.request(compute_seconds=10.0, single=True)  # written by a web process, wherever that runs
    record_usage([here, elsewhere], meter=Meter())
    assert (here.usage.energy_source, here.usage.energy_kwh) == ("measured", Decimal("0.001"))
    assert (elsewhere.usage.energy_source, elsewhere.usage.energy_kwh) == ("estimated", Decimal("0.001"))
    assert here.usage.cost == Decimal("0.06")  # the rate card's electricity, whatever the meter says

"""A task's latency class decides how urgent its requests are to the engine: told by who begins first, not by time."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from penstock.config import config
from penstock.serving.hosting.shards import run_shard
from penstock.serving.intake import intake
from penstock.serving.services import create_batch

pytestmark = pytest.mark.django_db(transaction=True)

AT_A_TIME = 16
LAST = 8  # rows that begin together at the end: when, to the millisecond, says nothing about their order
ROWS = 4 * AT_A_TIME + LAST


@pytest.mark.parametrize(("latency_class", "goes_ahead"), [("interactive", True), ("batch", False)])
def test_who_comes_late_begins_before_a_batchs_waiting_rows_only_where_it_is_more_urgent(
    latency_class: str,
    goes_ahead: bool,
    people: Any,
    upload: Callable[..., Any],
    taken_in: Callable[..., Any],
    line: Callable[..., Any],
    make_task: Callable[..., Any],
    host: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config(), "shard_rows", ROWS)
    assert config().max_running_requests == AT_A_TIME
    long = {"max_tokens": 24, "ignore_eos": True}
    batch = taken_in([line(f"row-{number}", f"Tea number {number}.", **long) for number in range(ROWS)])
    late = make_task("late", latency_class=latency_class, max_output_tokens=64)
    asked = create_batch(
        user=people.operator,
        team=people.team,
        input_file=upload([line("late", **{**long, "model": late.name})]),
        endpoint="/v1/chat/completions",
    )
    intake(asked.pk)

    def run(one: Any) -> None:
        try:
            run_shard(one.shards.get().pk, host=host)
        finally:
            connection.close()

    with host.engines.use(batch.model_release) as engine:
        first = threading.Thread(target=run, args=(batch,))
        first.start()
        while not (engine.stats().waiting and engine.stats().running) and first.is_alive():
            time.sleep(0.005)
        assert engine.stats().waiting > 0
        run(asked)
        first.join()
    (urgent,) = asked.requests.all()
    rows = list(batch.requests.all())
    assert {row.status for row in [urgent, *rows]} == {"succeeded"}
    began_after = [row for row in rows if row.started_at > urgent.started_at]
    assert all(row.output_tokens == 24 for row in rows)  # paused ones lost nothing
    assert (len(began_after) > LAST) == goes_ahead

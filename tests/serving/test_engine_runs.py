"""Engines within one memory budget, and what is kept of each: how it was loaded, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from governance.ledger.models import OutboxEntry
from penstock.config import Config
from penstock.serving.hosting.engines import EnginePool, EngineUnavailable, needed_bytes
from penstock.serving.hosting.host import EngineHostProcess
from penstock.serving.hosting.runs import end_runs_of
from penstock.serving.hosting.shards import run_shard
from penstock.serving.models import EngineRun, Shard

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    from penstock.config import config

    monkeypatch.setattr(config(), "threads", 1)
    monkeypatch.setattr(config(), "max_running_requests", 4)
    pool = EnginePool("of-this-test")
    pool._budget_bytes = 2 * 1024**3
    yield pool
    pool.close()


def allow(pool: EnginePool, monkeypatch: pytest.MonkeyPatch, memory_bytes: int) -> None:
    monkeypatch.setattr(pool, "_budget_bytes", memory_bytes)


@pytest.fixture
def another_release(release: Any) -> Any:
    """The same weights under another digest."""
    from penstock.registry.models import ModelRelease

    other = ModelRelease.objects.get(pk=release.pk)
    other.pk, other.name, other.digest = None, "another", "f" * 64
    other.save()
    return other


def test_a_batchs_shards_tell_which_engine_computed_them_and_what_it_reached(
    taken_in: Callable[..., Any], line: Callable[..., Any], pool: EnginePool
) -> None:
    batch = taken_in([line(f"row-{number}") for number in range(3)])
    run_shard(batch.shards.get().pk, host=EngineHostProcess(name="of-this-test", engines=pool))
    run = batch.shards.get().engine_run
    assert run is not None and run.model_release == batch.model_release and run.ended_at is None
    pool.measure()
    run.refresh_from_db()
    assert run.measured["output_tokens"] == sum(row.output_tokens for row in batch.requests.all())
    assert run.measured["output_tokens_per_s"] > 0 and run.memory_bytes > 10**8
    told = OutboxEntry.objects.get(kind="release.loaded")
    assert told.subject == batch.model_release.name
    pool.close()
    run.refresh_from_db()
    assert run.ended_at is not None


def test_a_shard_claimed_anew_is_not_tied_to_the_late_workers_engine(taken_in: Callable[..., Any], line: Any) -> None:
    from penstock.serving.hosting.runs import tie_shard

    shard = taken_in([line("row-0")]).shards.get()
    run = EngineRun.objects.create(
        host="h",
        model_release=shard.batch.model_release,
        loaded_at=shard.batch.created_at,
        load_seconds=1.0,
        memory_bytes=1,
    )
    tie_shard(shard_id=shard.pk, fence=shard.fence + 1, run_id=run.pk)
    assert Shard.objects.get(pk=shard.pk).engine_run is None
    tie_shard(shard_id=shard.pk, fence=shard.fence, run_id=run.pk)
    assert Shard.objects.get(pk=shard.pk).engine_run == run
    assert end_runs_of(host="h", but=[run.pk]) == 0
    assert end_runs_of(host="h", but=[]) == 1


def test_idle_engines_make_room_and_busy_ones_are_waited_for(
    release: Any, another_release: Any, pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needed_bytes(release)
    allow(pool, monkeypatch, int(needed * 1.5))
    with pool.use(release) as first:
        assert first.plan is None  # it fits, so nothing streams
        with pytest.raises(EngineUnavailable) as refused, pool.use(another_release):
            pass
        assert refused.value.passing
    with pool.use(another_release):
        pass
    assert pool.run_id(release) is None and pool.run_id(another_release) is not None
    assert EngineRun.objects.get(model_release=release).ended_at is not None
    allow(pool, monkeypatch, needed * 4)
    with pool.use(release):
        assert pool.run_id(another_release) is not None  # both fit


def test_a_budget_is_written_as_people_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MEMORY_BUDGET", "3GB")
    assert Config().memory_budget_bytes == 3_000_000_000
    monkeypatch.delenv("PENSTOCK_MEMORY_BUDGET")
    monkeypatch.setenv("PENSTOCK_MEMORY_BUDGET_BYTES", "2147483648")
    assert Config().memory_budget_bytes == 2 * 1024**3
    monkeypatch.setenv("PENSTOCK_MEMORY_BUDGET", "three")
    with pytest.raises(ValueError, match="number and a unit"):
        Config()

"""Engines within one memory budget, and what is kept of each: how it was loaded, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from governance.ledger.models import OutboxEntry
from inference.request import SamplingParams
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
    # Rates are of tokens over seconds: what was predicted is of the same tokens, so both differ by the same factor.
    predicted = run.measured["predicted"]
    factor = predicted["busy_seconds"] / run.measured["busy_seconds"]
    assert run.measured["output_tokens_per_s"] / predicted["output_tokens_per_s"] == pytest.approx(factor)
    assert 0.02 < factor < 50  # a wrong unit or a forgotten layer is further off than any busy machine
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


def test_a_host_remembers_why_a_release_could_not_be_loaded_until_it_can(
    release: Any, pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(pool, monkeypatch, 1_000_000)
    with pytest.raises(EngineUnavailable) as refused, pool.use(release):
        pass
    assert not refused.value.passing
    assert pool.trouble()[release.name] in str(refused.value) and "bytes" in pool.trouble()[release.name]
    allow(pool, monkeypatch, needed_bytes(release) * 2)
    with pool.use(release):
        assert pool.trouble() == {}


def test_a_budget_is_written_as_people_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MEMORY_BUDGET", "3GB")
    assert Config().memory_budget_bytes == 3_000_000_000
    monkeypatch.delenv("PENSTOCK_MEMORY_BUDGET")
    monkeypatch.setenv("PENSTOCK_MEMORY_BUDGET_BYTES", "2147483648")
    assert Config().memory_budget_bytes == 2 * 1024**3
    monkeypatch.setenv("PENSTOCK_MEMORY_BUDGET", "three")
    with pytest.raises(ValueError, match="number and a unit"):
        Config()


def test_each_batch_has_figures_of_its_own_time_on_an_engine(
    taken_in: Callable[..., Any], line: Callable[..., Any], pool: EnginePool
) -> None:
    host = EngineHostProcess(name="of-this-test", engines=pool)
    first = taken_in([line(f"row-{number}") for number in range(2)])
    second = taken_in([line(f"row-{number}") for number in range(4)])
    for batch in (first, second):
        run_shard(batch.shards.get().pk, host=host)
    spells = [batch.runs.get() for batch in (first, second)]
    assert [spell.measured["output_tokens"] for spell in spells] == [
        sum(row.output_tokens for row in batch.requests.all()) for batch in (first, second)
    ]
    assert spells[0].engine_run == spells[1].engine_run
    assert spells[1].first_step == spells[0].measured["steps"] > 0
    pool.measure()
    whole = EngineRun.objects.get(pk=spells[0].engine_run_id).measured
    for key in ("steps", "output_tokens", "busy_seconds"):
        assert whole[key] == pytest.approx(sum(spell.measured[key] for spell in spells))
    assert all(spell.ended_at is not None for spell in spells)
    for measured in (whole, spells[1].measured):
        assert sum(measured["shares"].values()) == pytest.approx(1.0)
    assert max(sequences for _seconds, sequences in spells[1].measured["batch_size_over_time"]) > 2


def test_shards_of_a_batch_that_follow_each_other_are_one_run(
    taken_in: Callable[..., Any], line: Callable[..., Any], pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.config import config

    monkeypatch.setattr(config(), "shard_rows", 2)
    batch = taken_in([line(f"row-{number}") for number in range(5)])
    host = EngineHostProcess(name="of-this-test", engines=pool)
    run_shard(batch.shards.first().pk, host=host)  # goes on with the others, which wait
    assert not batch.shards.exclude(status="done").exists()
    (spell,) = batch.runs.all()
    assert spell.measured["output_tokens"] == sum(row.output_tokens for row in batch.requests.all())
    host.batch_runs.measure()  # nothing is held any more
    spell.refresh_from_db()
    assert spell.ended_at is not None


def test_what_a_killed_host_left_open_ends_when_it_starts_anew(taken_in: Callable[..., Any], line: Any) -> None:
    batch = taken_in([line("row-0")])
    fields = {"host": "h", "loaded_at": batch.created_at, "load_seconds": 1.0, "memory_bytes": 1}
    left, kept = (EngineRun.objects.create(model_release=batch.model_release, **fields) for _ in range(2))
    for run in (left, kept):
        batch.runs.create(engine_run=run, first_step=0, began_at=batch.created_at)
    end_runs_of(host="h", but=[kept.pk])
    assert [spell.ended_at is None for spell in batch.runs.order_by("pk")] == [False, True]


@pytest.fixture
def copies_of(release: Any) -> Callable[[str], Any]:
    """The same weights under another name and digest."""
    from penstock.registry.models import ModelRelease

    def make(name: str) -> Any:
        other = ModelRelease.objects.get(pk=release.pk)
        other.pk, other.name, other.digest = None, name, name[0] * 64
        other.save()
        return other

    return make


def loaded(pool: EnginePool) -> set[str]:
    return {state["release"] for state in pool.state()}


def test_the_engine_longest_unused_goes_first_and_what_is_larger_than_the_budget_streams(
    copies_of: Callable[[str], Any],
    pool: EnginePool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    taken_in: Callable[..., Any],
    line: Callable[..., Any],
) -> None:
    monkeypatch.setenv("PENSTOCK_IMAGES", str(tmp_path))
    first, second, third = (copies_of(name) for name in ("a-model", "b-model", "c-model"))
    needed = needed_bytes(first)
    allow(pool, monkeypatch, needed * 4)
    with pool.use(first) as engine:
        taken = engine.memory_bytes_at_most
        resident = engine.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    with pool.use(second) as engine:
        taken += engine.memory_bytes_at_most
    with pool.use(first):
        pass  # so the second is the one longest unused
    allow(pool, monkeypatch, taken + needed // 2)
    with pool.use(third):
        assert loaded(pool) == {"a-model", "c-model"}

    batch = taken_in([line(f"row-{number}") for number in range(2)])  # of the release itself, which is not loaded
    budget = needed * 3 // 4
    allow(pool, monkeypatch, budget)
    run_shard(batch.shards.get().pk, host=EngineHostProcess(name="of-this-test", engines=pool))
    assert loaded(pool) == {batch.model_release.name}
    assert [row.status for row in batch.requests.all()] == ["succeeded"] * 2
    with pool.use(batch.model_release) as engine:
        assert engine.plan is not None and engine.plan.placement.ring > 0
        assert engine.memory_bytes_at_most <= budget
        streamed = engine.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    assert streamed[0].token_ids == resident[0].token_ids
    spell = batch.runs.get()
    assert spell.measured["streamed_bytes"] > 0 and spell.measured["shares"]["disk"] > 0
    assert spell.engine_run.plan["predicted"]["decode_tokens_per_s"] > 0
    ended = EngineRun.objects.filter(model_release__in=[first, second, third])
    assert ended.count() == 3 and not ended.filter(ended_at=None).exists()

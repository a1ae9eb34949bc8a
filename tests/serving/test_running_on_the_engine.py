"""Shards and single requests on a real engine with real weights."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from asgiref.sync import async_to_sync

from governance.ledger.models import OutboxEntry
from penstock.config import config
from penstock.serving import blobs, live, tasks
from penstock.serving.completion import Result, record_results
from penstock.serving.finalizing import finalize
from penstock.serving.hosting import shards as shard_running
from penstock.serving.hosting.heartbeat import Heartbeat
from penstock.serving.hosting.host import EngineHostProcess, set_current_host
from penstock.serving.hosting.listener import Listener
from penstock.serving.hosting.shards import run_shard
from penstock.serving.models import Batch, EngineHost, Request, Shard
from penstock.serving.rejection import Rejected
from penstock.serving.services import cancel_batch

TakenIn = Callable[..., Any]
LONG = {"max_tokens": 64, "messages": [{"role": "user", "content": "Write a very long story about tea, with details."}]}


@pytest.fixture
def served(host: EngineHostProcess) -> Iterator[EngineHostProcess]:
    """The host as the one of this process, where the Celery task finds it."""
    set_current_host(host)
    yield host
    set_current_host(None)


def test_a_batch_runs_to_its_files(taken_in: TakenIn, line: Any, served: Any, sent: list[Any]) -> None:
    texts = ["Say hello.", "用一句話介紹高山烏龍茶。", "What is 2 + 2?", "Name a colour. 🎨"]
    batch = taken_in([line(f"row-{n}", text, stop=["\n"] if n == 2 else None) for n, text in enumerate(texts)])

    tasks.run_shard(batch.shards.get().pk)
    assert sent[-1] == ("serving.finalize", batch.pk, "control")
    tasks.finalize(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.COMPLETED, [r.error_message for r in batch.requests.all()]
    with blobs.open_blob(batch.output_file.sha256) as stream:
        lines = [json.loads(one) for one in stream]
    assert sorted(one["custom_id"] for one in lines) == ["row-0", "row-1", "row-2", "row-3"]
    for row in batch.requests.all():
        assert row.status == "succeeded"
        assert row.prompt_tokens
        assert row.output_tokens in range(1, 7)
        assert row.finish_reason in {"stop", "length"}
        assert row.ttft_seconds is not None and row.duration_seconds is not None
        assert 0 <= row.ttft_seconds <= row.duration_seconds
        assert row.compute_seconds
        assert row.created_at <= row.started_at <= row.finished_at
    assert OutboxEntry.objects.filter(kind="request.finished").count() == 4


def test_greedy_text_equals_the_engines_own(taken_in: TakenIn, line: Any, served: Any, engine_pool: Any) -> None:
    from inference.request import SamplingParams

    batch = taken_in([line("a", "Say hello.", max_tokens=12), line("b", "What is tea?", max_tokens=12)])

    run_shard(batch.shards.get().pk, host=served)

    with engine_pool.use(batch.model_release) as engine:
        prompts = [engine.tokenizer.encode_chat(row.body["messages"]) for row in batch.requests.order_by("line")]
        expected = engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
    assert list(batch.requests.order_by("line").values_list("output_text", flat=True)) == [c.text for c in expected]


def test_a_redelivered_message_repeats_nothing(taken_in: TakenIn, line: Any, served: Any) -> None:
    batch = taken_in([line("a"), line("b")])
    shard = batch.shards.get()
    run_shard(shard.pk, host=served)
    before = list(Request.objects.order_by("pk").values("pk", "output_text", "finished_at"))

    run_shard(shard.pk, host=served)
    run_shard(shard.pk, host=served)

    assert list(Request.objects.order_by("pk").values("pk", "output_text", "finished_at")) == before
    assert OutboxEntry.objects.filter(kind="request.finished").count() == 2
    shard.refresh_from_db()
    assert shard.attempts == 1


def test_a_full_class_turns_shards_away_and_goes_on_with_them_later(
    taken_in: TakenIn, line: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config(), "shard_rows", 1)
    monkeypatch.setattr(config(), "worker_concurrency", 1)
    batch = taken_in([line("a"), line("b"), line("c")])
    first, second, _third = batch.shards.order_by("number")

    with served.slot("batch") as free:
        assert free
        run_shard(second.pk, host=served)
    second.refresh_from_db()
    assert second.status == Shard.Status.QUEUED

    run_shard(first.pk, host=served)

    assert set(batch.shards.values_list("status", flat=True)) == {"done"}


def test_cancelling_stops_what_runs(
    people: Any, taken_in: TakenIn, line: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_running, "CHECK_SECONDS", 0.0)
    batch = taken_in([line(str(n), **LONG) for n in range(3)])
    original = shard_running.ShardRun._look_at_batch

    def cancel_first(run: Any) -> None:
        cancel_batch(user=people.operator, batch=batch)
        original(run)

    monkeypatch.setattr(shard_running.ShardRun, "_look_at_batch", cancel_first)
    run_shard(batch.shards.get().pk, host=served)
    finalize(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.CANCELLED
    assert set(Request.objects.values_list("status", flat=True)) == {"cancelled"}
    assert not Request.objects.filter(output_tokens__gte=64).exists()


def test_a_host_that_stops_hands_its_shard_back(
    taken_in: TakenIn, line: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = taken_in([line("a", max_tokens=1), line("b", **LONG), line("c", **LONG)])
    monkeypatch.setattr(config(), "flush_rows", 1)
    original = record_results

    def stop_after_the_first(results: list[Result], **kwargs: Any) -> Any:
        served.stopping.set()
        return original(results, **kwargs)

    monkeypatch.setattr("penstock.serving.hosting.shards.record_results", stop_after_the_first)
    run_shard(batch.shards.get().pk, host=served)

    shard = batch.shards.get()
    assert (shard.status, shard.attempts, shard.lease_owner) == (Shard.Status.QUEUED, 0, "")
    states = dict(Request.objects.values_list("custom_id", "status"))
    assert states["a"] == "succeeded"
    assert {states["b"], states["c"]} == {"queued"}


def test_results_wait_for_a_database_that_is_away(
    taken_in: TakenIn, line: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import OperationalError

    batch = taken_in([line("a"), line("b")])
    original, failures = record_results, [OperationalError("gone"), OperationalError("gone")]

    def away_at_first(results: list[Result], **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(results, **kwargs)

    monkeypatch.setattr("penstock.serving.hosting.shards.record_results", away_at_first)
    monkeypatch.setattr(shard_running, "FIRST_PAUSE_SECONDS", 0.0)
    # The test's own connection carries its transaction and must stay.
    monkeypatch.setattr("penstock.serving.hosting.shards.connection.close", lambda: None)

    run_shard(batch.shards.get().pk, host=served)

    assert failures == []
    assert set(Request.objects.values_list("status", flat=True)) == {"succeeded"}


def test_one_result_that_cannot_be_written_does_not_take_its_neighbours(
    taken_in: TakenIn, line: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = taken_in([line("good"), line("poison")])
    poison = Request.objects.get(custom_id="poison").pk
    original = record_results

    def refuse(results: list[Result], **kwargs: Any) -> Any:
        if any(one.request_id == poison and one.status == "succeeded" for one in results):
            raise ValueError("not writable")
        return original(results, **kwargs)

    monkeypatch.setattr("penstock.serving.hosting.shards.record_results", refuse)
    run_shard(batch.shards.get().pk, host=served)

    assert dict(Request.objects.values_list("custom_id", "error_code")) == {
        "good": "",
        "poison": "result_unrecordable",
    }


def test_a_release_whose_weights_are_gone_fails_its_requests_in_the_end(
    taken_in: TakenIn, line: Any, host: EngineHostProcess, tmp_path: Any
) -> None:
    from penstock.registry.models import ModelRelease
    from penstock.serving.leases import MAX_ATTEMPTS

    batch = taken_in([line("a")])
    ModelRelease.objects.update(store_path=str(tmp_path / "gone"), digest="1" * 64)

    for _ in range(MAX_ATTEMPTS):
        run_shard(batch.shards.get().pk, host=host)

    row = Request.objects.get()
    assert (row.status, row.error_code, row.http_status) == ("failed", "model_unavailable", 503)
    assert "gone" in row.error_message


@pytest.fixture
def listening(transactional_db: None, host: EngineHostProcess) -> Iterator[EngineHostProcess]:
    """The host with its listener, told of in the database as a worker would."""
    listener = Listener(host)
    Heartbeat(host, url=listener.start(), facts={}).beat()
    yield host
    listener.stop()


def test_the_listener_wants_its_token(listening: EngineHostProcess) -> None:
    url = EngineHost.objects.get().url

    assert httpx.get(f"{url}/health").json() == {"status": "running"}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.post(f"{url}/generate", json={}, headers=headers).status_code == 401
        assert httpx.post(f"{url}/cancel/x", headers=headers).status_code == 401


def ask(people: Any, **body: Any) -> Request:
    return live.submit(
        user=people.operator,
        team=people.team,
        api_key=None,
        body={
            "model": "descriptions",
            "messages": [{"role": "user", "content": "Say hello."}],
            "temperature": 0,
            "max_tokens": 8,
            **body,
        },
    )


def test_a_single_request_streams_and_is_recorded(
    listening: EngineHostProcess, people: Any, task: Any, engine_pool: Any
) -> None:
    request = ask(people, metadata={"language": "en"})

    async def collect() -> list[live.LiveEvent]:
        return [event async for event in live.run(request=request)]

    *deltas, last = async_to_sync(collect)()

    assert isinstance(last, live.Finished)
    row = Request.objects.get(pk=request.pk)
    assert (row.status, row.http_status, row.batch_id) == ("succeeded", 200, None)
    assert "".join(delta.text for delta in deltas if isinstance(delta, live.TextDelta)) == row.output_text
    assert row.output_tokens == 8
    assert row.groups == {"language": "en"}
    assert OutboxEntry.objects.get(kind="request.finished").subject == request.pk


def test_a_caller_who_hangs_up_cancels_and_what_was_computed_is_recorded(
    listening: EngineHostProcess, people: Any, task: Any, engine_pool: Any
) -> None:
    request = ask(people, **LONG)

    async def hang_up_after_the_first() -> None:
        stream = live.run(request=request)
        async for _event in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(asyncio.gather(*live._carrying), 60)

    async_to_sync(hang_up_after_the_first)()

    row = Request.objects.get(pk=request.pk)
    assert row.status == "cancelled"
    assert row.output_tokens in range(1, 64)
    assert row.compute_seconds
    with engine_pool.use(request.model_release) as engine:
        assert engine.stats().running == 0


def test_a_single_request_needs_a_living_host(people: Any, task: Any) -> None:
    with pytest.raises(Rejected) as caught:
        ask(people)

    assert (caught.value.http_status, caught.value.code) == (503, "no_engine_host")
    assert not Request.objects.exists()


def test_a_host_that_refuses_fails_the_request(listening: EngineHostProcess, people: Any, task: Any) -> None:
    request = ask(people)
    EngineHost.objects.update(url="http://127.0.0.1:9")  # the discard port: nobody listens

    async def collect() -> list[live.LiveEvent]:
        return [event async for event in live.run(request=request)]

    [event] = async_to_sync(collect)()

    assert isinstance(event, live.Finished)
    assert (event.request.status, event.request.error_code) == ("failed", "engine_host_failed")

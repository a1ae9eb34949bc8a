"""Finalising, cancelling, expiring: the files hold every request once, and nothing is half done."""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db.models.functions import Now
from django.utils import timezone

from governance.ledger.models import OutboxEntry
from penstock.serving import blobs, leases, sweeping
from penstock.serving.closing import close_batch, close_interrupted
from penstock.serving.completion import record_results
from penstock.serving.finalizing import finalize
from penstock.serving.models import Batch, File, Request, Shard
from penstock.serving.selectors import batch_usage, progress
from penstock.serving.services import cancel_batch

TakenIn = Callable[..., Any]


def lines_of(file: File | None) -> list[dict[str, Any]]:
    assert file is not None
    with blobs.open_blob(file.sha256) as stream:
        return [json.loads(line) for line in stream]


def claimed(shard: Shard) -> leases.Claim:
    claim = leases.claim(shard.pk, owner="one")
    assert claim is not None
    return claim


def fail(answer: Any, request: Request) -> Any:
    return answer(
        request,
        "",
        status=Request.Status.FAILED,
        http_status=500,
        error_code="engine_error",
        error_message="no",
        finish_reason="error",
    )


@pytest.fixture
def mixed(taken_in: TakenIn, line: Any, answer: Any) -> Batch:
    """Two requests that succeeded, one that failed."""
    batch = taken_in([line("a"), line("b"), line("c")])
    claim = claimed(batch.shards.get())
    a, b, c = claim.requests
    record_results([answer(a, "Für dich 茶"), fail(answer, b), answer(c, finish_reason="length")], lease=claim.lease)
    return batch  # type: ignore[no-any-return]


def test_files_have_openais_lines(mixed: Batch, release: Any) -> None:
    assert finalize(mixed.pk)

    mixed.refresh_from_db()
    assert mixed.status == Batch.Status.COMPLETED
    first, second = lines_of(mixed.output_file)
    row = Request.objects.get(custom_id="a")
    assert first == {
        "id": row.pk,
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": row.pk,
            "body": {
                "id": "chatcmpl-" + row.pk.removeprefix("batch_req_"),
                "object": "chat.completion",
                "created": int(row.created_at.timestamp()),
                "model": "descriptions",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Für dich 茶", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 30,
                    "completion_tokens": 3,
                    "total_tokens": 33,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
                "system_fingerprint": f"fp_{release.digest[:12]}",
            },
        },
        "error": None,
    }
    assert second["response"]["body"]["choices"][0]["finish_reason"] == "length"
    [failure] = lines_of(mixed.error_file)
    assert (failure["custom_id"], failure["response"]["status_code"], failure["error"]) == ("b", 500, None)
    assert failure["response"]["body"]["error"] == {
        "message": "no",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


def test_whatever_a_reader_takes_for_the_end_of_a_line_an_output_is_one(
    taken_in: TakenIn, line: Any, answer: Any
) -> None:
    text = "".join(map(chr, range(1, 0x2100)))  # every line end of Unicode is among them
    batch = taken_in([line("a"), line("b")])
    claim = claimed(batch.shards.get())
    record_results([answer(request, text) for request in claim.requests], lease=claim.lease)
    assert finalize(batch.pk)

    batch.refresh_from_db()
    with blobs.open_blob(batch.output_file.sha256) as stream:
        lines = stream.read().decode().splitlines()
    assert [json.loads(one)["custom_id"] for one in lines] == ["a", "b"]
    assert json.loads(lines[0])["response"]["body"]["choices"][0]["message"]["content"] == text


def test_lines_parse_as_the_openai_clients_types(mixed: Batch) -> None:
    from openai.types.chat import ChatCompletion

    finalize(mixed.pk)

    mixed.refresh_from_db()
    for line in lines_of(mixed.output_file):
        assert ChatCompletion.model_validate(line["response"]["body"]).choices[0].message.role == "assistant"


def test_finalising_twice_is_finalising_once(mixed: Batch) -> None:
    finalize(mixed.pk)
    files = File.objects.count()

    finalize(mixed.pk)

    assert File.objects.count() == files
    [event] = OutboxEntry.objects.filter(kind="batch.completed", subject=mixed.pk)
    assert (event.payload["succeeded"], event.payload["failed"]) == (2, 1)


def test_a_batch_with_an_open_request_is_not_finalised(taken_in: TakenIn, line: Any) -> None:
    batch = taken_in([line("a")])

    assert not finalize(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.IN_PROGRESS


def test_without_a_success_there_is_only_an_error_file(taken_in: TakenIn, line: Any, answer: Any) -> None:
    batch = taken_in([line("a"), line("b")])
    claim = claimed(batch.shards.get())
    record_results([fail(answer, request) for request in claim.requests], lease=claim.lease)

    finalize(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.COMPLETED
    assert batch.output_file is None
    assert len(lines_of(batch.error_file)) == 2


def test_without_a_failure_there_is_only_an_output_file(taken_in: TakenIn, line: Any, answer: Any) -> None:
    batch = taken_in([line("a")])
    claim = claimed(batch.shards.get())
    record_results([answer(claim.requests[0])], lease=claim.lease)

    finalize(batch.pk)

    batch.refresh_from_db()
    assert batch.error_file is None
    assert len(lines_of(batch.output_file)) == 1


def test_a_full_disk_leaves_the_batch_finalising_and_the_next_try_ends_it(
    mixed: Batch, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path for path in (home / "blobs").rglob("*") if path.is_file())
    files = File.objects.count()

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not finalize(mixed.pk)

    mixed.refresh_from_db()
    assert mixed.status == Batch.Status.FINALIZING
    assert "No space left" in mixed.finalize_error
    assert mixed.finalize_attempts == 1
    assert mixed.finalize_after is not None and mixed.finalize_after > timezone.now()
    assert File.objects.count() == files
    assert sorted(path for path in (home / "blobs").rglob("*") if path.is_file()) == before
    assert not OutboxEntry.objects.filter(kind="batch.completed").exists()

    assert finalize(mixed.pk)

    mixed.refresh_from_db()
    assert (mixed.status, mixed.finalize_error) == (Batch.Status.COMPLETED, "")


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """A file system of 64 KiB under the blob store: root alone may mount one."""
    folder = home / "blobs"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_is_survived(small_disk: Path, mixed: Batch) -> None:
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 1024)

    assert not finalize(mixed.pk)
    mixed.refresh_from_db()
    assert mixed.status == Batch.Status.FINALIZING
    assert [path.name for path in small_disk.iterdir() if path.name.startswith(".incoming")] == []

    filler.unlink()
    assert finalize(mixed.pk)
    mixed.refresh_from_db()
    assert len(lines_of(mixed.output_file)) == 2


def test_a_batch_that_rests_after_a_full_disk_is_not_woken_before_its_time(mixed: Batch, sent: list[Any]) -> None:
    Batch.objects.filter(pk=mixed.pk).update(
        status="finalizing", finalizing_at=timezone.now(), finalize_after=timezone.now() + timedelta(minutes=5)
    )

    sweeping.wake_finalizing()
    assert sent == []

    Batch.objects.filter(pk=mixed.pk).update(finalize_after=timezone.now() - timedelta(seconds=1))
    sweeping.wake_finalizing()
    assert sent == [("serving.finalize", mixed.pk, "control")]


def test_a_cancelled_batch_keeps_what_is_finished(people: Any, taken_in: TakenIn, line: Any, answer: Any) -> None:
    batch = taken_in([line("a"), line("b"), line("c")])
    claim = claimed(batch.shards.get())
    record_results([answer(claim.requests[0])], lease=claim.lease)
    leases.release(claim.lease)

    cancel_batch(user=people.operator, batch=batch)
    close_batch(batch.pk)
    finalize(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.CANCELLED
    assert batch.cancelled_at is not None
    assert [line["custom_id"] for line in lines_of(batch.output_file)] == ["a"]
    errors = lines_of(batch.error_file)
    assert [(line["custom_id"], line["response"]) for line in errors] == [("b", None), ("c", None)]
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert OutboxEntry.objects.filter(kind="request.finished").count() == 3
    assert OutboxEntry.objects.filter(kind="batch.cancelled").get().actor == "operator"
    assert batch.shards.get().status == Shard.Status.DONE


def test_what_a_living_worker_holds_is_left_to_it(people: Any, taken_in: TakenIn, line: Any, answer: Any) -> None:
    batch = taken_in([line("a")])
    claim = claimed(batch.shards.get())
    cancel_batch(user=people.operator, batch=batch)

    close_batch(batch.pk)
    assert Request.objects.get().status == "leased"

    Shard.objects.update(lease_expires_at=Now() - timedelta(seconds=1))
    close_batch(batch.pk)
    assert Request.objects.get().status == "cancelled"
    with pytest.raises(Exception, match="no longer held"):
        record_results([answer(claim.requests[0])], lease=claim.lease)


def test_an_expired_batch_hands_out_what_is_finished(taken_in: TakenIn, line: Any, answer: Any) -> None:
    batch = taken_in([line("a"), line("b")])
    claim = claimed(batch.shards.get())
    record_results([answer(claim.requests[0])], lease=claim.lease)
    leases.release(claim.lease)
    Batch.objects.filter(pk=batch.pk).update(expires_at=timezone.now() - timedelta(seconds=1))

    assert leases.claim(batch.shards.get().pk, owner="one") is None
    sweeping.close_ended()
    finalize(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.EXPIRED
    assert [line["custom_id"] for line in lines_of(batch.output_file)] == ["a"]
    [expired] = lines_of(batch.error_file)
    assert (expired["custom_id"], expired["response"]) == ("b", None)
    assert expired["error"] == {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    assert progress(batch).failed == 0
    assert progress(batch).expired == 1


def test_the_sweep_sends_what_nobody_works_at(taken_in: TakenIn, submit: Any, line: Any, sent: list[Any]) -> None:
    waiting = submit([line("z")])
    batch = taken_in([line("a")])
    shard = batch.shards.get()
    sent.clear()
    long_ago = timezone.now() - timedelta(minutes=5)

    sweeping.sweep()
    assert sent == []  # both were sent a moment ago

    Batch.objects.filter(pk=waiting.pk).update(created_at=long_ago)
    Shard.objects.update(dispatched_at=long_ago)
    sweeping.sweep()
    assert sent == [("serving.intake", waiting.pk, "control"), ("serving.run_shard", shard.pk, "batch")]

    sent.clear()
    claim = claimed(shard)
    sweeping.wake_shards()
    assert sent == []  # a worker holds it

    Shard.objects.update(lease_expires_at=long_ago, dispatched_at=long_ago)
    sweeping.wake_shards()
    assert sent == [("serving.run_shard", claim.shard.pk, "batch")]


def test_a_single_request_whose_web_process_died_is_failed(mixed: Batch) -> None:
    row = Request.objects.get(custom_id="a")
    for pk in ("chatcmpl-lost", "chatcmpl-carried", "chatcmpl-new"):
        Request.objects.create(
            id=pk,
            team=row.team,
            task=row.task,
            task_version=row.task_version,
            model_release=row.model_release,
            latency_class="interactive",
            created_by="operator",
            endpoint=row.endpoint,
            body=row.body,
            salt=row.salt,
            prompt_digest=row.prompt_digest,
            status="leased",
            created_at=timezone.now() - timedelta(seconds=0 if pk == "chatcmpl-new" else 120),
        )

    assert close_interrupted(carried={"chatcmpl-carried"}, older_than_seconds=60) == 1

    assert dict(Request.objects.filter(batch=None).values_list("pk", "status")) == {
        "chatcmpl-lost": "failed",
        "chatcmpl-carried": "leased",
        "chatcmpl-new": "leased",
    }


def test_progress_counts_and_estimates(taken_in: TakenIn, line: Any, answer: Any) -> None:
    batch = taken_in([line(str(n)) for n in range(4)])
    # Ten seconds in, one of four is finished: thirty seconds remain.
    Batch.objects.filter(pk=batch.pk).update(in_progress_at=timezone.now() - timedelta(seconds=10))
    batch.refresh_from_db()
    claim = claimed(batch.shards.get())
    record_results([answer(claim.requests[0], output_tokens=50)], lease=claim.lease)

    now = progress(batch)

    assert (now.total, now.queued, now.running, now.succeeded, now.finished) == (4, 0, 3, 1, 1)
    assert now.share == 0.25
    assert now.output_tokens == 50
    assert now.output_tokens_per_second == pytest.approx(5, rel=0.2)
    assert now.eta_seconds == pytest.approx(30, rel=0.2)
    usage = batch_usage(batch)
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (30, 50, 80)


def test_the_rate_of_a_batch_that_is_over_is_the_summarys(taken_in: TakenIn, line: Any, answer: Any) -> None:
    from penstock.telemetry.summary import summarize

    batch = taken_in([line(str(n)) for n in range(2)])
    claim = claimed(batch.shards.get())
    begun = timezone.now() - timedelta(seconds=30)
    first, second = claim.requests
    record_results(
        [
            answer(first, output_tokens=60, started_at=begun, finished_at=begun + timedelta(seconds=10)),
            answer(second, output_tokens=40, started_at=begun, finished_at=begun + timedelta(seconds=25)),
        ],
        lease=claim.lease,
    )

    assert progress(batch).output_tokens_per_second == pytest.approx(100 / 25)
    assert summarize(batch.requests.all()).output_tokens_per_second == pytest.approx(100 / 25)


def test_progress_before_the_first_result_promises_nothing(taken_in: TakenIn, line: Any) -> None:
    now = progress(taken_in([line("a")]))

    assert (now.queued, now.output_tokens_per_second, now.eta_seconds) == (1, None, None)

"""Leases and results: one worker at a time, one result a request, and one leaf with it."""

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import rfc8785
from django.utils import timezone

from governance.ledger.models import OutboxEntry
from penstock.serving import completion, leases
from penstock.serving.completion import LeaseLost, record_results, register_recorder
from penstock.serving.models import Request, Shard

TakenIn = Callable[..., Any]


def leaves(batch: Any) -> Any:
    return OutboxEntry.objects.filter(kind="request.finished", payload__batch=batch.pk)


def let_the_lease_run_out(shard: Shard) -> None:
    Shard.objects.filter(pk=shard.pk).update(lease_expires_at=timezone.now() - timedelta(seconds=1))


@pytest.fixture
def shard(taken_in: TakenIn, line: Any) -> Shard:
    batch = taken_in([line("a", metadata={"language": "en"}), line("b"), line("c")])
    return batch.shards.get()  # type: ignore[no-any-return]


def claimed(shard: Shard, owner: str = "one") -> leases.Claim:
    claim = leases.claim(shard.pk, owner=owner)
    assert claim is not None
    return claim


def test_a_shard_is_leased_by_one_worker_at_a_time(shard: Shard) -> None:
    claim = claimed(shard)

    assert [request.custom_id for request in claim.requests] == ["a", "b", "c"]
    assert set(Request.objects.values_list("status", flat=True)) == {"leased"}
    assert leases.claim(shard.pk, owner="two") is None


def test_a_lease_that_ran_out_is_taken_over_with_a_higher_fence(shard: Shard) -> None:
    first = claimed(shard)
    let_the_lease_run_out(shard)

    second = claimed(shard, "two")

    assert second.lease.fence == first.lease.fence + 1
    assert second.shard.attempts == 2


def test_renewing_keeps_a_lease_and_takes_up_one_that_ran_out_unclaimed(shard: Shard) -> None:
    claimed(shard)
    let_the_lease_run_out(shard)

    assert leases.renew("one") == 1

    assert leases.claim(shard.pk, owner="two") is None
    assert leases.renew("two") == 0


def test_a_worker_that_starts_ends_the_leases_of_its_killed_forerunners(shard: Shard) -> None:
    import os

    claimed(shard, f"here:{os.getpid()}:aa")
    assert leases.end_leases_of_the_dead("here") == 0  # that process lives

    Shard.objects.update(lease_owner="here:4194305:bb")  # above Linux's highest process number
    assert leases.end_leases_of_the_dead("elsewhere") == 0
    assert leases.end_leases_of_the_dead("here") == 1

    claimed(shard, "two")


def test_a_late_workers_result_is_dropped(shard: Shard, answer: Any) -> None:
    late = claimed(shard)
    let_the_lease_run_out(shard)
    current = claimed(shard, "two")

    with pytest.raises(LeaseLost):
        record_results([answer(late.requests[0], "too late")], lease=late.lease)
    record_results([answer(current.requests[0], "in time")], lease=current.lease)

    assert Request.objects.get(custom_id="a").output_text == "in time"
    assert leaves(shard.batch).count() == 1


def test_a_result_is_written_once_however_often_it_comes(shard: Shard, answer: Any) -> None:
    claim = claimed(shard)

    assert len(record_results([answer(claim.requests[0], "first")], lease=claim.lease)) == 1
    assert record_results([answer(claim.requests[0], "second")], lease=claim.lease) == []

    assert Request.objects.get(custom_id="a").output_text == "first"
    assert leaves(shard.batch).count() == 1


def test_the_next_worker_runs_only_what_is_unfinished(shard: Shard, answer: Any) -> None:
    first = claimed(shard)
    record_results([answer(first.requests[1])], lease=first.lease)
    let_the_lease_run_out(shard)

    assert [request.custom_id for request in claimed(shard, "two").requests] == ["a", "c"]


def test_a_shard_is_done_with_its_last_request(shard: Shard, answer: Any) -> None:
    claim = claimed(shard)

    record_results([answer(request) for request in claim.requests], lease=claim.lease)

    shard.refresh_from_db()
    assert shard.status == Shard.Status.DONE
    assert leases.claim(shard.pk, owner="two") is None


def test_a_shard_handed_back_waits_again_and_the_attempt_does_not_count(shard: Shard) -> None:
    claim = claimed(shard)

    assert leases.release(claim.lease)

    shard.refresh_from_db()
    assert (shard.status, shard.attempts) == (Shard.Status.QUEUED, 0)
    assert set(Request.objects.values_list("status", flat=True)) == {"queued"}
    assert not leases.release(claim.lease)


def test_a_shard_that_keeps_ending_its_worker_fails_what_is_open(shard: Shard, answer: Any) -> None:
    first = claimed(shard)
    record_results([answer(first.requests[0])], lease=first.lease)
    for _ in range(leases.MAX_ATTEMPTS - 1):
        let_the_lease_run_out(shard)
        claimed(shard)
    let_the_lease_run_out(shard)

    assert leases.claim(shard.pk, owner="six") is None

    assert list(Request.objects.order_by("line").values_list("status", "error_code")) == [
        ("succeeded", ""),
        ("failed", "attempts_exhausted"),
        ("failed", "attempts_exhausted"),
    ]
    assert leaves(shard.batch).count() == 3


def test_a_leaf_holds_digests_counts_and_timings_and_no_text(shard: Shard, answer: Any) -> None:
    claim = claimed(shard)
    record_results([answer(claim.requests[0], "The answer is tea.")], lease=claim.lease)

    request = Request.objects.get(custom_id="a")
    payload = leaves(shard.batch).get().payload

    salt = bytes.fromhex(request.salt)
    prompt = rfc8785.dumps([{"role": "user", "content": "Say hello."}])
    assert payload["prompt_digest"] == hashlib.sha256(salt + prompt).hexdigest()
    assert payload["output_digest"] == hashlib.sha256(salt + b"The answer is tea.").hexdigest()
    assert payload["groups_digest"] == hashlib.sha256(salt + b'{"language":"en"}').hexdigest()
    assert (payload["prompt_tokens"], payload["output_tokens"]) == (30, 3)
    assert (payload["ttft_seconds"], payload["duration_seconds"], payload["compute_seconds"]) == (0.5, 1.0, 0.125)
    assert (payload["task"], payload["task_version"]) == ("descriptions", request.task_version)
    assert payload["release_digest"] == request.model_release.digest
    assert payload["sampling"]["max_tokens"] == 6
    assert payload["sampling"]["temperature"] == 0
    assert "answer is" not in str(payload)
    assert "hello" not in str(payload).lower()


def test_a_request_that_samples_without_a_seed_can_be_run_again(taken_in: TakenIn, line: Any, answer: Any) -> None:
    batch = taken_in([line("a", temperature=1), line("b", temperature=1), line("c", temperature=1, seed=7)])
    claim = claimed(batch.shards.get())
    record_results([answer(request) for request in claim.requests], lease=claim.lease)

    seeds = {entry.payload["line"]: entry.payload["sampling"]["seed"] for entry in leaves(batch)}

    assert seeds[3] == "7"
    assert seeds[1] and seeds[2] and seeds[1] != seeds[2]


def test_outcomes_are_judged_by_the_contract_of_the_tasks_version(
    make_task: Any, taken_in: TakenIn, line: Any, answer: Any
) -> None:
    make_task("chinese", output_contract={"language_from": "language"})
    batch = taken_in([line(name, model="chinese", metadata={"language": "zh-Hant"}) for name in ("good", "bad")])
    claim = claimed(batch.shards.get())

    record_results(
        [
            answer(claim.requests[0], "這款高山烏龍茶帶有花香，適合在午後慢慢品嚐，送禮自用兩相宜。"),
            answer(claim.requests[1], "This oolong tea from the high mountains has a floral aroma and a light roast."),
        ],
        lease=claim.lease,
    )

    assert dict(Request.objects.values_list("custom_id", "valid")) == {"good": True, "bad": False}


def test_recorders_see_finished_requests_in_the_same_transaction(
    shard: Shard, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_recorders", [])
    seen: list[str] = []

    def recorder(requests: Sequence[Request]) -> None:
        seen.extend(request.custom_id for request in requests)
        if "b" in seen:
            raise RuntimeError("no room")

    register_recorder(recorder)
    register_recorder(recorder)
    claim = claimed(shard)

    record_results([answer(claim.requests[0])], lease=claim.lease)
    with pytest.raises(RuntimeError, match="no room"):
        record_results([answer(claim.requests[1])], lease=claim.lease)

    assert seen == ["a", "b"]
    assert Request.objects.get(custom_id="b").status == "leased"
    assert leaves(shard.batch).count() == 1

"""Outbox to tree, in PostgreSQL: order, atomicity, concurrency, triggers, and the check of the whole."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pgtrigger
import pytest
import rfc8785
from django.core.exceptions import ObjectDoesNotExist
from django.db import IntegrityError, ProgrammingError, connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from governance.ledger import selectors, services, tree
from governance.ledger.checkpoint import verify_checkpoint_note
from governance.ledger.events import REQUEST_FINISHED, Event, EventError
from governance.ledger.keys import LedgerKey, load_or_create_key
from governance.ledger.models import Checkpoint, Leaf, Node, OutboxEntry
from governance.ledger.verification import verify_database

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> LedgerKey:
    return load_or_create_key(tmp_path_factory.mktemp("keys"), "example.test/ledger")


def finish(number: int, **payload: Any) -> Event:
    return Event(kind=REQUEST_FINISHED, subject=f"req-{number}", payload={"output_tokens": number, **payload})


def record_requests(count: int, first: int = 0) -> None:
    services.record_many(events=[finish(n, batch="batch-1", task="writer") for n in range(first, first + count)])


def test_an_event_becomes_the_leaf_that_rfc_8785_and_rfc_6962_prescribe() -> None:
    moment = datetime(2026, 3, 1, 9, 30, tzinfo=timezone(timedelta(hours=8)))
    services.record(
        kind="batch.completed",
        subject="batch-1",
        payload={"z": 1, "a": [True, None, 0.1], "名": "值"},
        actor="mei",
        occurred_at=moment,
    )
    assert services.sequence() == 1
    leaf = Leaf.objects.get()
    assert leaf.canonical == (
        '{"actor":"mei","event_id":"' + str(leaf.event_id) + '","kind":"batch.completed",'
        '"occurred_at":"2026-03-01T01:30:00.000000Z","payload":{"a":[true,null,0.1],"z":1,"名":"值"},'
        '"subject":"batch-1","v":1}'
    )
    assert bytes(leaf.leaf_hash) == tree.leaf_hash(leaf.canonical.encode())
    assert not OutboxEntry.objects.exists()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer() or abs(x) < 2**53)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["count", "facts", "名稱"]), json_values, max_size=3))
def test_a_payload_goes_through_the_database_without_a_changed_byte(db: None, payload: dict[str, Any]) -> None:
    event = Event(kind="task.created", subject="writer", payload=payload)
    services.record_many(events=[event])
    services.sequence()
    stored = json.loads(Leaf.objects.get(event_id=event.event_id).canonical)["payload"]
    assert rfc8785.dumps(stored) == rfc8785.dumps(payload)


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"prompt": "Write a poem"}, "payload.prompt"),
        ({"body": {"messages": []}}, "payload.body.messages"),
        ({"choices": [{"Content": "Once"}]}, r"payload.choices\[0\].Content"),
        ({"output_text": ""}, "payload.output_text"),
        ({"cost": Decimal("1.5")}, "payload.cost: Decimal"),
        ({"at": datetime.now(UTC)}, "payload.at: datetime"),
        ({"ttft_seconds": float("nan")}, "payload.ttft_seconds"),
        ({"ttft_seconds": float("inf")}, "payload.ttft_seconds"),
        ({"n": 2**53}, "payload.n"),
        ({"n": 1e300}, "payload.n"),
        ({"s": "a\0b"}, "payload.s"),
        ({"s": "\ud800"}, "payload.s"),
        ({"a": {1: 2}}, "payload.a"),
        ({"batch": 7}, "payload.batch"),
        ({"batch": "x" * 201}, "payload.batch"),
        ({"list": ["x" * 1000] * 100}, "payload: "),
    ],
)
def test_a_payload_that_the_ledger_must_not_take_is_refused_by_place(payload: dict[str, Any], place: str) -> None:
    with pytest.raises(EventError, match=place):
        services.record(kind="request.finished", subject="req-1", payload=payload)
    assert not OutboxEntry.objects.exists()


@pytest.mark.parametrize("bad", [{"kind": ""}, {"subject": ""}, {"subject": "x" * 201}, {"actor": "a\0"}])
def test_an_event_without_a_proper_kind_and_subject_is_refused(bad: dict[str, str]) -> None:
    with pytest.raises(EventError):
        services.record(**{"kind": "task.created", "subject": "writer", "payload": {}, **bad})  # type: ignore[arg-type]


def test_what_is_rolled_back_never_reaches_the_tree() -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        record_requests(3)
        raise RuntimeError
    assert services.sequence() == 0
    assert selectors.tree_size() == 0


def test_sequencing_keeps_the_order_and_takes_no_more_than_the_limit() -> None:
    record_requests(10)
    assert [services.sequence(limit=4) for _ in range(4)] == [4, 4, 2, 0]
    leaves = list(selectors.entries())
    assert [leaf.index for leaf in leaves] == list(range(10))
    assert [leaf.subject for leaf in leaves] == [f"req-{n}" for n in range(10)]
    assert selectors.pending_count() == 0


@pytest.mark.parametrize("steps", [[1, 1, 1, 1, 1, 1, 1], [7], [3, 4], [6, 1]])
def test_the_stored_tree_has_the_same_root_however_it_was_filled(steps: list[int]) -> None:
    record_requests(sum(steps))
    for step in steps:
        services.sequence(limit=step)
    hashes = [bytes(leaf.leaf_hash) for leaf in selectors.entries()]
    h = tree.node_hash
    by_hand = h(h(h(hashes[0], hashes[1]), h(hashes[2], hashes[3])), h(h(hashes[4], hashes[5]), hashes[6]))
    assert tree.root(7, selectors.read_nodes) == by_hand
    assert Node.objects.count() == 3 + 1


def test_a_sequencer_that_dies_midway_leaves_the_outbox_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    record_requests(5)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        services.sequence()
        raise ZeroDivisionError
    assert (selectors.pending_count(), selectors.tree_size()) == (5, 0)
    assert services.sequence() == 5


def test_an_event_accepted_under_older_rules_is_still_sequenced(monkeypatch: pytest.MonkeyPatch) -> None:
    services.record(kind="task.created", subject="writer", payload={"purpose": "x"})
    monkeypatch.setattr("governance.ledger.events.FORBIDDEN_KEYS", frozenset({"purpose"}))
    assert services.sequence() == 1


def test_a_request_is_finished_once_while_it_waits_and_after() -> None:
    record_requests(1)
    with pytest.raises(IntegrityError), transaction.atomic():
        record_requests(1)
    services.sequence()
    with pytest.raises(services.DuplicateEventError, match=r"req-0 .* number 0"), transaction.atomic():
        record_requests(1)
    assert services.sequence() == 0
    services.record(kind="request.replayed", subject="req-0", payload={})  # other kinds may repeat
    services.record(kind="request.replayed", subject="req-0", payload={})
    assert services.sequence() == 2


def test_references_become_columns_to_search_by() -> None:
    record_requests(2)
    services.record(kind="batch.completed", subject="batch-1", payload={"task": "writer"})
    services.sequence()
    assert [leaf.index for leaf in selectors.entries(batch="batch-1")] == [0, 1]
    assert [leaf.index for leaf in selectors.entries(task="writer")] == [0, 1, 2]
    assert [leaf.index for leaf in selectors.entries(kind="batch.completed", subject="batch-1")] == [2]
    now = datetime.now(UTC)
    assert selectors.entries(since=now - timedelta(hours=1), until=now).count() == 3
    assert selectors.entries(since=now).count() == 0


@pytest.mark.parametrize("model", [Leaf, Node, Checkpoint])
@pytest.mark.parametrize("act", ["update", "delete", "truncate"])
def test_the_database_refuses_to_change_what_is_in_the_ledger(key: LedgerKey, model: Any, act: str) -> None:
    record_requests(2)
    services.drain_and_sign(key=key)
    table = model._meta.db_table
    column = {Leaf: "canonical", Node: "hash", Checkpoint: "note"}[model]
    sql = {
        "update": f"UPDATE {table} SET {column} = {column}",
        "delete": f"DELETE FROM {table}",
        "truncate": f"TRUNCATE {table}",
    }[act]
    with pytest.raises(ProgrammingError, match=f"Cannot .*{act}"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql)
    assert model.objects.exists()


def test_a_head_is_signed_only_when_the_tree_grew(key: LedgerKey) -> None:
    assert services.sign_checkpoint(key=key) is None
    assert services.drain_and_sign(key=key) is None
    record_requests(3)
    services.sequence()
    head = services.sign_checkpoint(key=key)
    assert head is not None
    signed = verify_checkpoint_note(head.note, key.verifier)
    assert (signed.size, signed.root) == (3, tree.root(3, selectors.read_nodes))
    assert services.sign_checkpoint(key=key) is None
    record_requests(1, first=3)
    again = services.drain_and_sign(key=key)
    assert again is not None
    assert again.size == 4
    proof = selectors.consistency_proof(old_size=3, new_size=4)
    assert tree.verify_consistency(3, 4, proof, bytes(head.root), bytes(again.root))


def test_nothing_is_signed_over_a_rewritten_history(key: LedgerKey) -> None:
    record_requests(4)
    services.drain_and_sign(key=key)
    record_requests(1, first=4)
    services.sequence()
    with pgtrigger.ignore():
        Node.objects.filter(level=2, index=0).update(hash=b"\0" * 32)
    with pytest.raises(services.LedgerCorruptError, match="first 4 leaves"):
        services.sign_checkpoint(key=key)


def test_an_untouched_ledger_is_intact(key: LedgerKey) -> None:
    assert verify_database().intact
    for first in range(0, 21, 3):
        record_requests(3, first=first)
        services.drain_and_sign(key=key)
    result = verify_database(key=key.verifier)
    assert result.problems == []
    # 21 leaves: 10 + 5 + 2 + 1 complete subtrees above them
    assert (result.leaves, result.nodes, result.checkpoints) == (21, 18, 7)
    assert result.root == tree.root(21, selectors.read_nodes).hex()


@pytest.mark.parametrize(
    ("damage", "index", "message"),
    [
        (lambda: Leaf.objects.filter(index=5).update(canonical='{"v":1}'), 5, "does not have the hash"),
        (lambda: Leaf.objects.filter(index=5).update(subject="req-99"), 5, "column subject"),
        (lambda: Leaf.objects.filter(index=5).update(leaf_hash=b"\1" * 32), 5, "does not have the hash"),
        (lambda: Leaf.objects.filter(index=5).delete(), 5, "Leaf 5 is missing"),
        (lambda: Leaf.objects.filter(index__gte=6).delete(), 6, "only 6"),
        (lambda: Node.objects.filter(level=1, index=3).update(hash=b"\1" * 32), 6, "Node 1/3"),
        (lambda: Node.objects.filter(level=2, index=1).delete(), 4, "Node 2/1"),
        (lambda: Node.objects.create(level=9, index=0, hash=b"\1" * 32), None, None),
        (lambda: Checkpoint.objects.filter(size=4).update(root=b"\1" * 32), None, "head over 4 leaves"),
        (lambda: Checkpoint.objects.filter(size=8).update(note="x"), None, "not validly signed"),
    ],
)
def test_a_changed_row_is_found_and_named(key: LedgerKey, damage: Any, index: int | None, message: str | None) -> None:
    for first in (0, 4):
        record_requests(4, first=first)
        services.drain_and_sign(key=key)
    with pgtrigger.ignore():
        damage()
    result = verify_database(key=key.verifier)
    if message is None:  # a node beyond the tree's end breaks nothing yet
        assert result.intact
        return
    assert result.first_bad_index == index
    assert any(message in problem.message for problem in result.problems)


def test_a_consistent_rewrite_of_the_tree_is_found_by_the_signed_head(key: LedgerKey) -> None:
    record_requests(2)
    services.drain_and_sign(key=key)
    leaf = Leaf.objects.get(index=0)
    forged = leaf.canonical.replace('"output_tokens":0', '"output_tokens":9')
    forged_hash = tree.leaf_hash(forged.encode())
    other = bytes(Leaf.objects.get(index=1).leaf_hash)
    with pgtrigger.ignore():
        Leaf.objects.filter(index=0).update(canonical=forged, leaf_hash=forged_hash)
        Node.objects.update(hash=tree.node_hash(forged_hash, other))
    result = verify_database(key=key.verifier)
    assert [problem.message for problem in result.problems] == [
        "The head over 2 leaves was signed for another root than they have now.",
        "The signed text of the head over 2 leaves differs.",
    ]


@pytest.mark.django_db(transaction=True)
def test_writers_and_sequencers_at_once_lose_nothing_and_repeat_nothing(key: LedgerKey, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Any) -> Any:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
            finally:
                connection.close()

        return run

    def write(writer: int) -> None:
        for n in range(25):
            with transaction.atomic():
                services.record_many(events=[finish(writer * 1000 + n * 2), finish(writer * 1000 + n * 2 + 1)])

    def run_sequencer() -> None:
        while not done.is_set():
            services.sequence(limit=7)
            services.sign_checkpoint(key=key)

    writers = [threading.Thread(target=guarded(lambda w=w: write(w))) for w in range(4)]
    sequencers = [threading.Thread(target=guarded(run_sequencer)) for _ in range(2)]
    for thread in writers + sequencers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in sequencers:
        thread.join()
    services.drain_and_sign(key=key)

    assert failures == []
    assert sorted(selectors.entries().values_list("subject", flat=True)) == sorted(
        f"req-{writer * 1000 + n}" for writer in range(4) for n in range(50)
    )
    result = verify_database(key=key.verifier)
    assert result.problems == []
    assert result.leaves == 200


@pytest.mark.django_db(transaction=True)
def test_the_same_request_finished_by_two_transactions_has_one_leaf() -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def finish_it() -> None:
        try:
            barrier.wait()
            services.record_many(events=[finish(1)])
            services.sequence()
            outcomes.append("recorded")
        except (IntegrityError, services.DuplicateEventError):
            outcomes.append("refused")
        finally:
            connection.close()

    threads = [threading.Thread(target=finish_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    services.sequence()
    assert sorted(outcomes) == ["recorded"] + ["refused"] * 3
    assert Leaf.objects.count() == 1


def test_a_leaf_that_is_not_there_is_not_made_up() -> None:
    with pytest.raises(ObjectDoesNotExist):
        Leaf.objects.get(index=0)
    with pytest.raises(tree.TreeRangeError):
        selectors.inclusion_proof(index=0, size=0)

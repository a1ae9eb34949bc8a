"""Evidence out of the real ledger: what a bundle holds, and what exporting leaves behind."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from governance.exports.services import NothingToExportError, UnknownCheckpointError, export_bundle
from governance.exports.verify import Report, verify_bundle
from governance.ledger import selectors
from governance.ledger.events import Event
from governance.ledger.models import Checkpoint, Leaf
from governance.ledger.services import ledger_key, record, record_many, sequence, sign_checkpoint

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("home")]


@pytest.fixture
def ledger() -> None:
    """Two tasks on two releases; one batch of each task, and a request on its own."""
    record(kind="release.imported", subject="small-q4", payload={"digest": "aa"})
    record(kind="release.imported", subject="large-q4", payload={"digest": "bb"})
    record(kind="release.imported", subject="unused", payload={"digest": "cc"})
    for task, release in (("writer", "small-q4"), ("judge", "large-q4")):
        record(kind="task.created", subject=task, payload={"release": release})
        record(kind="batch.created", subject=f"batch-{task}", payload={"task": task})
        finished = [
            Event(
                kind="request.finished",
                subject=f"{task}-{n}",
                payload={"batch": f"batch-{task}", "task": task, "release": release, "output_tokens": n},
            )
            for n in range(5)
        ]
        record_many(events=finished)
        record(kind="batch.completed", subject=f"batch-{task}", payload={"task": task, "request_leaves": 5})
    record(kind="request.finished", subject="alone", payload={"task": "writer", "release": "small-q4"})


def export(path: Path, **kwargs: Any) -> Any:
    arguments: dict[str, Any] = {"measurements": [], "extra_files": {"controls.xlsx": b"x"}, **kwargs}
    return export_bundle(destination=path, **arguments)


def subjects(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as container:
        lines = container.read("leaves.jsonl").splitlines()
    entries = [json.loads(json.loads(line)["entry"]) for line in lines]
    return [f"{entry['kind']} {entry['subject']}" for entry in entries]


def check(path: Path, since: Path | None = None) -> Report:
    key = str(ledger_key().verifier)
    return verify_bundle(str(path), key=key, since=str(since) if since else None)


def test_a_batchs_evidence_is_its_events_its_task_and_its_release(ledger: None, tmp_path: Path) -> None:
    summary = export(tmp_path / "out" / "evidence.zip", batch_id="batch-writer", actor="mei")
    assert subjects(summary.path) == [
        "release.imported small-q4",
        "task.created writer",
        "batch.created batch-writer",
        *(f"request.finished writer-{n}" for n in range(5)),
        "batch.completed batch-writer",
    ]
    report = check(summary.path)
    assert report.problems == []
    assert "batch batch-writer: all of its 5 finished requests are here" in "\n".join(report.lines())
    assert summary.tree_size == selectors.tree_size() == 20
    assert summary.leaf_count == 9


def test_a_tasks_evidence_holds_its_batches_and_single_requests(ledger: None, tmp_path: Path) -> None:
    found = subjects(export(tmp_path / "evidence.zip", task_id="writer").path)
    assert found[-1] == "request.finished alone"
    assert len(found) == 10
    assert not any("judge" in line or "large" in line for line in found)


def test_the_whole_ledger_can_be_exported(ledger: None, tmp_path: Path) -> None:
    summary = export(tmp_path / "evidence.zip")
    assert summary.leaf_count == 20
    assert check(summary.path).verified


def test_an_export_is_itself_recorded_with_the_digest_of_the_bundle(ledger: None, tmp_path: Path) -> None:
    summary = export(tmp_path / "evidence.zip", batch_id="batch-writer", actor="mei")
    sequence()
    entry = json.loads(Leaf.objects.get(kind="evidence.exported").canonical)
    assert (entry["subject"], entry["actor"]) == ("batch-writer", "mei")
    assert entry["payload"]["bundle_sha256"] == summary.sha256
    assert entry["payload"]["tree_size"] == summary.tree_size


def test_a_second_export_proves_that_the_first_ones_log_still_stands(ledger: None, tmp_path: Path) -> None:
    first = export(tmp_path / "first.zip", batch_id="batch-writer").path
    record(kind="task.suspended", subject="writer", payload={})
    second = export(tmp_path / "second.zip", batch_id="batch-writer").path
    report = check(second, since=first)
    assert report.problems == []
    assert report.checks[-1][0].startswith("since: ")
    assert "evidence.exported batch-writer" in subjects(second)
    assert "task.suspended writer" in subjects(second)


def test_a_proof_from_any_signed_head_can_be_asked_for(ledger: None, tmp_path: Path) -> None:
    sequence(limit=7)
    sign_checkpoint(key=ledger_key())
    assert list(Checkpoint.objects.values_list("size", flat=True)) == [7]
    report = check(export(tmp_path / "evidence.zip", since_size=7).path)
    assert report.verified
    assert set(report.roots) == {7}
    with pytest.raises(UnknownCheckpointError, match="over 6 entries"):
        export(tmp_path / "other.zip", since_size=6)
    assert not (tmp_path / "other.zip").exists()


def test_nothing_to_export_is_said_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(NothingToExportError, match="empty"):
        export(tmp_path / "evidence.zip")
    record(kind="task.created", subject="writer", payload={})
    with pytest.raises(NothingToExportError, match="no entry about batch-9"):
        export(tmp_path / "evidence.zip", batch_id="batch-9")
    assert not any(path.suffix == ".zip" for path in tmp_path.iterdir())


def test_one_selection_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        export(tmp_path / "evidence.zip", batch_id="b", task_id="t")

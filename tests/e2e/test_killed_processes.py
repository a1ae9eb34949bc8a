"""`kill -9` of each process, each in the middle of a batch, then `penstock up` again: nothing is lost or doubled."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from installation import Installation, signed_in, wait_for

ROWS = 48


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as stream:
        for number in range(ROWS):
            body = {
                "model": "product-descriptions",
                "messages": [{"role": "user", "content": f"Write a few lines about the number {number}."}],
                "max_tokens": 48,
            }
            line = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            stream.write(json.dumps(line) + "\n")
    return path


@pytest.mark.parametrize("victim", ["worker", "web", "valkey", "postgres"])
def test_a_batch_survives_kill_9(installation: Installation, sample_batch: str, jsonl: Path, victim: str) -> None:
    submitted = installation.run(
        "batch", "run", str(jsonl), "--task", "product-descriptions", "--detach"
    ).stdout.strip()
    finished = "SELECT count(*) FROM serving_request WHERE batch_id = %s AND finished_at IS NOT NULL"
    wait_for("some rows finish", lambda: installation.value(finished, submitted) > 0, 120)
    before = dict(
        installation.query(
            "SELECT id, output_digest || finished_at::text FROM serving_request "
            "WHERE batch_id = %s AND finished_at IS NOT NULL",
            submitted,
        )
    )
    assert 0 < len(before) < ROWS, "the kill has to fall into the middle of the batch"
    pid = installation.pid(victim)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    installation.kill_supervisor()
    installation.up()
    wait_for(
        "the batch completes",
        lambda: installation.value("SELECT status FROM serving_batch WHERE id = %s", submitted) == "completed",
        240,
    )
    after = dict(
        installation.query(
            "SELECT id, output_digest || finished_at::text FROM serving_request WHERE batch_id = %s", submitted
        )
    )
    assert len(after) == ROWS
    assert {key: after[key] for key in before} == before, "no finished row is run again"
    output = installation.value("SELECT output_file_id FROM serving_batch WHERE id = %s", submitted)
    with signed_in(installation) as client:
        results = [json.loads(line) for line in client.get(f"/files/{output}/").text.splitlines()]
    assert sorted(row["custom_id"] for row in results) == sorted(f"row-{number}" for number in range(ROWS))
    wait_for("the ledger is sequenced", lambda: installation.value("SELECT count(*) FROM governance_outboxentry") == 0)
    leaves = """
        SELECT count(*) FROM serving_request r WHERE batch_id = %s AND 1 <>
            (SELECT count(*) FROM governance_leaf l WHERE l.kind = 'request.finished' AND l.subject = r.id)
    """
    assert installation.value(leaves, submitted) == 0
    usage = "SELECT count(*) FROM telemetry_usage WHERE batch_id = %s"
    assert installation.value(usage, submitted) == ROWS
    bundle = jsonl.with_suffix(".zip")
    installation.run("evidence", "export", "--batch", submitted, "--output", str(bundle))
    assert installation.run("evidence", "verify", str(bundle)).returncode == 0


def test_ctrl_c_stops_everything_and_the_next_start_repeats_nothing(
    installation: Installation, sample_batch: str
) -> None:
    counts = """
        SELECT (SELECT count(*) FROM serving_batch), (SELECT count(*) FROM registry_task),
               (SELECT count(*) FROM registry_modelrelease), (SELECT count(*) FROM accounts_user)
    """
    before = installation.query(counts)
    pids = [installation.pid(name) for name in ("web", "worker", "control", "scheduler", "valkey", "postgres")]
    assert installation.down() == 0
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
    installation.up()
    assert installation.query(counts) == before


def test_ctrl_c_during_the_first_start_ends_it_without_a_traceback(tmp_path: Path) -> None:
    fresh = Installation(tmp_path / "home")
    try:
        fresh.launch()
        fresh.wait_for_output("Starting Valkey", 120)
        pids = [wait_for("the servers run", lambda name=name: fresh.pid(name), 60) for name in ("valkey", "postgres")]
        assert fresh.down() == 0
        assert not any("Traceback" in line for line in fresh.output), "".join(fresh.output)
        assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
    finally:
        fresh.end()

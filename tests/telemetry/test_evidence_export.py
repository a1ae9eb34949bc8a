"""Evidence bundles: complete, checkable without Penstock, and silent about prompts."""

import csv
import datetime as dt
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import rfc8785
from django.core.exceptions import PermissionDenied
from django.utils import timezone

from governance.ledger.models import OutboxEntry
from penstock.registry.models import TaskVersion
from penstock.serving.completion import Result, record_results
from penstock.serving.models import Request
from penstock.telemetry.evidence import export_evidence
from penstock.telemetry.models import RateCard

SECRET = "the secret prompt of row"


@pytest.fixture
def done(floor: Any, round_card: RateCard, home: Path) -> Any:
    """Four finished requests of a batch, one of them failed, with leaves and usage."""
    content: dict[str, Any] = {"name": "descriptions", "output_contract": {"min_characters": 3}}
    digest = hashlib.sha256(rfc8785.dumps(content)).hexdigest()
    TaskVersion.objects.filter(task=floor.task).update(content=content, digest=digest)
    floor.task.objectives = [{"metric": "error_rate", "target": "0.3", "unit": "ratio"}]
    floor.task.save()
    now = timezone.now()
    floor.batch.created_at = now
    floor.batch.save()
    results = []
    for n in range(4):
        row = floor.request(status="queued", origin=now, groups={"language": "=en" if n == 3 else "en"})
        Request.objects.filter(pk=row.pk).update(body={"prompt": f"{SECRET} {n}", "max_tokens": 16})
        failed = n == 2
        results.append(
            Result(
                request_id=row.pk,
                status=Request.Status.FAILED if failed else Request.Status.SUCCEEDED,
                finished_at=now,
                started_at=now,
                output_text="" if failed else f"a secret answer {n}",
                error_code="engine_error" if failed else "",
                prompt_tokens=5,
                output_tokens=0 if failed else 10,
                compute_seconds=1.0,
                ttft_seconds=None if failed else 0.1,
                duration_seconds=1.0,
                queued_seconds=0.0,
            )
        )
    record_results(results)
    return floor


def export(done: Any, user: Any, folder: Path, **selection: Any) -> zipfile.ZipFile:
    destination = folder / "evidence.zip"
    export_evidence(user=user, destination=destination, **(selection or {"batch": done.batch}))
    return zipfile.ZipFile(destination)


def test_the_bundle_verifies_with_nothing_but_its_own_verifier(done: Any, people: Any, tmp_path: Path) -> None:
    bundle = export(done, people.auditor, tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "verify.py").write_bytes(bundle.read("verify.py"))
    check = subprocess.run(
        [sys.executable, "-I", "verify.py", str(tmp_path / "evidence.zip"), "--json"],
        cwd=alone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr
    assert sum(json.loads(line)["entry"].count("request.finished") for line in bundle.open("leaves.jsonl")) == 4


def test_measurements_carry_value_unit_window_count_and_source(done: Any, people: Any, tmp_path: Path) -> None:
    measurements = {m["key"]: m for m in json.loads(export(done, people.auditor, tmp_path).read("measurements.json"))}
    errors = measurements["requests.error_rate"]
    assert (errors["value"], errors["unit"], errors["count"]) == (0.25, "ratio", 4)
    assert errors["window_start"] < errors["window_end"]
    assert errors["source"]["batch"] == done.batch.pk
    assert "status=errors" in errors["source"]["requests"]
    assert Decimal(measurements["cost.total"]["value"]) == Decimal("0.006")
    assert measurements["ledger.requests_without_leaf"]["value"] == 0


def test_the_list_of_requests_adds_up_to_the_figures(done: Any, people: Any, tmp_path: Path) -> None:
    bundle = export(done, people.auditor, tmp_path)
    rows = list(csv.DictReader(io.StringIO(bundle.read("exports/requests.csv").decode(), newline="")))
    summary = json.loads(bundle.read("exports/summary.json"))
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal(summary["cost_total"])
    assert sum(int(row["output_tokens"]) for row in rows) == summary["output_tokens"] == 30
    assert [row["status"] for row in rows].count("failed") == summary["by_status"]["failed"] == 1
    assert {row["group"] for row in rows} == {"en", "'=en"}  # a spreadsheet must not take it for a formula


def test_no_prompt_and_no_answer_leaves(done: Any, people: Any, tmp_path: Path) -> None:
    bundle = export(done, people.auditor, tmp_path)
    for name in bundle.namelist():
        content = bundle.read(name)
        if name.endswith(".xlsx"):
            with zipfile.ZipFile(io.BytesIO(content)) as book:
                content = b"".join(book.read(part) for part in book.namelist())
        assert b"secret" not in content, name


def test_the_files_beside_the_figures_say_what_ran(done: Any, people: Any, tmp_path: Path) -> None:
    bundle = export(done, people.auditor, tmp_path)
    [objective] = json.loads(bundle.read("exports/objectives.json"))
    assert objective["verdict"] == "met"
    [version] = json.loads(bundle.read("exports/task-versions.json"))
    assert hashlib.sha256(rfc8785.dumps(version["content"])).hexdigest() == version["digest"]
    [release] = json.loads(bundle.read("exports/model-releases.json"))
    assert release["digest"] == "aa" * 32
    assert "store_path" not in release
    fairness = json.loads(bundle.read("exports/fairness.json"))
    assert fairness["findings"].keys() == {"en", "zh-hant"}
    for name in ("control-matrix", "statement-of-applicability"):
        for language in ("en", "zh-hant"):
            book = openpyxl.load_workbook(io.BytesIO(bundle.read(f"exports/{name}.{language}.xlsx")))
            assert len(book.sheetnames) >= 3


def test_a_task_is_exported_with_all_of_its_requests(done: Any, people: Any, tmp_path: Path) -> None:
    done.request(single=True, origin=timezone.now() - dt.timedelta(minutes=1))
    bundle = export(done, people.operator, tmp_path, task=done.task)
    assert json.loads(bundle.read("exports/summary.json"))["finished"] == 5
    figures = {m["key"]: m for m in json.loads(bundle.read("measurements.json"))}
    # The one laid down by hand has no entry in the log, and the figure says so.
    assert figures["ledger.requests_without_leaf"]["value"] == 1


def test_nothing_of_another_team_is_in_the_bundle(done: Any, next_door: Any, people: Any, tmp_path: Path) -> None:
    stranger = next_door.request(status="queued")
    record_results([Result(request_id=stranger.pk, status=Request.Status.SUCCEEDED, finished_at=timezone.now())])
    bundle = export(done, people.auditor, tmp_path, task=done.task)
    for name in ("leaves.jsonl", "measurements.json", "exports/requests.csv", "exports/fairness.json"):
        assert b"next-door" not in bundle.read(name), name
        assert stranger.pk.encode() not in bundle.read(name), name


def test_an_export_is_recorded_with_who_made_it(done: Any, people: Any, tmp_path: Path) -> None:
    export(done, people.auditor, tmp_path)
    event = OutboxEntry.objects.get(kind="evidence.exported")
    assert (event.actor, event.payload["batch"]) == ("auditor", done.batch.pk)


@pytest.mark.parametrize("who", ["task_owner", "pilot_manager", "outsider"])
def test_other_roles_and_other_teams_may_not_export(done: Any, people: Any, tmp_path: Path, who: str) -> None:
    with pytest.raises(PermissionDenied):
        export_evidence(user=getattr(people, who), destination=tmp_path / "e.zip", batch=done.batch)
    assert not list(tmp_path.glob("*.zip"))


def test_one_thing_is_exported_at_a_time(done: Any, people: Any, tmp_path: Path) -> None:
    for selection in ({}, {"batch": done.batch, "task": done.task}):
        with pytest.raises(ValueError, match="one of them"):
            export_evidence(user=people.auditor, destination=tmp_path / "e.zip", **selection)

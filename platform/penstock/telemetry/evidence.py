"""Evidence of a batch or a task, for an outsider: the ledger's entries, the figures, and what they were counted from.

`governance.exports` chooses the entries, proves and signs; this room adds the measurements and the files that explain
them. No prompt and no answer leaves: requests are told by identifiers, digests, counts and timings.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from django.db.models import QuerySet
from django.db.models.fields.json import KeyTextTransform
from django.utils import translation

from governance.catalogs.loader import load_catalogs
from governance.controls.coverage import ControlCoverage, coverage
from governance.controls.rules import load_rules
from governance.controls.selectors import statement_rows
from governance.controls.sources import Measurement, Scope, collect
from governance.exports.bundle import BundleSummary
from governance.exports.services import export_bundle
from governance.exports.workbook import control_matrix, statement_of_applicability
from governance.ledger.services import drain_and_sign, ledger_key
from penstock.accounts.access import require_role
from penstock.accounts.models import Role, User
from penstock.registry.contracts import parse_fairness_plan, parse_objectives
from penstock.registry.models import ModelRelease, Task, TaskVersion
from penstock.serving.models import Batch, Request
from penstock.telemetry.fairness import FairnessReport, report_on
from penstock.telemetry.json_values import moment_text, plain
from penstock.telemetry.measurements import FIGURES
from penstock.telemetry.measurements.window import Window
from penstock.telemetry.objectives import judge_summary
from penstock.telemetry.summary import Summary

EXPORTERS = (Role.AUDITOR, Role.OPERATOR, Role.APPROVER)
LANGUAGES = ("en", "zh-hant")
TASK_WINDOW_DAYS = 90
ROWS_AT_A_TIME = 2000

REQUEST_COLUMNS = (
    "id", "batch", "line", "task", "task_version", "model_release", "endpoint", "latency_class", "status",
    "created_at", "started_at", "finished_at", "finish_reason", "http_status", "error_code", "prompt_digest",
    "output_digest", "prompt_tokens", "output_tokens", "queued_seconds", "ttft_seconds", "duration_seconds",
    "compute_seconds", "valid", "refused", "truncated", "detected_language", "violations", "group", "cost",
    "currency", "energy_kwh", "energy_source",
)  # fmt: skip


def export_evidence(
    *,
    user: User,
    destination: Path,
    batch: Batch | None = None,
    task: Task | None = None,
    since_size: int | None = None,
) -> BundleSummary:
    """Writes a bundle about one batch, or about a task's last 90 days, and records the export in the ledger.

    `since_size` adds a proof from an earlier head of that size. Call it outside a transaction. Raises
    PermissionDenied, ValueError unless exactly one of `batch` and `task` is given, and what
    `governance.exports.services.export_bundle` raises.
    """
    if (batch is None) == (task is None):
        raise ValueError("give a batch or a task: one of them")
    subject = batch.task if batch is not None else task
    assert subject is not None
    require_role(user, batch.team if batch is not None else subject.team, *EXPORTERS)
    # First of all, so that the figures about the log are those of the log that is exported.
    drain_and_sign(key=ledger_key())
    window = Window(scope=Scope(task_id=subject.pk), days=TASK_WINDOW_DAYS, batch=batch)
    measured = _measurements(window)
    return export_bundle(
        destination=destination,
        measurements=[_measurement_json(measurement, window) for measurement in measured.values()],
        extra_files=_files(window, subject, measured),
        batch_id=batch.pk if batch is not None else None,
        task_id=subject.name if batch is None else None,
        since_size=since_size,
        actor=user.actor,
    )


def _measurements(window: Window) -> dict[str, Measurement]:
    """Of every source, by key; telemetry's own over the very window of the export."""
    elsewhere = load_rules().measurements.keys() - FIGURES.keys()
    others = collect(keys=elsewhere, scope=window.scope, window_days=window.days)
    own = {key: figure(key, window) for key, figure in FIGURES.items()}
    return {key: {**others, **own}[key] for key in sorted({*others, *own})}


def _measurement_json(measurement: Measurement, window: Window) -> dict[str, Any]:
    return {
        "key": measurement.key,
        "title": load_rules().measurements[measurement.key].title.en,
        "value": measurement.value,
        "unit": measurement.unit,
        "count": measurement.count,
        "window_start": measurement.window_start,
        "window_end": measurement.window_end,
        "measured_at": measurement.measured_at,
        "source": {
            "reckoned_by": "penstock.telemetry" if measurement.key in FIGURES else "penstock",
            "batch": window.batch.pk if window.batch else None,
            "task": window.task.name if window.task else None,
            "requests": measurement.requests_query,
        },
        "details": measurement.details,
    }


def _files(window: Window, task: Task, measured: Mapping[str, Measurement]) -> dict[str, bytes]:
    requests = window.requests
    report = report_on(task=task, requests=Request.objects.all(), batch=window.batch, days=window.days, now=window.end)
    covered = {
        catalog_id: coverage(
            catalog_id=catalog_id, scope=window.scope, window_days=window.days, now=window.end, measurements=measured
        )
        for catalog_id in load_catalogs()
    }
    ran = [window.batch.model_release_id] if window.batch else []
    releases = ModelRelease.objects.filter(
        pk__in={task.model_release_id, *ran, *requests.order_by().values_list("model_release", flat=True).distinct()}
    )
    versions = TaskVersion.objects.filter(
        task=task, version__in={task.version, *requests.order_by().values_list("task_version", flat=True).distinct()}
    )
    return {
        "summary.json": _json(window.summary.as_json()),
        "objectives.json": _json(_objectives(task, window.summary)),
        "fairness.json": _json(_fairness(report)),
        "requests.csv": _requests_csv(requests, parse_fairness_plan(task.fairness_plan).group),
        "model-releases.json": _json([_release(release) for release in releases.order_by("name")]),
        "task-versions.json": _json([_version(version) for version in versions.order_by("version")]),
        **_workbooks(covered, window.end),
    }


def _workbooks(covered: Mapping[str, list[ControlCoverage]], moment: datetime) -> dict[str, bytes]:
    rows = [
        row
        for catalog_id, controls in covered.items()
        for row in statement_rows(catalog_id=catalog_id, coverage=controls)
    ]
    files = {}
    for language in LANGUAGES:
        files[f"control-matrix.{language}.xlsx"] = control_matrix(covered, language, generated_at=moment)
        files[f"statement-of-applicability.{language}.xlsx"] = statement_of_applicability(
            rows, language, generated_at=moment
        )
    return files


def _objectives(task: Task, summary: Summary) -> list[dict[str, Any]]:
    return [
        {
            "metric": result.objective.metric,
            "target": result.objective.target,
            "value": result.value,
            "unit": result.unit,
            "verdict": str(result.verdict),
        }
        for result in judge_summary(parse_objectives(task.objectives), summary)
    ]


def _fairness(report: FairnessReport) -> dict[str, Any]:
    with translation.override("en"):
        plain = report.as_json()
    findings = {}
    for language in LANGUAGES:
        with translation.override(language):
            findings[language] = report.finding
    return {**plain, "findings": findings}


def _release(release: ModelRelease) -> dict[str, Any]:
    names = (
        "name", "status", "digest", "architecture", "parameters", "size_bytes", "context_tokens", "quantization",
        "tokenizer_digest", "licence", "supplier", "source", "source_digest", "manifest", "imported_at", "imported_by",
        "approved_at", "approved_by", "withdrawn_at",
    )  # fmt: skip
    return {name: getattr(release, name) for name in names}


def _version(version: TaskVersion) -> dict[str, Any]:
    """`digest` is the SHA-256 of `content` as RFC 8785 JSON; the ledger's entry about the version names it."""
    return {
        "task": version.task.name,
        "version": version.version,
        "digest": version.digest,
        "created_at": version.created_at,
        "created_by": version.created_by,
        "content": version.content,
    }


def _requests_csv(requests: QuerySet[Request], group_key: str) -> bytes:
    """One row a request, UTF-8. The group is the one that the fairness report compares, so that it can be redone."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(REQUEST_COLUMNS)
    writer.writerows(_request_rows(requests, group_key))
    return out.getvalue().encode()


def _request_rows(requests: QuerySet[Request], group_key: str) -> Iterator[list[str]]:
    special = {
        "batch": "batch_id",
        "task": "task__name",
        "model_release": "model_release__name",
        "cost": "usage__cost",
        "currency": "usage__currency",
        "energy_kwh": "usage__energy_kwh",
        "energy_source": "usage__energy_source",
    }
    columns = [
        KeyTextTransform(group_key, "groups") if name == "group" else special.get(name, name)
        for name in REQUEST_COLUMNS
    ]
    rows = requests.order_by("finished_at", "pk").values_list(*columns)
    for row in rows.iterator(chunk_size=ROWS_AT_A_TIME):
        yield [_cell(value) for value in row]


def _cell(value: object) -> str:
    """Empty for None. Text that a spreadsheet would take for a formula is led by an apostrophe."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case Decimal():
            return format(value, "f")
        case datetime():
            return moment_text(value)
        case list():
            return " ".join(str(item) for item in value)
        case str() if value.startswith(("=", "+", "-", "@", "\t", "\r")):
            return f"'{value}"
    return str(value)


def _json(value: object) -> bytes:
    return json.dumps(plain(value), ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n"


__all__ = ["EXPORTERS", "REQUEST_COLUMNS", "export_evidence"]

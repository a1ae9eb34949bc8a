"""`penstock batch run`: submits a file, follows it, writes what came out."""

import time
from decimal import Decimal
from pathlib import Path

from django.db import transaction
from django.utils.translation import gettext as _

from penstock.accounts.models import User
from penstock.dashboard.templatetags.figures import significant
from penstock.registry.selectors import tasks_visible_to
from penstock.serving.blobs import open_blob
from penstock.serving.models import Batch, File
from penstock.serving.records import endpoint_of, request_lines
from penstock.serving.selectors import progress
from penstock.serving.services import create_batch, create_file
from penstock.telemetry.summary import summarize

POLL_SECONDS = 0.5
READ_BYTES = 1 << 20


class BatchRunError(Exception):
    """The file or the task does not do; says which line and why."""


def submit(*, user: User, file: Path, task_name: str) -> Batch:
    """Stores the file and starts its batch. Records are rendered into requests on the way."""
    task = tasks_visible_to(user).filter(name=task_name).first()
    if task is None:
        raise BatchRunError(_("There is no task called %s; `penstock task list` shows them.") % task_name)
    with file.open("rb") as lines, transaction.atomic():
        stored = create_file(
            user=user, team=task.team, filename=file.name, purpose="batch", chunks=request_lines(lines, task=task)
        )
        return create_batch(
            user=user,
            team=task.team,
            input_file=stored,
            endpoint=endpoint_of(stored),
            metadata={"task": task.name},
            task=task,
        )


def follow(batch: Batch, *, quiet: bool) -> Batch:
    """Waits until the batch is over, with a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:
        bar = bars.add_task(batch.id, total=None, rate="")
        while True:
            batch.refresh_from_db()
            if batch.status in Batch.TERMINAL:
                return batch
            now = progress(batch)
            done = now.succeeded + now.failed + now.expired + now.cancelled
            rate = now.output_tokens_per_second
            bars.update(
                bar,
                description=str(batch.get_status_display()),
                total=now.total or None,
                completed=done,
                rate=_("%.0f output tokens/s") % rate if rate else "",
            )
            time.sleep(POLL_SECONDS)


def write_results(batch: Batch, output: Path) -> list[Path]:
    """Writes the output file, and the error file beside it, each aside and renamed. Raises BatchRunError where the
    batch failed validation, with its first bad lines."""
    if batch.status == Batch.Status.FAILED:
        errors = (batch.errors or {}).get("data", [])
        lines = [
            _("line %(line)s: %(message)s") % {"line": error.get("line") or "–", "message": error["message"]}
            for error in errors[:20]
        ]
        more = [_("… and %d more") % (len(errors) - 20)] if len(errors) > 20 else []
        raise BatchRunError("\n".join([_("The file was not accepted; nothing ran."), *lines, *more]))
    written = []
    for file, path in ((batch.output_file, output), (batch.error_file, output.with_suffix(".errors.jsonl"))):
        if file is not None:
            copy(file, path)
            written.append(path)
    return written


def copy(file: File, path: Path) -> None:
    aside = path.with_name(path.name + ".part")
    with open_blob(file.sha256) as source, aside.open("wb") as target:
        while chunk := source.read(READ_BYTES):
            target.write(chunk)
    aside.replace(path)


def summary(batch: Batch) -> dict[str, object]:
    figures = summarize(batch.requests.all()).as_json()
    chosen = (
        "requests",
        "succeeded",
        "errors_by_code",
        "output_tokens",
        "output_tokens_per_second",
        "total_tokens_per_second",
        "ttft_p95_seconds",
        "cost_total",
        "cost_per_1k_output_tokens",
        "currency",
        "energy_kwh",
        "energy_source",
    )
    return {"id": batch.id, "status": batch.status} | {name: figures[name] for name in chosen}


def summary_rows(batch: Batch) -> list[list[object]]:
    """What `summary` holds, for a person: each figure with its name and unit, None where there is none."""
    figures = summarize(batch.requests.all())
    errors = ", ".join(f"{code or '–'} × {count}" for code, count in figures.errors_by_code.items())
    costs = "; ".join(f"{money(sum_.amount)} {sum_.currency}" for sum_ in figures.costs)
    per_1k = figures.cost_per_1k_output_tokens
    rows: list[list[object]] = [
        [_("Batch"), batch.id],
        [_("Status"), batch.get_status_display()],
        [_("Requests"), f"{figures.requests:,}"],
        [_("Succeeded"), f"{figures.succeeded:,}"],
        [_("Errors"), errors or 0],
        [_("Output tokens"), None if figures.output_tokens is None else f"{figures.output_tokens:,}"],
        [_("Throughput"), with_unit(figures.output_tokens_per_second, _("tok/s"))],
        [_("Throughput with prompt tokens"), with_unit(figures.total_tokens_per_second, _("tok/s"))],
        [_("Time to first token, p95"), with_unit(figures.ttft_p95_seconds, "s")],
        [_("Cost"), costs or None],
        [_("Per 1,000 output tokens"), None if per_1k is None else f"{money(per_1k)} {figures.currency}"],
        [_("Energy"), with_unit(figures.energy_kwh, "kWh")],
    ]
    return rows


def with_unit(value: int | float | Decimal | None, unit: str) -> str | None:
    return None if value is None else f"{significant(value)} {unit}"


def money(amount: Decimal) -> str:
    return f"{amount:,.2f}" if abs(amount) >= 1 or amount == 0 else significant(amount)

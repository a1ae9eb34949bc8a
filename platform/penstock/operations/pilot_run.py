"""`penstock pilot run`: measures a pilot's baseline and trial, one after the other, and tells what follows."""

import time
from dataclasses import asdict
from pathlib import Path

from django.db import transaction
from django.utils.translation import gettext as _

from penstock.accounts.models import User
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.report import report_pdf
from penstock.pilots.returns import returns
from penstock.pilots.selectors import pilots_visible_to
from penstock.pilots.services import create_pilot, start_baseline, start_trial
from penstock.registry.selectors import tasks_visible_to
from penstock.serving.models import Batch
from penstock.serving.records import request_lines
from penstock.serving.services import create_file

POLL_SECONDS = 1.0


class PilotRunError(Exception):
    """A pilot that cannot be found, made or measured; says why."""


def find_or_create(*, user: User, name: str, task_name: str, items: Path | None, sample_items: int) -> Pilot:
    found = pilots_visible_to(user).filter(name=name).first()
    if found is not None:
        return found
    if not task_name:
        raise PilotRunError(_("There is no pilot called %s yet: name its task with --task.") % name)
    task = tasks_visible_to(user).filter(name=task_name).first()
    if task is None:
        raise PilotRunError(_("There is no task called %s; `penstock task list` shows them.") % task_name)
    with transaction.atomic():
        if items is not None:
            with items.open("rb") as lines:
                chunks = request_lines(lines, task=task)
                items_file = create_file(user=user, team=task.team, filename=items.name, purpose="batch", chunks=chunks)
        else:
            last = task.batches.filter(status=Batch.Status.COMPLETED).order_by("-created_at").first()
            if last is None:
                raise PilotRunError(_("The task has no completed batch to take items from: give --items FILE."))
            items_file = last.input_file
        return create_pilot(
            user=user, task=task, items_file=items_file, name=name, title=name, sample_items=sample_items
        )


def measure(*, user: User, pilot: Pilot, quiet: bool) -> Pilot:
    """Runs whatever has not been measured yet, and waits for it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=quiet) as bars:
        run = pilot.baseline_runs.exclude(status=BaselineRun.Status.FAILED).first()
        if run is None:
            run = start_baseline(user=user, pilot=pilot)
        bar = bars.add_task(_("Baseline"), total=pilot.sample_items)
        while run.status not in (BaselineRun.Status.COMPLETED, BaselineRun.Status.FAILED):
            time.sleep(POLL_SECONDS)
            run.refresh_from_db()
            bars.update(bar, completed=run.items.count())
        if run.status == BaselineRun.Status.FAILED:
            raise PilotRunError(_("The baseline failed: %s") % run.error_message)
        bars.update(bar, completed=run.items.count(), total=run.items.count())
        pilot.refresh_from_db()
        batch = pilot.trial_batch or start_trial(user=user, pilot=pilot)
        bar = bars.add_task(_("Trial"), total=None)
        while batch.status not in Batch.TERMINAL:
            time.sleep(POLL_SECONDS)
            batch.refresh_from_db()
            finished = batch.requests.filter(finished_at__isnull=False).count()
            bars.update(bar, completed=finished, total=batch.total or None)
        if batch.status != Batch.Status.COMPLETED:
            raise PilotRunError(
                _("The trial batch %(id)s ended as %(status)s.")
                % {"id": batch.id, "status": batch.get_status_display()}
            )
    pilot.refresh_from_db()
    return pilot


def summary(pilot: Pilot) -> dict[str, object]:
    """Every figure of the return, for scripts."""
    return {"pilot": pilot.name, **asdict(returns(pilot))}


def findings(pilot: Pilot) -> list[str]:
    """The return in a few lines, for a person."""
    found = returns(pilot)
    if not found.complete or found.baseline is None or found.trial is None:
        return [_("Not measured yet.")]
    lines = [
        _("Baseline: %(items)d items in %(seconds).1f s, %(rate).1f output tokens/s, %(cost).5f %(currency)s an item"),
        _("Trial:    %(items)d items in %(seconds).1f s, %(rate).1f output tokens/s, %(cost).5f %(currency)s an item"),
    ]
    figures = [
        line
        % {
            "items": side.items,
            "seconds": side.seconds,
            "rate": side.output_tokens_per_second or 0,
            "cost": side.cost_per_item or 0,
            "currency": found.currency,
        }
        for line, side in zip(lines, (found.baseline, found.trial), strict=True)
    ]
    if found.throughput_multiple is not None:
        figures.append(
            _("Throughput: %(multiple).1f times the baseline's [%(low).1f, %(high).1f]")
            % {
                "multiple": found.throughput_multiple,
                "low": found.throughput_multiple_low or 0,
                "high": found.throughput_multiple_high or 0,
            }
        )
    return [
        *figures,
        *map(str, found.remarks),
        _("How each figure was measured: the pilot's page, the PDF, or --json."),
    ]


def write_report(pilot: Pilot, path: Path, language: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_bytes(report_pdf(pilot=pilot, language=language))
    aside.replace(path)

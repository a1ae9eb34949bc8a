"""Every write that a person asks of pilots: planning, measuring, deciding."""

import datetime as dt
import logging
import re
from decimal import Decimal
from typing import Any

from celery import current_app
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.accounts.access import require_role
from penstock.accounts.models import User
from penstock.pilots.items import admit_items, read_items
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.selectors import (
    TRIAL_MAY_BE_REPEATED_AFTER,
    has_open_run,
    measured_run,
    trial_is_measured,
)
from penstock.pilots.transitions import TRANSITIONS, WRITERS, PilotStateError, Transition, check
from penstock.registry.models import LatencyClass, ModelRelease, Task
from penstock.serving.models import Batch, File
from penstock.serving.services import create_batch, create_file
from penstock.telemetry.models import RateCard
from penstock.telemetry.rates import current_rate_card

logger = logging.getLogger(__name__)

NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")
MEASURE_TASK = "pilots.measure_baseline"
# The queue of a latency class: only engine hosts serve it, and only they have torch.
MEASURE_QUEUE = LatencyClass.NEARLINE.value
PILOT_KEY = "pilot"

ASSUMPTIONS = ("title", "items_per_month", "introduction_cost", "discount_rate", "trial_days", "starts_on", "rate_card")


@transaction.atomic
def create_pilot(
    *,
    user: User,
    task: Task,
    items_file: File,
    name: str,
    title: str,
    sample_items: int = 16,
    items_per_month: int = 10_000,
    introduction_cost: Decimal = Decimal("0"),
    discount_rate: Decimal = Decimal("0.05"),
    trial_days: int = 90,
    starts_on: dt.date | None = None,
    rate_card: RateCard | None = None,
) -> Pilot:
    """Plans a pilot of `task` over the first `sample_items` lines of `items_file`, which are read now.

    Starts today and uses the rate card in force unless told otherwise. Raises PermissionDenied, or ValidationError
    naming the field (a line of the file that cannot be read, a name that is taken).
    """
    require_role(user, task.team, *WRITERS)
    if not NAME.fullmatch(name):
        raise ValidationError({"name": _("Use lower-case letters, digits and single hyphens between them.")})
    _check_file(task, items_file)
    pilot = Pilot(
        name=name,
        title=title.strip() or name,
        task=task,
        items_file=items_file,
        sample_items=sample_items,
        items_per_month=items_per_month,
        introduction_cost=introduction_cost,
        discount_rate=discount_rate,
        trial_days=trial_days,
        starts_on=starts_on or timezone.localdate(),
        rate_card=rate_card or current_rate_card(),
        created_by=user.actor,
    )
    pilot.full_clean()
    # A file with fewer items than asked for is compared whole.
    pilot.sample_items = len(read_items(items_file, sample_items))
    pilot.save(force_insert=True)
    record(
        kind="pilot.created",
        subject=_subject(pilot),
        payload={
            "task": task.name,
            "items_file": items_file.pk,
            "items_sha256": items_file.sha256,
            "sample_items": pilot.sample_items,
            **_assumptions(pilot),
        },
        actor=user.actor,
    )
    return pilot


@transaction.atomic
def update_pilot(*, user: User, pilot: Pilot, **changes: Any) -> Pilot:
    """Changes what the return is reckoned with (`ASSUMPTIONS`), until a decision stands on it.

    Measurements never change. Raises PermissionDenied, PilotStateError, ValidationError naming the field.
    """
    pilot = _locked(pilot)
    require_role(user, pilot.task.team, *WRITERS)
    unknown = sorted(set(changes) - set(ASSUMPTIONS))
    if unknown:
        raise ValidationError(_("A pilot has no such assumption: %(names)s.") % {"names": ", ".join(unknown)})
    if pilot.status == Pilot.Status.DECIDED:
        raise PilotStateError(_("The pilot is decided; its figures stand as they were then."))
    before = _assumptions(pilot)
    for field, value in changes.items():
        setattr(pilot, field, value)
    pilot.full_clean()
    if _assumptions(pilot) == before:
        return pilot
    pilot.save(update_fields=list(ASSUMPTIONS))
    record(
        kind="pilot.updated",
        subject=_subject(pilot),
        payload={"task": pilot.task.name, "before": before, "after": _assumptions(pilot)},
        actor=user.actor,
    )
    return pilot


@transaction.atomic
def start_baseline(*, user: User, pilot: Pilot) -> BaselineRun:
    """Has an engine host measure the items the naive way; returns the run, which tells how far it is.

    Raises PermissionDenied, PilotStateError (a run is under way, or a trial has begun), ItemsError naming a line that
    serving would refuse, ValidationError where the weights that the release was made from are not known.
    """
    transition = TRANSITIONS["start_baseline"]
    pilot = _locked(pilot)
    require_role(user, pilot.task.team, *transition.roles)
    check(transition, pilot)
    if has_open_run(pilot):
        raise PilotStateError(_("A baseline is being measured already."))
    release = pilot.task.model_release
    if not release.source_path:
        raise ValidationError(
            _("The release %(name)s does not say which weights it was made from, so there is nothing to compare with.")
            % {"name": release.name}
        )
    _check_file(pilot.task, pilot.items_file)
    admit_items(pilot, read_items(pilot.items_file, pilot.sample_items))
    try:
        with transaction.atomic():
            run = BaselineRun.objects.create(pilot=pilot)
    except IntegrityError as error:
        raise PilotStateError(_("A baseline is being measured already.")) from error
    _move(pilot, transition, user=user, release=release, run=run.pk, items=pilot.sample_items)
    transaction.on_commit(lambda: wake_measuring(run.pk))
    return run


@transaction.atomic
def start_trial(*, user: User, pilot: Pilot) -> Batch:
    """Submits the same items as a batch, decoded greedily as the baseline was.

    Raises PermissionDenied, PilotStateError (no baseline yet, a baseline or a trial under way), ItemsError, and what
    `create_file` and `create_batch` raise.
    """
    transition = TRANSITIONS["start_trial"]
    pilot = _locked(pilot)
    require_role(user, pilot.task.team, *transition.roles)
    check(transition, pilot)
    run = measured_run(pilot)
    if run is None or has_open_run(pilot):
        raise PilotStateError(_("The baseline has to be measured first."))
    if pilot.trial_batch is not None and pilot.trial_batch.status not in TRIAL_MAY_BE_REPEATED_AFTER:
        raise PilotStateError(
            _("The trial batch %(id)s is there already (%(status)s).")
            % {"id": pilot.trial_batch.pk, "status": pilot.trial_batch.get_status_display()}
        )
    release = pilot.task.model_release
    if run.method.get("source_digest", release.source_digest) != release.source_digest:
        raise PilotStateError(
            _("The task runs on another model since the baseline was measured: measure the baseline again.")
        )
    items = read_items(pilot.items_file, pilot.sample_items)
    admit_items(pilot, items)
    team = pilot.task.team
    trial_file = create_file(
        user=user,
        team=team,
        filename=f"{pilot.name}-trial.jsonl",
        purpose=File.Purpose.BATCH,
        chunks=(item.trial_line() for item in items),
    )
    pilot.trial_batch = create_batch(
        user=user,
        team=team,
        input_file=trial_file,
        endpoint=items[0].endpoint,
        metadata={"task": pilot.task.name, PILOT_KEY: pilot.name},
        task=pilot.task,
    )
    _move(pilot, transition, user=user, release=release, batch=pilot.trial_batch.pk, run=run.pk)
    return pilot.trial_batch


@transaction.atomic
def decide(*, user: User, pilot: Pilot, decision: str, reason: str) -> Pilot:
    """Ends the pilot with a decision and its reason. Stopping is possible at any time, the others once both ways are
    measured.

    Raises PermissionDenied, PilotStateError, ValidationError naming the field.
    """
    if decision not in Pilot.Decision.values:
        known = ", ".join(Pilot.Decision.values)
        raise ValidationError({"decision": _("Decide for one of: %(known)s.") % {"known": known}})
    if not reason.strip():
        raise ValidationError({"reason": _("A decision needs its reason: the next reader was not there.")})
    transition = TRANSITIONS["stop" if decision == Pilot.Decision.STOP else "decide"]
    pilot = _locked(pilot)
    require_role(user, pilot.task.team, *transition.roles)
    check(transition, pilot)
    if decision != Pilot.Decision.STOP and not trial_is_measured(pilot):
        raise PilotStateError(_("The trial has to complete first; until then a pilot can only be stopped."))
    pilot.decision = decision
    pilot.decision_reason = reason.strip()
    pilot.decided_at = timezone.now()
    pilot.decided_by = user.username
    _move(
        pilot,
        transition,
        user=user,
        release=pilot.task.model_release,
        decision=decision,
        batch=pilot.trial_batch_id,
        **_assumptions(pilot),
    )
    return pilot


def wake_measuring(run_id: int) -> bool:
    """Tells an engine host of a run. No broker is no error: the sweep tells again."""
    try:
        current_app.send_task(MEASURE_TASK, args=[run_id], queue=MEASURE_QUEUE, retry=False)
    except Exception as error:
        # kombu raises the transport's own errors too (redis, OSError), which have no common base.
        logger.warning("no broker for baseline run %s: %s; the sweep will send it", run_id, error)
        return False
    return True


def _locked(pilot: Pilot) -> Pilot:
    return (
        Pilot.objects.select_for_update(of=("self",))
        .select_related("task__team", "task__model_release", "items_file", "rate_card", "trial_batch")
        .get(pk=pilot.pk)
    )


def _move(pilot: Pilot, transition: Transition, *, user: User, release: ModelRelease, **payload: Any) -> None:
    before = pilot.status
    pilot.status = transition.target
    pilot.save(
        update_fields=["status", "trial_batch", "decision", "decision_reason", "decided_at", "decided_by"],
    )
    record(
        kind=transition.kind,
        subject=_subject(pilot),
        payload={
            "task": pilot.task.name,
            "release": release.name,
            "before": before,
            "after": str(transition.target),
            **payload,
        },
        actor=user.actor,
    )


def _check_file(task: Task, file: File) -> None:
    problem = ""
    if file.team_id != task.team_id or file.deleted_at is not None:
        problem = _("There is no file %(id)s in the task's team.")
    elif file.purpose != File.Purpose.BATCH:
        problem = _("The file %(id)s is not the input of a batch.")
    if problem:
        raise ValidationError({"items_file": problem % {"id": file.pk}})


def _assumptions(pilot: Pilot) -> dict[str, Any]:
    return {
        "title": pilot.title,
        "items_per_month": pilot.items_per_month,
        "introduction_cost": f"{pilot.introduction_cost:.2f}",
        "discount_rate": f"{pilot.discount_rate:.4f}",
        "trial_days": pilot.trial_days,
        "starts_on": pilot.starts_on.isoformat(),
        "rate_card": pilot.rate_card_id,
    }


def _subject(pilot: Pilot) -> str:
    return pilot.name

"""Batches: asked for, and asked to stop."""

import json
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.accounts.access import require_role
from penstock.accounts.models import ApiKey, Role, Team, User
from penstock.registry.models import ModelRelease, Task
from penstock.registry.policy import unassigned_task
from penstock.serving import blobs, dispatch
from penstock.serving.admission import TASK_KEY, resolve_task, unknown_endpoint
from penstock.serving.bodies import ENDPOINTS, check_metadata
from penstock.serving.identifiers import new_batch_id
from penstock.serving.models import Batch, File
from penstock.serving.rejection import Rejected

COMPLETION_WINDOW = "24h"
WINDOW = timedelta(hours=24)
RUNNERS = (Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER)
FIRST_LINE_BYTES = 4 * 1024 * 1024


def create_batch(
    *,
    user: User,
    team: Team,
    input_file: File,
    endpoint: str,
    completion_window: str = COMPLETION_WINDOW,
    metadata: dict[str, Any] | None = None,
    task: Task | None = None,
    api_key: ApiKey | None = None,
    idempotency_key: str | None = None,
) -> Batch:
    """The row of a batch; on commit, intake is woken to read its file.

    What is wrong within the file is found by intake and told in `errors`. With an idempotency key seen before, the
    batch that it made is returned. Raises PermissionDenied; Rejected naming the parameter.
    """
    require_role(user, team, *RUNNERS)
    pairs = check_metadata(metadata)
    if task is not None:
        pairs[TASK_KEY] = task.name  # as a program would have named it; intake counts lines for it that name none
    if endpoint not in ENDPOINTS:
        raise unknown_endpoint(endpoint)
    if completion_window != COMPLETION_WINDOW:
        raise Rejected(
            http_status=400,
            code="invalid_completion_window",
            param="completion_window",
            message=_("The completion window is '24h'; '%(given)s' is not served.") % {"given": completion_window},
        )
    if idempotency_key is not None and not 0 < len(idempotency_key) <= 255:
        raise Rejected(
            http_status=400,
            code="invalid_idempotency_key",
            param="Idempotency-Key",
            message=_("An idempotency key has 1 to 255 characters."),
        )
    if idempotency_key is not None:
        earlier = Batch.objects.filter(team=team, idempotency_key=idempotency_key).first()
        if earlier is not None:
            return _same_or_conflict(earlier, input_file, endpoint, pairs)
    _check_input(input_file, team)
    chosen, release = _provisional_task(team, api_key, task, pairs, input_file)
    now = timezone.now()
    try:
        with transaction.atomic():
            batch = Batch.objects.create(
                id=new_batch_id(),
                team=team,
                task=chosen,
                task_version=chosen.version,
                model_release=release,
                latency_class=chosen.latency_class,
                api_key=api_key,
                created_by=user.username,
                input_file=input_file,
                endpoint=endpoint,
                completion_window=completion_window,
                metadata=pairs,
                idempotency_key=idempotency_key,
                created_at=now,
                expires_at=now + WINDOW,
            )
            record(
                kind="batch.created",
                subject=batch.pk,
                payload={
                    "team": team.slug,
                    "task": chosen.name,
                    "endpoint": endpoint,
                    "input_file": input_file.pk,
                    "input_sha256": input_file.sha256,
                    "input_size_bytes": input_file.size_bytes,
                    "person": user.username,
                },
                actor=user.actor,
            )
            transaction.on_commit(lambda: dispatch.wake_intake(batch.pk))
    except IntegrityError:
        earlier = Batch.objects.filter(team=team, idempotency_key=idempotency_key).first()
        if idempotency_key is None or earlier is None:
            raise
        return _same_or_conflict(earlier, input_file, endpoint, pairs)
    return batch


def cancel_batch(*, user: User, batch: Batch) -> Batch:
    """Asks a batch to stop: what has not started is cancelled, what has finished is kept and handed out.

    Cancelling it again changes nothing. Raises PermissionDenied; Rejected (409) when it is over otherwise.
    """
    require_role(user, batch.team, *RUNNERS)
    with transaction.atomic():
        locked = Batch.objects.select_for_update().get(pk=batch.pk)
        if locked.status in (Batch.Status.CANCELLED, Batch.Status.CANCELLING):
            return locked
        if locked.status not in (Batch.Status.VALIDATING, Batch.Status.IN_PROGRESS):
            raise Rejected(
                http_status=409,
                code="batch_not_cancellable",
                param="batch_id",
                message=_("The batch cannot be cancelled any more: it is %(status)s.")
                % {"status": locked.get_status_display()},
            )
        locked.cancelling_at = timezone.now()
        locked.cancelled_by = user.actor
        if locked.status == Batch.Status.VALIDATING:  # no request of it exists yet
            locked.status = Batch.Status.CANCELLED
            locked.cancelled_at = locked.cancelling_at
            record(
                kind="batch.cancelled",
                subject=locked.pk,
                payload={"task": locked.task.name, "total": 0, "succeeded": 0, "failed": 0, "cancelled": 0},
                actor=user.actor,
            )
        else:
            locked.status = Batch.Status.CANCELLING
            transaction.on_commit(lambda: dispatch.wake_close(locked.pk))
        locked.save(update_fields=["status", "cancelling_at", "cancelled_at", "cancelled_by"])
    return locked


def _check_input(input_file: File, team: Team) -> None:
    problem = None
    if input_file.team_id != team.pk or input_file.deleted_at is not None:
        problem = _("There is no file '%(id)s' in this team.")
    elif input_file.expires_at is not None and input_file.expires_at <= timezone.now():
        problem = _("The file '%(id)s' has expired; upload it again.")
    elif input_file.purpose != File.Purpose.BATCH:
        problem = _("The file '%(id)s' was not uploaded with the purpose 'batch'.")
    if problem:
        raise Rejected(
            http_status=400, code="invalid_input_file", param="input_file_id", message=problem % {"id": input_file.pk}
        )


def _same_or_conflict(earlier: Batch, input_file: File, endpoint: str, metadata: dict[str, str]) -> Batch:
    if (earlier.input_file_id, earlier.endpoint, earlier.metadata) == (input_file.pk, endpoint, metadata):
        return earlier
    raise Rejected(
        http_status=409,
        code="idempotency_conflict",
        param="Idempotency-Key",
        message=_("This idempotency key made another batch, '%(id)s', from other parameters.") % {"id": earlier.pk},
    )


def _provisional_task(
    team: Team, api_key: ApiKey | None, task: Task | None, metadata: dict[str, str], input_file: File
) -> tuple[Task, ModelRelease]:
    """What the batch counts for until intake has read its lines, which decide.

    The task given; else the one that the batch's metadata, the first line or the key names; else the team's unassigned
    task on the first approved release, for a file whose first line says nothing usable.
    """
    if task is not None:
        if task.team_id != team.pk:
            raise Rejected(
                http_status=400,
                code="task_not_found",
                param="task",
                message=_("The team has no task named '%(name)s'.") % {"name": task.name},
            )
        return task, task.model_release
    named = metadata.get(TASK_KEY, "")
    if named:
        return resolve_task(team=team, api_key=api_key, model=named, task_name=named)
    model, line_task = _first_line_names(input_file)
    try:
        return resolve_task(team=team, api_key=api_key, model=model, task_name=line_task)
    except Rejected:
        release = ModelRelease.objects.filter(status=ModelRelease.Status.APPROVED).order_by("pk").first()
        if release is None:
            raise
        return unassigned_task(team, release), release


def _first_line_names(input_file: File) -> tuple[str, str]:
    """Model and task that the first line names; empty text for what it does not name."""
    with blobs.open_blob(input_file.sha256) as stream:
        raw = stream.readline(FIRST_LINE_BYTES)
    try:
        body = json.loads(raw)["body"]
        model, line_metadata = body.get("model"), body.get("metadata") or {}
        named = line_metadata.get(TASK_KEY) if isinstance(line_metadata, dict) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", ""
    return (
        model if isinstance(model, str) and "\x00" not in model else "",
        named if isinstance(named, str) and "\x00" not in named else "",
    )

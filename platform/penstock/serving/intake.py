"""Intake: reads a batch's file as a stream, checks each line, and makes its requests and shards.

1. Every line is checked before anything is written; accepted lines are spooled to a temporary file, not kept in memory.
2. Any bad line fails the batch, with every bad line told.
3. Otherwise requests are COPYed in, with shards, new state and ledger event, in one transaction that begins by locking
   the batch and looking whether it still waits: running intake twice, or killing it anywhere, changes nothing.
"""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

from django.db import connection, transaction
from django.utils import timezone
from django.utils.translation import gettext as _
from psycopg import sql

from governance.ledger.services import record
from penstock.config import config
from penstock.registry.models import ModelRelease, Task
from penstock.serving import blobs, dispatch
from penstock.serving.admission import TASK_KEY, Admitted
from penstock.serving.digests import prompt_digest
from penstock.serving.identifiers import new_batch_request_id, new_salt
from penstock.serving.lines import Resolver, Tokenizers, bad_line, check_line, numbered_lines
from penstock.serving.models import Batch, Request, Shard
from penstock.serving.rejection import Rejected

logger = logging.getLogger(__name__)

MAX_TOLD_ERRORS = 1000
COLUMNS = (
    "id", "batch_id", "shard_id", "line", "custom_id", "team_id", "task_id", "task_version", "model_release_id",
    "latency_class", "api_key_id", "created_by", "endpoint", "body", "groups", "salt", "prompt_digest", "status",
    "created_at", "output_text", "output_digest", "finish_reason", "error_code", "error_message",
    "truncated", "detected_language", "violations",
)  # fmt: skip


@dataclass(slots=True)
class Checked:
    """What reading the file found."""

    spool: IO[str]
    task: Task | None = None
    release: ModelRelease | None = None
    first_line: int = 0
    total: int = 0
    errors: list[Rejected] = field(default_factory=list)
    bad_lines: int = 0

    def blame(self, problem: Rejected) -> None:
        self.bad_lines += 1
        for one in (problem, *problem.further):
            one.line = problem.line
            if len(self.errors) < MAX_TOLD_ERRORS:
                self.errors.append(one)


def intake(batch_id: str) -> None:
    """Takes a batch in, or fails it. Does nothing for a batch that does not wait for it, or that is being read now."""
    with _reading(batch_id) as alone:
        if alone:
            _intake(batch_id)


@contextmanager
def _reading(batch_id: str) -> Iterator[bool]:
    """Whether nobody else reads this batch's file; PostgreSQL frees the lock if this process dies."""
    key = [f"intake {batch_id}"]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", key)
        alone = bool(cursor.fetchone()[0])
    try:
        yield alone
    finally:
        if alone:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", key)


def _intake(batch_id: str) -> None:
    batch = Batch.objects.select_related("team", "api_key", "input_file").filter(pk=batch_id).first()
    if batch is None or batch.status != Batch.Status.VALIDATING:
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8") as spool:
        checked = check_file(batch, spool)
        if checked.errors:
            fail_batch(batch_id, checked.errors, unlisted=checked.bad_lines - len({e.line for e in checked.errors}))
            return
        shards = _take_in(batch, checked)
    for position, shard in enumerate(shards):
        if not dispatch.wake_shard(shard.pk, shard.batch.latency_class):
            unsent = [one.pk for one in shards[position:]]
            Shard.objects.filter(pk__in=unsent).update(dispatched_at=None)
            break


def check_file(batch: Batch, spool: IO[str]) -> Checked:
    """Checks every line of the batch's file; accepted ones go to `spool`, one JSON array of column values a line."""
    checked = Checked(spool)
    resolver, tokenizers, seen = Resolver(), Tokenizers(), dict[str, int]()
    try:
        for number, raw in numbered_lines(batch.input_file.sha256):
            if checked.total + checked.bad_lines >= config().max_batch_rows:
                checked.blame(_too_many_rows(number))
                break
            try:
                custom_id, admitted = check_line(
                    raw, batch=batch, number=number, seen=seen, resolver=resolver, tokenizers=tokenizers
                )
                _check_same_task(checked, admitted, number)
            except Rejected as problem:
                problem.line = number
                checked.blame(problem)
                continue
            checked.total += 1
            if not checked.errors:
                _spool(checked, number, custom_id, admitted)
    except blobs.BlobMissing as error:
        checked.blame(Rejected(http_status=400, code="file_missing", param="input_file_id", message=str(error)))
    if not checked.total and not checked.errors:
        checked.blame(
            Rejected(
                http_status=400,
                code="empty_file",
                param="input_file_id",
                message=_("The file holds no request; it must have one JSON object a line."),
            )
        )
    return checked


def fail_batch(batch_id: str, errors: list[Rejected], *, unlisted: int = 0) -> None:
    """Fails a waiting batch, telling all `errors`, and how many more bad lines there are. Else does nothing."""
    told = [error.as_batch_error() for error in errors]
    if unlisted > 0:
        message = _("%(count)d more lines have errors that are not listed.") % {"count": unlisted}
        told.append({"code": "more_errors", "message": message, "param": None, "line": None})
    with transaction.atomic():
        batch = Batch.objects.select_for_update().select_related("task").get(pk=batch_id)
        if batch.status != Batch.Status.VALIDATING:
            return
        batch.status = Batch.Status.FAILED
        batch.failed_at = timezone.now()
        batch.errors = {"object": "list", "data": told}
        batch.save(update_fields=["status", "failed_at", "errors"])
        codes = sorted({error.code for error in errors})
        record(
            kind="batch.failed",
            subject=batch.pk,
            payload={"task": batch.task.name, "errors": len(errors) + max(0, unlisted), "codes": codes},
            actor="system",
        )


def _too_many_rows(number: int) -> Rejected:
    most = config().max_batch_rows
    message = _("A batch may have %(most)d requests; split the file.") % {"most": most}
    return Rejected(
        http_status=400, code="too_many_requests_in_file", param="input_file_id", message=message, line=number
    )


def _check_same_task(checked: Checked, admitted: Admitted, number: int) -> None:
    if checked.task is None:
        checked.task, checked.release, checked.first_line = admitted.task, admitted.release, number
    elif admitted.task.pk != checked.task.pk:
        raise bad_line(
            "mixed_tasks",
            "body.metadata.task" if TASK_KEY in (admitted.body.get("metadata") or {}) else "body.model",
            _("This line counts for the task '%(task)s', line %(first)d for '%(other)s'; a batch has one task.")
            % {"task": admitted.task.name, "first": checked.first_line, "other": checked.task.name},
        )


def _spool(checked: Checked, number: int, custom_id: str, admitted: Admitted) -> None:
    json.dump([number, custom_id, admitted.body, admitted.groups], checked.spool, ensure_ascii=False)
    checked.spool.write("\n")


def _take_in(batch: Batch, checked: Checked) -> list[Shard]:
    """Writes requests, shards and state, all or nothing; no shards if the batch no longer waits."""
    assert checked.task is not None and checked.release is not None
    rows_a_shard = config().shard_rows
    with transaction.atomic():
        locked = Batch.objects.select_for_update().get(pk=batch.pk)
        if locked.status != Batch.Status.VALIDATING:
            return []
        now = timezone.now()
        locked.task, locked.task_version = checked.task, checked.task.version
        locked.model_release, locked.latency_class = checked.release, checked.task.latency_class
        locked.total = checked.total
        locked.status, locked.in_progress_at = Batch.Status.IN_PROGRESS, now
        locked.save(
            update_fields=[
                "task", "task_version", "model_release", "latency_class", "total", "status", "in_progress_at",
            ]
        )  # fmt: skip
        count = -(-checked.total // rows_a_shard)
        shards = Shard.objects.bulk_create(
            [Shard(batch=locked, number=number, dispatched_at=now) for number in range(count)]
        )
        _copy_requests(locked, shards, checked.spool, rows_a_shard)
        record(
            kind="batch.started",
            subject=locked.pk,
            payload={
                "task": checked.task.name,
                "task_version": checked.task.version,
                "release": checked.release.name,
                "release_digest": checked.release.digest,
                "total": checked.total,
            },
            actor="system",
        )
    return shards


def _copy_requests(batch: Batch, shards: list[Shard], spool: IO[str], rows_a_shard: int) -> None:
    spool.seek(0)
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
        sql.Identifier(Request._meta.db_table), sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
    )
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for index, text in enumerate(spool):
            number, custom_id, body, groups = json.loads(text)
            salt = new_salt()
            copy.write_row(
                (
                    new_batch_request_id(), batch.pk, shards[index // rows_a_shard].pk, number, custom_id,
                    batch.team_id, batch.task_id, batch.task_version, batch.model_release_id, batch.latency_class,
                    batch.api_key_id, batch.created_by, batch.endpoint, json.dumps(body, ensure_ascii=False),
                    json.dumps(groups, ensure_ascii=False), salt, prompt_digest(salt, body),
                    Request.Status.QUEUED.value, batch.in_progress_at, "", "", "", "", "", False, "", "[]",
                )
            )  # fmt: skip

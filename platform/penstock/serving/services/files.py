"""Files: what was uploaded and what batches wrote."""

from collections.abc import Iterable
from datetime import timedelta
from pathlib import PurePath

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.accounts.access import require_role
from penstock.accounts.models import Role, Team, User
from penstock.config import config
from penstock.serving import blobs
from penstock.serving.identifiers import new_file_id
from penstock.serving.models import Batch, File
from penstock.serving.rejection import Rejected

UPLOAD_PURPOSES = (File.Purpose.BATCH, File.Purpose.USER_DATA)
BATCH_INPUT_DAYS = 30
MIN_EXPIRY_SECONDS = 3600
MAX_EXPIRY_SECONDS = 2_592_000
WRITERS = (Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER)


def create_file(
    *,
    user: User,
    team: Team,
    filename: str,
    purpose: str,
    chunks: Iterable[bytes],
    expires_after_seconds: int | None = None,
) -> File:
    """Keeps an upload. Raises PermissionDenied; Rejected for its purpose, its expiry or its size."""
    require_role(user, team, *WRITERS)
    if purpose not in UPLOAD_PURPOSES:
        raise Rejected(
            http_status=400,
            code="invalid_purpose",
            param="purpose",
            message=_("'%(purpose)s' is not a purpose that can be uploaded; use one of: %(known)s.")
            % {"purpose": purpose, "known": ", ".join(UPLOAD_PURPOSES)},
        )
    name = plain_filename(filename)
    lifetime = _lifetime(purpose, expires_after_seconds)
    limit_bytes = config().max_file_bytes
    try:
        blob = blobs.store(chunks, limit_bytes=limit_bytes)
    except blobs.BlobTooLarge as error:
        raise Rejected(
            http_status=413,
            code="file_too_large",
            param="file",
            message=_("%(name)s is larger than the %(limit)d bytes allowed for a file.")
            % {"name": name, "limit": limit_bytes},
        ) from error
    now = timezone.now()
    with transaction.atomic():
        file = File.objects.create(
            id=new_file_id(),
            team=team,
            filename=name,
            purpose=purpose,
            size_bytes=blob.size_bytes,
            sha256=blob.sha256,
            created_at=now,
            created_by=user.username,
            expires_at=now + lifetime if lifetime else None,
        )
        _record_created(file, actor=user.username)
    return file


def plain_filename(given: str) -> str:
    """The last part of a path, of printable characters only.

    A system's file names are bytes: they may hold line ends, which no HTTP header can carry, and what is not UTF-8,
    which PostgreSQL cannot keep.
    """
    name = PurePath(given.replace("\\", "/")).name
    return "".join(character if character.isprintable() else "\ufffd" for character in name)[:255] or "upload.jsonl"


def create_output_file(*, batch: Batch, filename: str, blob: blobs.Blob) -> File:
    """The row of a file that finalising wrote; called in its transaction."""
    file = File.objects.create(
        id=new_file_id(),
        team=batch.team,
        filename=filename,
        purpose=File.Purpose.BATCH_OUTPUT,
        size_bytes=blob.size_bytes,
        sha256=blob.sha256,
        created_at=timezone.now(),
        created_by=batch.created_by,
    )
    _record_created(file, actor="system")
    return file


def delete_file(*, user: User, file: File) -> None:
    """Marks a file deleted: nobody can read it any more. Deleting it twice is no error.

    Raises PermissionDenied; Rejected (409) while a batch still reads it.
    """
    require_role(user, file.team, *WRITERS)
    with transaction.atomic():
        locked = File.objects.select_for_update().get(pk=file.pk)
        if locked.deleted_at is not None:
            return
        if locked.batches.exclude(status__in=Batch.TERMINAL).exists():
            raise Rejected(
                http_status=409,
                code="file_in_use",
                param="file_id",
                message=_("A batch that is not over yet reads this file; cancel the batch, or wait for its end."),
            )
        locked.deleted_at = timezone.now()
        locked.save(update_fields=["deleted_at"])
        record(
            kind="file.deleted",
            subject=locked.pk,
            payload={"file_id": locked.pk, "sha256": locked.sha256, "team": locked.team.slug},
            actor=user.username,
        )


def _lifetime(purpose: str, expires_after_seconds: int | None) -> timedelta | None:
    if expires_after_seconds is None:
        return timedelta(days=BATCH_INPUT_DAYS) if purpose == File.Purpose.BATCH else None
    if not MIN_EXPIRY_SECONDS <= expires_after_seconds <= MAX_EXPIRY_SECONDS:
        raise Rejected(
            http_status=400,
            code="invalid_expiry",
            param="expires_after.seconds",
            message=_("A file can expire after %(least)d to %(most)d seconds; %(given)d was asked for.")
            % {"least": MIN_EXPIRY_SECONDS, "most": MAX_EXPIRY_SECONDS, "given": expires_after_seconds},
        )
    return timedelta(seconds=expires_after_seconds)


def _record_created(file: File, *, actor: str) -> None:
    record(
        kind="file.created",
        subject=file.pk,
        payload={
            "file_id": file.pk,
            "sha256": file.sha256,
            "size_bytes": file.size_bytes,
            "purpose": file.purpose,
            "team": file.team.slug,
        },
        actor=actor,
    )

"""Taking in model releases, approving and withdrawing them."""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.accounts.access import require_role
from penstock.accounts.models import Role, User
from penstock.registry.models import ModelRelease, Task
from penstock.registry.transitions import RELEASE_TRANSITIONS, check

if TYPE_CHECKING:
    from inference.weights import StoreManifest

Quantize = Literal["keep", "int4", "int8", "bf16"]
NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")


def import_release(
    *,
    user: User,
    source: Path,
    name: str,
    licence: str = "",
    supplier: str = "",
    quantize: Quantize = "keep",
    group_size: int = 32,
    calibrate: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelRelease:
    """Takes a GGUF file, Hugging Face folder or store into `settings.MODELS_DIR/<name>` and registers it as a release.

    The row is written only once the store is complete on disk, so a release is never half there; what an import that
    was killed left behind is cleared by the next one. `quantize`, `group_size` and `calibrate` are those of
    `inference.weights.import_model`; calibrating imports torch. `progress` gets (weights done, weights in all). An
    operator or approver of any team may.

    Raises PermissionDenied, ValidationError naming the field (a name or content that exists already), and what
    `inference.weights.import_model` raises: ModelFormatError for a truncated or malformed file, StoreError for a full
    disk, QuantizationError.
    """
    from inference.weights import import_model

    require_role(user, None, Role.OPERATOR, Role.APPROVER)
    source = Path(source).expanduser()
    if not source.exists():
        raise ValidationError({"source": _("There is nothing at %(path)s.") % {"path": source}})
    _check_name(name)
    models = Path(settings.MODELS_DIR)
    with one_import_at_a_time(models):
        _check_name(name)  # another import may have taken it while this one waited
        _clear_leftovers(models, name)
        store = models / name
        manifest = import_model(
            source, store, quantize=quantize, group_size=group_size, calibrate=calibrate, progress=progress
        )
        try:
            return _register(user, source, store, manifest, name=name, licence=licence, supplier=supplier)
        except BaseException:
            shutil.rmtree(store, ignore_errors=True)
            raise


def approve_release(*, user: User, release: ModelRelease) -> ModelRelease:
    """Lets tasks run on a release. Raises PermissionDenied unless an approver, TransitionError."""
    return _move(user=user, release=release, name="approve")


def withdraw_release(*, user: User, release: ModelRelease) -> ModelRelease:
    """Ends the use of a release for good; what ran on it stays on record. Errors as for `approve_release`."""
    return _move(user=user, release=release, name="withdraw")


@transaction.atomic
def _move(*, user: User, release: ModelRelease, name: str) -> ModelRelease:
    transition = RELEASE_TRANSITIONS[name]
    require_role(user, None, *transition.roles)
    release = ModelRelease.objects.select_for_update().get(pk=release.pk)
    before = ModelRelease.Status(release.status)
    check(transition, name=release.name, status=before)
    release.status = transition.target
    if transition.target == ModelRelease.Status.APPROVED:
        release.approved_at = timezone.now()
        release.approved_by = user.username
    else:
        release.withdrawn_at = timezone.now()
    release.save(update_fields=["status", "approved_at", "approved_by", "withdrawn_at"])
    record(
        kind=transition.kind,
        subject=release.name,
        payload={"digest": release.digest, "before": str(before), "after": str(transition.target)},
        actor=user.actor,
    )
    return release


def _check_name(name: str) -> None:
    problem = ""
    if not NAME.fullmatch(name) or len(name) > 80:
        problem = _("Use at most 80 lower-case letters, digits and single hyphens between them.")
    elif ModelRelease.objects.filter(name=name).exists():
        problem = _("A model release named %(name)s exists already; a release never changes, so choose another name.")
    elif Task.objects.filter(name=name).exists():
        problem = _("A task is named %(name)s, and programs name either as their model.")
    if problem:
        raise ValidationError({"name": problem % {"name": name}})


@contextmanager
def one_import_at_a_time(models: Path) -> Iterator[None]:
    """Holds a lock that the system lets go when the process ends, however it ends."""
    models.mkdir(parents=True, exist_ok=True)
    handle = os.open(models / ".import.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _clear_leftovers(models: Path, name: str) -> None:
    """Removes what imports that were killed left: their partial folders, and a store that no release refers to."""
    for partial in models.glob(".*.partial"):
        shutil.rmtree(partial)
    store = models / name
    if store.exists() and not ModelRelease.objects.filter(store_path=str(store)).exists():
        shutil.rmtree(store)


@transaction.atomic
def _register(
    user: User, source: Path, store: Path, manifest: "StoreManifest", *, name: str, licence: str, supplier: str
) -> ModelRelease:
    twin = ModelRelease.objects.filter(digest=manifest.digest).first()
    if twin is not None:
        raise ValidationError({"source": _("These weights are registered already, as %(name)s.") % {"name": twin.name}})
    papers = asdict(manifest)
    papers.pop("tensors")  # thousands of rows that the store's own manifest holds; its digest covers them
    release = ModelRelease(
        name=name,
        digest=manifest.digest,
        architecture=manifest.config.architecture,
        parameters=manifest.parameters,
        size_bytes=manifest.total_bytes,
        context_tokens=manifest.config.max_context,
        quantization=str(manifest.quantization["scheme"]),
        tokenizer_digest=_tokenizer_digest(manifest),
        licence=licence or manifest.licence or "",
        supplier=supplier,
        source=manifest.source_name,
        source_digest=manifest.source_digest,
        store_path=str(store),
        source_path=str(source.resolve()),
        manifest=papers,
        imported_by=user.username,
    )
    release.full_clean()
    release.save()
    record(
        kind="release.imported",
        subject=name,
        payload={
            "digest": release.digest,
            "source": release.source,
            "source_digest": release.source_digest,
            "quantization": release.quantization,
            "parameters": release.parameters,
            "licence": release.licence,
            "supplier": supplier,
        },
        actor=user.actor,
    )
    return release


def _tokenizer_digest(manifest: "StoreManifest") -> str:
    """SHA-256 over one line of digest and name for each tokenizer file, in order of name."""
    digests = {file.name: file.sha256 for file in manifest.files}
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(manifest.tokenizer_files))
    return hashlib.sha256(lines.encode()).hexdigest()

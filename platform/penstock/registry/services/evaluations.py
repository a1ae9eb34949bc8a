"""Measuring a release against its reference, and keeping what came out."""

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.accounts.access import require_role
from penstock.accounts.models import User
from penstock.registry.models import ModelRelease, ReleaseEvaluation
from penstock.registry.services.releases import one_import_at_a_time
from penstock.registry.transitions import RELEASE_TRANSITIONS, check

if TYPE_CHECKING:
    from inference.scoring import Scorer

logger = logging.getLogger(__name__)


def evaluate_release(
    *,
    user: User,
    release: ModelRelease,
    text: Path,
    task: Path | None = None,
    reference: Path | None = None,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReleaseEvaluation:
    """Runs a release and its reference over a held-out text (and a task's items), and records the figures.

    The reference, computed in float32, is `reference` (a store, GGUF file or Hugging Face folder), else the source that
    the release was imported from if that is still there unchanged, else the release's own weights. It takes minutes and
    imports torch, so it is for the terminal and for workers. `progress` gets (tokens done, tokens in all).

    An operator or approver of any team may. Raises PermissionDenied, TransitionError for a withdrawn release,
    ValidationError naming the field, and what `inference.evaluate.evaluate` and the loading of models raise.
    """
    from inference.evaluate import evaluate
    from inference.scoring import Scorer

    transition = RELEASE_TRANSITIONS["evaluate"]
    require_role(user, None, *transition.roles)
    check(transition, name=release.name, status=ModelRelease.Status(release.status))
    content = _text(text)
    ours = Scorer.load(release.store_path)
    if ours.manifest.digest != release.digest:
        message = _("The weights at %(path)s are not this release's: their digest is %(digest)s.")
        raise ValidationError({"release": message % {"path": release.store_path, "digest": ours.manifest.digest}})
    theirs = Scorer.load(reference, compute="fp32") if reference is not None else _reference(release)
    result = evaluate(ours, content, reference=theirs, max_tokens=max_tokens, task=task, progress=progress)
    return _record(
        user=user,
        release=release,
        figures=result.to_dict(),
        text=text,
        task_sha256=hashlib.sha256(task.read_bytes()).hexdigest() if task is not None else "",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = _("%(path)s cannot be read as UTF-8 text: %(error)s") % {"path": path, "error": error}
        raise ValidationError({"text": message}) from None


def _reference(release: ModelRelease) -> "Scorer":
    """The unchanged source in float32, or the release's own weights in float32.

    The source becomes a store beside the releases for as long as it is being loaded; nothing else is imported or
    cleared away meanwhile.
    """
    from inference.errors import InferenceError
    from inference.scoring import Scorer
    from inference.weights import import_model

    source = Path(release.source_path) if release.source_path else None
    if source is not None and source.exists():
        models = Path(settings.MODELS_DIR)
        store = models / f".{release.name}.reference.partial"
        with one_import_at_a_time(models):
            shutil.rmtree(store, ignore_errors=True)
            try:
                if import_model(source, store).source_digest == release.source_digest:
                    return Scorer.load(store, compute="fp32")
            except InferenceError as error:
                logger.warning("%s cannot be the reference of %s: %s", source, release.name, error)
            finally:
                shutil.rmtree(store, ignore_errors=True)
    return Scorer.load(release.store_path, compute="fp32")


@transaction.atomic
def _record(
    *, user: User, release: ModelRelease, figures: dict[str, Any], text: Path, task_sha256: str
) -> ReleaseEvaluation:
    transition = RELEASE_TRANSITIONS["evaluate"]
    release = ModelRelease.objects.select_for_update().get(pk=release.pk)
    before = ModelRelease.Status(release.status)
    check(transition, name=release.name, status=before)
    evaluation = ReleaseEvaluation.objects.create(
        release=release,
        figures=figures,
        text_name=text.name[:200],
        text_sha256=figures["text_sha256"],
        task_sha256=task_sha256,
        reference_digest=figures["reference"]["digest"],
        evaluated_by=user.username,
    )
    # An approved release stays approved, whatever a later evaluation says: withdrawing is a person's decision.
    if before == ModelRelease.Status.IMPORTED:
        release.status = transition.target
        release.save(update_fields=["status"])
    task = figures["task"]
    record(
        kind=transition.kind,
        subject=release.name,
        payload={
            "digest": release.digest,
            "before": str(before),
            "after": str(release.status),
            "reference_digest": evaluation.reference_digest,
            "reference_compute": figures["reference"]["compute"],
            "compute": figures["model"]["compute"],
            "text_sha256": evaluation.text_sha256,
            "task_sha256": task_sha256,
            "scored_tokens": figures["scored_tokens"],
            "perplexity": figures["perplexity"]["value"],
            "reference_perplexity": figures["reference_perplexity"]["value"],
            "top1_agreement": figures["top1_agreement"]["value"],
            "kl_mean_nats": figures["kl_mean_nats"]["value"],
            "task_accuracy": None if task is None else task["accuracy"],
        },
        actor=user.actor,
    )
    return evaluation

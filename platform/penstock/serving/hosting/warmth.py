"""Loads, before anybody waits for it, what the first request would have to wait for."""

import logging

from django.db import close_old_connections

from penstock.registry.models import ModelRelease
from penstock.serving.hosting.engines import EnginePool, EngineUnavailable
from penstock.serving.models import Request
from penstock.serving.outcome import warm_up

logger = logging.getLogger(__name__)


def likely_release() -> ModelRelease | None:
    """The approved release that ran last; before anything has run, the one approved first."""
    approved = ModelRelease.objects.filter(status=ModelRelease.Status.APPROVED)
    last = Request.objects.filter(model_release__in=approved).order_by("-created_at").first()
    return last.model_release if last is not None else approved.order_by("approved_at").first()


def warm(engines: EnginePool) -> None:
    """Loads the likely release's engine and the checks of outputs. What fails here is told when a request needs it.

    The host's peaks are measured for it, once a host: against them every run is told what bound it.
    """
    try:
        release = likely_release()
        if release is not None:
            with engines.use(release) as engine:
                engine.peaks()
        warm_up()
    except EngineUnavailable as error:
        logger.warning("%s", error)
    except Exception:
        logger.exception("could not load ahead")
    finally:
        close_old_connections()

"""Engine runs: a row for each release that a host loads, with its plan, and what came of it."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.models import Subquery
from django.db.models.functions import Now

from governance.ledger.services import record
from penstock.registry.models import ModelRelease
from penstock.serving.models import EngineRun, Shard

if TYPE_CHECKING:
    from inference.engine import Engine
    from inference.planner.meter import RunReport


def begin_run(*, host: str, release: ModelRelease, engine: "Engine", load_seconds: float) -> EngineRun:
    """Records that a host has loaded a release, and how: the plan enters the ledger by what it decides and predicts."""
    plan = engine.plan
    with transaction.atomic():
        run = EngineRun.objects.create(
            host=host,
            model_release=release,
            loaded_at=Now(),
            load_seconds=load_seconds,
            memory_bytes=engine.memory_bytes_at_most,
            plan=None if plan is None else plan.as_dict(),
        )
        record(
            kind="release.loaded",
            actor=f"host:{host}",
            subject=release.name,
            payload={
                "engine_run": run.pk,
                "release_digest": release.digest,
                "memory_bytes": run.memory_bytes,
                "streams": plan is not None and plan.placement.ring > 0,
                **({} if plan is None else planned_facts(plan.as_dict())),
            },
        )
    return run


def planned_facts(plan: dict[str, Any]) -> dict[str, Any]:
    """What of a plan goes into the ledger: what bears on results and on what was promised."""
    predicted = plan["predicted"] or {}
    return {
        "compute": plan["compute"],
        "cache": plan["cache"],
        "max_batch": plan["max_batch"],
        "pinned_layers": len(plan["placement"]["pinned"]),
        "spilled_layers": len(plan["placement"]["spilled"]),
        "predicted_output_tokens_per_s": predicted.get("output_tokens_per_s"),
    }


def measure_run(*, run_id: int, engine: "Engine") -> None:
    """Writes what the engine has done since it was loaded."""
    EngineRun.objects.filter(pk=run_id, ended_at=None).update(measured=measured(engine), measured_at=Now())


def end_run(*, run_id: int, engine: "Engine") -> None:
    """The host gives the release up."""
    EngineRun.objects.filter(pk=run_id, ended_at=None).update(
        measured=measured(engine), measured_at=Now(), ended_at=Now()
    )


def end_runs_of(*, host: str, but: Collection[int]) -> int:
    """Ends what a host that has started anew had loaded before it was killed: all but these."""
    return EngineRun.objects.filter(host=host, ended_at=None).exclude(pk__in=but).update(ended_at=Now())


def tie_shard(*, shard_id: int, fence: int, run_id: int) -> None:
    """Remembers which engine computes a shard, unless another worker has claimed it, or the run's row is gone."""
    run = EngineRun.objects.filter(pk=run_id).values("pk")[:1]
    Shard.objects.filter(pk=shard_id, fence=fence).update(engine_run=Subquery(run))


def bound_by(report: "RunReport") -> str:
    """ "disk", or what the report names ("memory", "arithmetic", "overhead", "idle"); "" while that is not known."""
    if report.busy_seconds and report.waited_seconds > report.busy_seconds / 2:
        return "disk"
    return report.bound_by if report.fraction_of_limit is not None else ""


def measured(engine: "Engine") -> dict[str, Any]:
    """Figures of an engine since it was loaded, those of its report that a page shows; {} before its first step."""
    stats = engine.stats()
    if not stats.steps:
        return {}
    report = engine.report()
    return {
        "steps": stats.steps,
        "busy_seconds": stats.busy_seconds,
        "output_tokens": stats.output_tokens,
        "output_tokens_per_s": stats.output_tokens / stats.busy_seconds if stats.busy_seconds else None,
        "prefill_tokens_per_s": report.prefill_tokens_per_s,
        "decode_tokens_per_s": report.decode_tokens_per_s,
        "mean_batch_size": stats.mean_batch_size,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "streamed_bytes": report.streamed_bytes,
        "streamed_bytes_per_s": report.streamed_bytes_per_s,
        "waited_seconds": report.waited_seconds,
        "fraction_of_limit": report.fraction_of_limit,
        "bound_by": bound_by(report),
        "batch_size_over_time": [list(point) for point in report.batch_size_over_time],
    }

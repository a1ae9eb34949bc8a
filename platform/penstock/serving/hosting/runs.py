"""Engine runs: a row for each release that a host loads, with its plan, and what came of it."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.models import Subquery
from django.db.models.functions import Now

from governance.ledger.services import record
from penstock.registry.models import ModelRelease
from penstock.serving.models import BatchRun, EngineRun, Shard

if TYPE_CHECKING:
    from inference.engine import Engine
    from inference.engine.stats import EngineStats
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
        "device": plan["placement"].get("device"),
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
    forgotten = BatchRun.objects.filter(engine_run__host=host, ended_at=None).exclude(engine_run__in=but)
    forgotten.update(ended_at=Now())
    return EngineRun.objects.filter(host=host, ended_at=None).exclude(pk__in=but).update(ended_at=Now())


def tie_shard(*, shard_id: int, fence: int, run_id: int) -> None:
    """Remembers which engine computes a shard, unless another worker has claimed it, or the run's row is gone."""
    run = EngineRun.objects.filter(pk=run_id).values("pk")[:1]
    Shard.objects.filter(pk=shard_id, fence=fence).update(engine_run=Subquery(run))


def bound_by(report: "RunReport") -> str:
    """ "disk", or what the report names ("memory", "arithmetic", "overhead", "idle"); "" while that is not known."""
    if report.busy_seconds and report.waited_seconds > report.busy_seconds / 2:
        return "disk"
    if report.fraction_of_limit is None:
        return ""
    return "idle" if report.bound_by == "idle time" else report.bound_by


def measured(engine: "Engine", *, before: "EngineStats | None" = None) -> dict[str, Any]:
    """Figures of an engine since it was loaded, or since it told `before`: those of its report that a page shows.

    {} before its first step. Counts are of all steps; rates and shares of the last ones where these are very many
    (`steps_left_out`).
    """
    stats = engine.stats()
    since = 0 if before is None else before.steps
    if stats.steps <= since:
        return {}
    report = engine.report(since=since)
    busy, output_tokens, hits = stats.busy_seconds, stats.output_tokens, stats.prefix_hit_tokens
    if before is not None:
        busy -= before.busy_seconds
        output_tokens -= before.output_tokens
        hits -= before.prefix_hit_tokens
    return {
        "steps": stats.steps - since,
        "steps_left_out": report.steps_left_out,
        "busy_seconds": busy,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / busy if busy else None,
        "predicted": predicted(report, busy, output_tokens),
        "prefill_tokens_per_s": report.prefill_tokens_per_s,
        "decode_tokens_per_s": report.decode_tokens_per_s,
        "mean_batch_size": report.mean_batch_size,
        "prefix_hit_tokens": hits,
        "streamed_bytes": report.streamed_bytes,
        "streamed_bytes_per_s": report.streamed_bytes_per_s,
        "waited_seconds": report.waited_seconds,
        "fraction_of_limit": report.fraction_of_limit,
        "bound_by": bound_by(report),
        "shares": time_shares(report),
        "batch_size_over_time": [list(point) for point in report.batch_size_over_time],
    }


def predicted(report: "RunReport", busy_seconds: float, output_tokens: int) -> dict[str, float]:
    """What the steps should have taken by this host's rates, and the tokens a second of that; {} where not known.

    Of the last steps, where these are very many: that all were as these is then taken for granted.
    """
    seconds, prefill_seconds = report.predicted_seconds, report.predicted_prefill_seconds
    if not seconds or prefill_seconds is None or not min(report.busy_seconds, busy_seconds):
        return {}
    decode_seconds = seconds - prefill_seconds
    slower = report.busy_seconds / seconds
    return {
        "busy_seconds": busy_seconds / slower,
        "output_tokens_per_s": output_tokens / busy_seconds * slower,
        "prefill_tokens_per_s": report.prefill_tokens / prefill_seconds if prefill_seconds else 0.0,
        "decode_tokens_per_s": report.decode_tokens / decode_seconds if decode_seconds else 0.0,
    }


def time_shares(report: "RunReport") -> dict[str, float]:
    """Where the time from the first step to the last went; they add up to 1.

    `memory` and `arithmetic`: what the roofline says these need, where the host's limits are known. `disk`: steps
    waiting for weights. `idle`: between steps. `other`: the rest of the steps.
    """
    if not report.wall_seconds:
        return {}
    known = {
        "memory": report.memory_share,
        "arithmetic": report.arithmetic_share,
        "disk": report.waited_seconds / report.wall_seconds,
        "idle": report.idle_share,
    }
    shares = {name: share for name, share in known.items() if share is not None}
    # Weights are multiplied with while others are waited for: what exceeds 1 was both at once.
    spread = max(1.0, sum(shares.values()))
    shares = {name: share / spread for name, share in shares.items()}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}

"""The end of a request, in a batch or on its own: its result, its usage, its leaf, in one transaction.

`record_results` is the one writer of finished requests. A request that is finished already stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import rfc8785
from django.db import transaction
from pydantic import ValidationError

from governance.ledger.events import REQUEST_FINISHED, Event
from governance.ledger.services import record_many
from inference.request import SamplingParams
from penstock.registry.models import TaskVersion
from penstock.registry.output_contract import OutputContract
from penstock.serving.bodies import EMBEDDINGS
from penstock.serving.digests import embedding_digest, output_digest, salted_digest
from penstock.serving.models import Embedding, Request, Shard
from penstock.serving.outcome import Outcome, assess, prompt_text
from penstock.serving.prompts import plain_messages, sampling_of
from penstock.serving.vectors import Vectors

Recorder = Callable[[Sequence[Request]], None]

OPEN = (Request.Status.QUEUED, Request.Status.LEASED)
SECONDS_DIGITS = 6
WRITTEN_FIELDS = (
    "status", "started_at", "finished_at", "output_text", "output_digest", "finish_reason", "http_status",
    "error_code", "error_message", "prompt_tokens", "output_tokens", "cached_prompt_tokens", "choices",
    "queued_seconds", "ttft_seconds", "duration_seconds", "compute_seconds", "valid", "refused", "truncated",
    "detected_language", "violations",
)  # fmt: skip

TOLD_WHERE_SET = (
    "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos", "n",
    "best_of", "logprobs",
)  # fmt: skip
PLAIN = SamplingParams()

_recorders: list[Recorder] = []


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended.

    Seconds are the engine's: `queued_seconds` until its first step, `ttft_seconds` until its first token and
    `duration_seconds` until its end, all from its submission to the engine; `compute_seconds` its share of the busy
    time. They are None, and tokens 0, for a request that never ran.
    """

    request_id: str
    status: Request.Status
    finished_at: datetime
    started_at: datetime | None = None
    output_text: str = ""
    finish_reason: str = ""
    http_status: int | None = None
    error_code: str = ""
    error_message: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0
    choices: list[dict[str, Any]] | None = None
    queued_seconds: float | None = None
    ttft_seconds: float | None = None
    duration_seconds: float | None = None
    compute_seconds: float | None = None
    vectors: Vectors | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write results of a shard: it holds as long as the shard's fence is this one."""

    shard_id: int
    fence: int


class LeaseLost(Exception):
    """Another worker holds the shard now; what this one brought was dropped."""


def register_recorder(recorder: Recorder) -> None:
    """Has `recorder` called with just finished requests, in the transaction that finishes them.

    Higher rooms register from `AppConfig.ready`; registering twice counts once.
    """
    if recorder not in _recorders:
        _recorders.append(recorder)


def record_results(results: Sequence[Result], *, lease: Lease | None = None) -> list[Request]:
    """Finishes requests; returns those that it finished, which leaves out what was finished before.

    Under a lease, raises LeaseLost and writes nothing if the shard's fence has moved on; marks the shard done with its
    last request.
    """
    with transaction.atomic():
        if lease is not None:
            _hold(lease)
        by_id = {result.request_id: result for result in results}
        rows = list(
            Request.objects.select_for_update(of=("self",))
            .select_related("task", "team", "model_release", "api_key")
            .filter(pk__in=by_id, status__in=OPEN)
            .order_by("pk")
        )
        for row in rows:
            _apply(row, by_id[row.pk])
        if rows:
            Request.objects.bulk_update(rows, WRITTEN_FIELDS)
            Embedding.objects.bulk_create(
                Embedding(request=row, count=found.count, dimensions=found.dimensions, data=found.data)
                for row in rows
                if (found := by_id[row.pk].vectors) is not None
            )
            for recorder in _recorders:
                recorder(rows)
            record_many(events=[_event(row) for row in rows])
        if lease is not None and not Request.objects.filter(shard=lease.shard_id, status__in=OPEN).exists():
            Shard.objects.filter(pk=lease.shard_id).update(
                status=Shard.Status.DONE, lease_owner="", lease_expires_at=None
            )
    return rows


def _hold(lease: Lease) -> None:
    """Locks the shard for this transaction, if the lease still holds."""
    held = (
        Shard.objects.select_for_update()
        .filter(pk=lease.shard_id, fence=lease.fence, status=Shard.Status.LEASED)
        .first()
    )
    if held is None:
        raise LeaseLost(f"shard {lease.shard_id} is no longer held under fence {lease.fence}")


def _apply(row: Request, result: Result) -> None:
    for name in Result.__dataclass_fields__:
        if name not in ("request_id", "vectors"):
            setattr(row, name, getattr(result, name))
    ran = result.status == Request.Status.SUCCEEDED
    if result.vectors is not None:
        row.output_digest = embedding_digest(row.salt, result.vectors.data)
    else:
        row.output_digest = output_digest(row.salt, row.output_texts)
    contract = contract_of(row.task_id, row.task_version)
    reasons = [row.finish_reason, *(choice["finish_reason"] for choice in (row.choices or [])[1:])]
    outcomes = [
        assess(
            text=text,
            finish_reason=reason,
            error=not ran or row.endpoint == EMBEDDINGS,
            contract=contract,
            expected_language=contract.expected_language(row.groups),
            prompt=prompt_text(plain_messages(row.body)) if "messages" in row.body else str(row.body.get("prompt", "")),
        )
        for text, reason in zip(row.output_texts, reasons, strict=True)
    ]
    row.valid, row.refused = _worst(outcomes), _any_refused(outcomes)
    row.truncated = any(outcome.truncated for outcome in outcomes)
    row.detected_language = (outcomes[0].detected_language or "")[:20]
    row.violations = list(dict.fromkeys(code for outcome in outcomes for code in outcome.violations))
    if result.started_at is not None and result.queued_seconds is not None:
        # The wait that the caller knew: from the request's arrival, not only from its submission to the engine.
        row.queued_seconds = max(0.0, (result.started_at - row.created_at).total_seconds())


def _worst(outcomes: Sequence[Outcome]) -> bool | None:
    """Of several outputs, all have to be valid."""
    verdicts = [outcome.valid for outcome in outcomes]
    return False if False in verdicts else None if None in verdicts else True


def _any_refused(outcomes: Sequence[Outcome]) -> bool | None:
    refusals = [outcome.refused for outcome in outcomes if outcome.refused is not None]
    return any(refusals) if refusals else None


@lru_cache(maxsize=256)
def contract_of(task_id: int, version: int) -> OutputContract:
    """What a task asked of its outputs at a version; versions never change."""
    content = TaskVersion.objects.values_list("content", flat=True).get(task=task_id, version=version)
    try:
        return OutputContract.model_validate(content.get("output_contract") or {})
    except ValidationError:
        # An outcome that cannot be judged is no reason to lose the output.
        return OutputContract()


def _event(row: Request) -> Event:
    assert row.finished_at is not None
    return Event(
        kind=REQUEST_FINISHED,
        subject=row.pk,
        actor=_actor(row),
        occurred_at=row.finished_at,
        payload=leaf_payload(row),
    )


def leaf_payload(row: Request) -> dict[str, Any]:
    """What the ledger's entry about a finished request says. An untouched row gives the same at any later time."""
    return {
        "batch": row.batch_id,
        "line": row.line,
        "team": row.team.slug,
        "task": row.task.name,
        "task_version": row.task_version,
        "release": row.model_release.name,
        "release_digest": row.model_release.digest,
        "endpoint": row.endpoint,
        "latency_class": str(row.latency_class),
        "sampling": _sampling(row),
        "prompt_digest": row.prompt_digest,
        "output_digest": row.output_digest or None,
        "groups_digest": salted_digest(row.salt, rfc8785.dumps(row.groups)),
        "status": str(row.status),
        "finish_reason": row.finish_reason or None,
        "http_status": row.http_status,
        "error_code": row.error_code or None,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
        "queued_seconds": _rounded(row.queued_seconds),
        "ttft_seconds": _rounded(row.ttft_seconds),
        "duration_seconds": _rounded(row.duration_seconds),
        "compute_seconds": _rounded(row.compute_seconds),
        "valid": row.valid,
        "refused": row.refused,
        "truncated": row.truncated,
        "detected_language": row.detected_language or None,
        "violations": row.violations,
    }


def _actor(row: Request) -> str:
    return f"key:{row.api_key.prefix}" if row.api_key is not None else row.created_by


def _sampling(row: Request) -> Mapping[str, Any]:
    """How tokens were chosen. Stop strings and forms are the caller's text: their digests stand for them.

    What newer parameters say is told only where they were given, so that older leaves stay as they are.
    """
    if row.endpoint == EMBEDDINGS:
        return {}
    sampling = sampling_of(row.body, row.pk)
    told: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # As text: a seed may be beyond the integers of JSON.
        "seed": None if sampling.seed is None else str(sampling.seed),
        "stop_digest": salted_digest(row.salt, rfc8785.dumps(list(sampling.stop))) if sampling.stop else None,
    }
    for name in TOLD_WHERE_SET:
        if getattr(sampling, name) != getattr(PLAIN, name):
            told[name] = getattr(sampling, name)
    if sampling.logit_bias:
        told["logit_bias_digest"] = salted_digest(row.salt, rfc8785.dumps([list(one) for one in sampling.logit_bias]))
    if sampling.stop_token_ids:
        told["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.constraint is not None:
        told["constraint_digest"] = salted_digest(row.salt, sampling.constraint.digest)
    return told


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, SECONDS_DIGITS)


def unfinished(batch_id: str) -> bool:
    """Whether a batch has requests without an outcome."""
    return Request.objects.filter(batch_id=batch_id, status__in=OPEN).exists()

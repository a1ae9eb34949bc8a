"""What may enter the ledger, and the bytes that stand for it.

An entry is RFC 8785 canonical JSON: `actor`, `event_id`, `kind`, `occurred_at`, `payload`, `subject` and the format
version `v`. Payloads carry identifiers, digests, counts and timings. No prompt and no answer may enter: a leaf can
never be erased.

Three payload keys are references that exports follow: `batch`, `task` and `release`. Their values are the subjects
of events whose kind begins with the same word (`task.approved` about the subject that `task` names).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import rfc8785

ENTRY_VERSION = 1
REQUEST_FINISHED = "request.finished"
EVIDENCE_EXPORTED = "evidence.exported"
REFERENCES = ("batch", "task", "release")

MAX_PAYLOAD_BYTES = 64 * 1024
MAX_NAME_CHARACTERS = 200
MAX_DEPTH = 16
MAX_SAFE_INTEGER = 2**53 - 1

FORBIDDEN_KEYS = frozenset(
    {
        "answer",
        "completion",
        "content",
        "contents",
        "input_text",
        "messages",
        "output_text",
        "prompt",
        "prompt_template",
        "prompt_text",
        "prompts",
        "response_text",
        "system_prompt",
        "text",
    }
)


class EventError(ValueError):
    """An event that the ledger does not take; the message names the place within the payload."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to `subject`; `kind` is dotted, the subject's sort first (`batch.completed`)."""

    kind: str
    subject: str
    payload: Mapping[str, Any]
    actor: str = ""
    occurred_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    event_id: uuid.UUID = field(default_factory=uuid.uuid4)

    def __post_init__(self) -> None:
        for name, value in (("kind", self.kind), ("subject", self.subject), ("actor", self.actor)):
            if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS or not _is_storable(value):
                raise EventError(f"{name}: must be text of at most {MAX_NAME_CHARACTERS} characters")
        if not self.kind or not self.subject:
            raise EventError("kind and subject must not be empty")
        if self.occurred_at.tzinfo is None:
            raise EventError("occurred_at: must carry a time zone")
        check_payload(self.payload)

    def canonical(self) -> bytes:
        """The bytes of the leaf that this event becomes."""
        return canonical_entry(
            event_id=self.event_id,
            occurred_at=self.occurred_at,
            kind=self.kind,
            subject=self.subject,
            actor=self.actor,
            payload=self.payload,
        )


def check_payload(payload: Mapping[str, Any]) -> None:
    """Raises `EventError` unless the payload survives JSON and JSONB unchanged and holds no prompt text."""
    if not isinstance(payload, Mapping):
        raise EventError(f"payload: must be an object, not {type(payload).__name__}")
    _check(payload, "payload", 1)
    for reference in REFERENCES:
        value = payload.get(reference)
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS):
            raise EventError(
                f"payload.{reference}: must be the subject that it refers to, as text of at most"
                f" {MAX_NAME_CHARACTERS} characters"
            )
    size = len(rfc8785.dumps(_plain(payload)))
    if size > MAX_PAYLOAD_BYTES:
        raise EventError(f"payload: {size} bytes as JSON, at most {MAX_PAYLOAD_BYTES} are taken")


def canonical_entry(
    *, event_id: uuid.UUID, occurred_at: datetime, kind: str, subject: str, actor: str, payload: Mapping[str, Any]
) -> bytes:
    """The bytes of a leaf (RFC 8785) for an event that was checked when it was recorded."""
    return rfc8785.dumps(
        {
            "v": ENTRY_VERSION,
            "event_id": str(event_id),
            "occurred_at": timestamp(occurred_at),
            "kind": kind,
            "subject": subject,
            "actor": actor,
            "payload": _plain(payload),
        }
    )


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, always with microseconds, so that one moment has one spelling."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _plain(value: Any) -> Any:
    """The same value in the plain types that the canonicalizer knows."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _check(value: Any, place: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise EventError(f"{place}: nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if abs(value) > MAX_SAFE_INTEGER:
            raise EventError(f"{place}: {value} is beyond the integers of JSON (2**53 - 1); give it as text")
    elif isinstance(value, float):
        # JSONB gives a float of whole value back as an integer, hence the same bound for both.
        if not math.isfinite(value) or (value.is_integer() and abs(value) > MAX_SAFE_INTEGER):
            raise EventError(f"{place}: {value} is not a finite number within 2**53 - 1; give it as text")
    elif isinstance(value, str):
        if not _is_storable(value):
            raise EventError(f"{place}: text with a NUL or a lone surrogate cannot be stored")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or not _is_storable(key):
                raise EventError(f"{place}: the key {key!r} is not plain text")
            if key.lower() in FORBIDDEN_KEYS:
                raise EventError(
                    f"{place}.{key}: prompt or answer text must not enter the ledger; record a digest instead"
                )
            _check(item, f"{place}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{place}[{index}]", depth + 1)
    else:
        raise EventError(f"{place}: {type(value).__name__} has no JSON form; give amounts and times as text")


def _is_storable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)

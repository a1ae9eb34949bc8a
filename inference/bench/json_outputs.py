"""Whether outputs that were held to a JSON schema validate against it, by a validator that the engine does not use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator

from inference.bench.prompts import SCHEMA
from inference.request import Completion


def json_counts(completions: Sequence[Completion]) -> dict[str, Any]:
    """ended: by themselves; valid_share: of these, by jsonschema; cut_share: of all, cut at their most tokens."""
    validator = Draft202012Validator(SCHEMA)
    ended = [completion for completion in completions if completion.finish_reason == "stop"]
    valid = sum(_is_valid(validator, completion.text) for completion in ended)
    cut = sum(completion.finish_reason == "length" for completion in completions)
    return {
        "ended": len(ended),
        "valid_share": round(valid / len(ended), 4) if ended else None,
        "cut_share": round(cut / len(completions), 4),
    }


def _is_valid(validator: Draft202012Validator, text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(validator.is_valid(value))

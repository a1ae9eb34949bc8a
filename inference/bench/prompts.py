"""The work of each workload: prompts as token ids, and how each is sampled. The same every time, for every engine."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inference.errors import InvalidRequest
from inference.request import Constraint, SamplingParams

SENTENCES = Path(__file__).with_name("sentences.txt")
SYSTEM_TOKENS = 400
ITEM_TOKENS = 60
ITEM_NEW = 80
JSON_NEW = 160

_ASSIGNMENT = (
    "You keep the notebook of a team that runs language models on its own machines. Below are the rules of the house. "
    "For the note that follows them, write a short answer in plain words: what it says, whom it concerns, and what is "
    "to be done next.\n\n"
)

# Asked of every row of the `json` workload. Every field has a bound, so that most rows end within JSON_NEW tokens.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "topic": {"enum": ["engine", "records", "setup", "security", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "needs_action": {"type": "boolean"},
        "summary": {"type": "string", "minLength": 1, "maxLength": 120},
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
    },
    "required": ["topic", "urgency", "needs_action", "summary", "keywords"],
    "additionalProperties": False,
}


class Encoder(Protocol):
    """What these workloads need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a workload."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


def random_prompts(batch: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Uniformly random token ids, the same for every engine that is compared."""
    rng = random.Random(seed)
    low, top = min(100, vocab_size // 2), min(40_000, vocab_size - 1)
    return [[rng.randint(low, top) for _ in range(length)] for _ in range(batch)]


def random_rows(batch: int, prompt: int, new: int, vocab_size: int, seed: int = 0) -> list[Row]:
    """`batch` prompts of `prompt` tokens, each continued by exactly `new`."""
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    return [Row(tuple(ids), sampling) for ids in random_prompts(batch, prompt, vocab_size, seed)]


def uniform_rows(batch: int, least: int, most: int, vocab_size: int) -> list[Row]:
    """As random_rows, but each prompt and each output has a length drawn uniformly from `least` to `most` (seed 0)."""
    rng = random.Random(0)
    lengths = [(rng.randint(least, most), rng.randint(least, most)) for _ in range(batch)]
    return [
        Row(
            tuple(random_prompts(1, prompt, vocab_size, seed=index)[0]), SamplingParams(max_tokens=new, ignore_eos=True)
        )
        for index, (prompt, new) in enumerate(lengths)
    ]


def shared_prefix_rows(
    batch: int, tokenizer: Encoder, *, system: int = SYSTEM_TOKENS, item: int = ITEM_TOKENS, new: int = ITEM_NEW
) -> list[Row]:
    """One system prompt of `system` tokens, then for each row an item of `item` tokens of its own: real text."""
    sentences = SENTENCES.read_text("utf-8").splitlines()
    rules, notes = sentences[: len(sentences) // 2], sentences[len(sentences) // 2 :]
    text = _ASSIGNMENT + "\n".join(f"{number}. {rule}" for number, rule in enumerate(rules, 1))
    prefix = _exactly(system, text, tokenizer, start=True)
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    rows = []
    for number in range(1, batch + 1):
        text = " ".join([f"\nNote {number}:", *rng.sample(notes, len(notes))])
        rows.append(Row((*prefix, *_exactly(item, text, tokenizer, start=False)), sampling))
    return rows


def json_rows(batch: int, tokenizer: Encoder, new: int = JSON_NEW) -> list[Row]:
    """Notes to be put into a form, the output held to its JSON schema. An output ends by itself, at most at `new`."""
    sentences = SENTENCES.read_text("utf-8").splitlines()
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=new, constraint=Constraint.json_schema(SCHEMA))
    rows = []
    for number in range(1, batch + 1):
        note = " ".join(rng.sample(sentences, 2))
        text = (
            f"Fill in the form for this note, as JSON with topic, urgency, needs_action, summary and keywords.\n"
            f"Note {number}: {note}\nForm: "
        )
        rows.append(Row(tuple(tokenizer.encode(text)), sampling))
    return rows


def _exactly(count: int, text: str, tokenizer: Encoder, *, start: bool) -> tuple[int, ...]:
    """The text's first `count` tokens; the text again where it is too short. start: with the model's start token."""
    # The empty text's tokens are what the tokenizer puts before every text.
    begin = tokenizer.encode("")
    ids = list(begin) if start else []
    body = tokenizer.encode(text)[len(begin) :]
    if not body:
        raise InvalidRequest("tokenizer", "makes no tokens of plain text; this workload needs real text")
    while len(ids) < count:
        ids += body
    return tuple(ids[:count])


def dump_rows(file: Path, batch: int, rows: Sequence[Row]) -> None:
    """Append the rows to a JSONL file, so that others can be given the same work, token for token."""
    with file.open("a", encoding="utf-8") as lines:
        for index, row in enumerate(rows):
            constraint = row.sampling.constraint
            line = {
                "batch": batch,
                "index": index,
                "prompt_token_ids": row.token_ids,
                "new": row.sampling.max_tokens,
                "ignore_eos": row.sampling.ignore_eos,
            }
            if constraint is not None:
                line["json_schema"] = json.loads(constraint.text)
            print(json.dumps(line), file=lines)

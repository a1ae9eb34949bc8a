"""Random mixes of requests, for checks that nothing which comes about in them changes an output.

A mix draws the engine's settings (pages of memory, batch, token budget, chunks), prompts that begin alike, sampling,
constraints, priorities, the step at which each request comes (some of them between two layers of a step) and the
cancellations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from inference.cache.pages import pages_for
from inference.request import Constraint, GenerationRequest, SamplingParams

MOST_PAGES = 64
MOST_BATCH = 8
MOST_BUDGET = 512

# Some force long stretches, some leave every token free, some end by themselves within a few tokens and some hardly.
CONSTRAINTS = (
    Constraint.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
                "value": {"enum": [True, None, "the", 12]},
            },
            "required": ["name", "items", "value"],
            "additionalProperties": False,
        }
    ),
    Constraint.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 2}),
    Constraint.regex("[a-f]{1,6}( and [0-9]{2,5}){1,3}"),
    Constraint.regex("(.|\\n)*"),
    Constraint.choice(["true", "trueing", "the value and the name", "false"]),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes: before a step, and so many layers into it. cancel_step: None to let it end."""

    request: GenerationRequest
    step: int
    layer: int
    cancel_step: int | None


@dataclass(frozen=True, slots=True)
class Mix:
    """An engine's settings, and what it is given to do."""

    pages: int
    max_batch: int
    token_budget: int
    chunk_tokens: int
    share_prefixes: bool
    arrivals: tuple[Arrival, ...]


def random_mix(rng: random.Random, vocab_size: int) -> Mix:
    """A mix drawn by that generator: the same generator, the same mix."""
    beginnings = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 140))] for _ in range(2)]
    requests = [
        GenerationRequest(f"r{index}", _prompt(rng, beginnings, vocab_size), _sampling(rng), rng.randint(0, 3))
        for index in range(rng.randint(2, 8))
    ]
    least = max(pages_for(len(request.prompt_token_ids) + request.sampling.max_tokens) for request in requests)
    last = rng.choice([0, 3, 12])
    return Mix(
        pages=min(MOST_PAGES, least + rng.choice([0, 1, 3, 8, MOST_PAGES])),
        max_batch=rng.randint(1, MOST_BATCH),
        token_budget=rng.choice([1, 64, 200, MOST_BUDGET]),
        chunk_tokens=rng.choice([32, 64, 96, 256]),
        share_prefixes=rng.random() < 0.9,
        arrivals=tuple(
            Arrival(
                request,
                step=rng.randint(0, last),
                layer=rng.choice([0, 0, 1, 2]),
                cancel_step=rng.randint(0, 20) if rng.random() < 0.15 else None,
            )
            for request in requests
        ),
    )


def _prompt(rng: random.Random, beginnings: list[list[int]], vocab_size: int) -> tuple[int, ...]:
    beginning = rng.choice(beginnings)
    shared = rng.choice([0, len(beginning), rng.randint(0, len(beginning))])
    own = [rng.randrange(3, vocab_size) for _ in range(rng.choice([0, 1, rng.randint(1, 60)]))]
    return tuple(beginning[:shared] + own) or (3,)


def _sampling(rng: random.Random) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": rng.choice([1, 4, 12, 40]), "ignore_eos": True}
    if rng.random() < 0.5:
        settings |= {"temperature": rng.choice([0.5, 1.0, 3.0]), "seed": rng.randint(0, 5)}
        settings |= {"top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 20])}
    if rng.random() < 0.3:
        settings["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        settings |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    if rng.random() < 0.15 and "seed" in settings:
        settings["n"] = 2
    if rng.random() < 0.3:
        settings["constraint"] = rng.choice(CONSTRAINTS)
    elif rng.random() < 0.15:
        settings |= {"stop": ("e", "12"), "ignore_eos": False}
    return SamplingParams(**settings)

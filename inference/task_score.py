"""A task's score by log-likelihood: multiple choice and exact match, without generating a token."""

from __future__ import annotations

import json
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inference.errors import InferenceError
from inference.scoring import Scorer


class TaskFileError(InferenceError):
    """A line of a task file that is no item, or too long for the model. `line` counts from 1."""

    def __init__(self, file: object, line: int, message: str) -> None:
        super().__init__(f"{file}: line {line}: {message}")
        self.file = str(file)
        self.line = line
        self.message = message


@dataclass(frozen=True, slots=True)
class TaskItem:
    """`choices` of which `choices[answer]` is right; a single choice asks for an exact match."""

    context: str
    choices: tuple[str, ...]
    answer: int
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Shares of items answered rightly, each with its Wilson interval (scipy.stats.binomtest).

    agreement: share of items where model and reference give the same answer, right or wrong.
    """

    items: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    reference_accuracy: float
    reference_accuracy_low: float
    reference_accuracy_high: float
    agreement: float


def read_task(path: Path) -> list[TaskItem]:
    """JSONL, an item a line, of two kinds:

        {"context": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
        {"context": "2 + 2 =", "target": " 4"}

    The first is right where the right choice has the highest log-likelihood a UTF-8 byte; the second where greedy
    decoding would write the target. Raises TaskFileError, naming the line.
    """
    try:
        lines = path.read_bytes().decode().split("\n")  # at line feeds alone: a text may hold other ends
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(path, 1, f"cannot be read: {error}") from None
    items = [_item(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise TaskFileError(path, 1, "the file holds no item")
    return items


def _item(path: Path, number: int, line: str) -> TaskItem:
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise TaskFileError(path, number, f"is not JSON: {error}") from None
    context = values.get("context") if isinstance(values, dict) else None
    if not isinstance(context, str) or not context:
        raise TaskFileError(path, number, "needs a text that is not empty as 'context'")
    if "target" in values:
        choices, answer = [values["target"]], 0
    else:
        choices, answer = values.get("choices"), values.get("answer")
        if not isinstance(choices, list) or len(choices) < 2:
            raise TaskFileError(path, number, "needs 'target', or a list of at least two 'choices'")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise TaskFileError(path, number, "every choice or target must be a text that is not empty")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise TaskFileError(path, number, f"'answer' is {answer!r}; the index of a choice is expected, from 0")
    return TaskItem(context, tuple(choices), answer, str(path), number)


def score_task(items: Several[TaskItem], ours: Scorer, theirs: Scorer, confidence: float) -> TaskScore:
    """Both models on every item. Raises TaskFileError where an item does not fit a model's context."""
    answers = [_answer(item, ours) for item in items]
    references = answers if theirs is ours else [_answer(item, theirs) for item in items]
    right = sum(answer == item.answer for answer, item in zip(answers, items, strict=True))
    right_there = sum(answer == item.answer for answer, item in zip(references, items, strict=True))
    same = sum(mine == other for mine, other in zip(answers, references, strict=True))
    low, high = _wilson(right, len(items), confidence)
    low_there, high_there = _wilson(right_there, len(items), confidence)
    return TaskScore(
        items=len(items),
        accuracy=right / len(items),
        accuracy_low=low,
        accuracy_high=high,
        reference_accuracy=right_there / len(items),
        reference_accuracy_low=low_there,
        reference_accuracy_high=high_there,
        agreement=same / len(items),
    )


def _wilson(right: int, items: int, confidence: float) -> tuple[float, float]:
    from scipy.stats import binomtest

    interval = binomtest(right, items).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def _answer(item: TaskItem, scorer: Scorer) -> int:
    """The index of the likeliest choice; for an exact match 0, or -1 where greedy decoding writes something else."""
    scored = [_continuation(item, choice, scorer) for choice in item.choices]
    if len(scored) == 1:
        return 0 if scored[0][1] else -1
    likelihoods = [total / len(choice.encode()) for (total, _), choice in zip(scored, item.choices, strict=True)]
    return likelihoods.index(max(likelihoods))


def _continuation(item: TaskItem, choice: str, scorer: Scorer) -> tuple[float, bool]:
    """Log-likelihood of the choice after the context, in nats, and whether each of its tokens is ranked first."""
    tokenizer = scorer.tokenizer
    if tokenizer is None:
        raise TaskFileError(item.file, item.line, f"{scorer.manifest.source_name} has no tokenizer to read it with")
    context, whole = tokenizer.encode(item.context), tokenizer.encode(item.context + choice)
    # A tokenizer may join the context's end with the choice's beginning; what differs belongs to the choice.
    shared = 0
    while shared < min(len(context), len(whole)) and context[shared] == whole[shared]:
        shared += 1
    first = max(1, min(shared, len(whole) - 1))
    if len(whole) > scorer.max_tokens:
        raise TaskFileError(item.file, item.line, f"has {len(whole)} tokens; {scorer.max_tokens} fit the model")
    total, greedy = 0.0, True
    following = torch.tensor(whole[1:])
    for start, logits in scorer.logits(whole):
        begin = max(first - 1 - start, 0)
        targets = following[start + begin : start + len(logits)]
        if not len(targets):
            continue
        log = torch.log_softmax(logits[begin : begin + len(targets)].double(), dim=1)
        total += float(log.gather(1, targets[:, None]).sum())
        greedy = greedy and bool((log.argmax(dim=1) == targets).all())
    return total, greedy

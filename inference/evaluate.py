"""How far a model's output is from a reference's: perplexity, agreement, divergence of the logits, and a task's score.

The reference is most often the same weights before quantization, in float32. Both read the same held-out text, window
by window, and every figure comes with the interval that bootstrapping whole windows gives it (Efron and Tibshirani
1993, chapter 8: tokens of one window are not independent, windows nearly are).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inference.errors import InferenceError
from inference.loading import ComputeChoice
from inference.scoring import Scorer
from inference.task_score import TaskScore, read_task, score_task

DEFAULT_WINDOW_TOKENS = 512
CONFIDENCE = 0.95
_RESAMPLES = 2000
_SEED = 20261130

Array = NDArray[np.float64]


class EvaluationError(InferenceError):
    """An evaluation that would say nothing: too little text, or a reference that speaks other tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its 95 % interval; the interval is None where there are too few windows for one."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """What was run: the store's digest and name, its quantization, and the arithmetic."""

    digest: str
    source: str
    quantization: str
    compute: str
    kernels: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model against a reference on one text.

    perplexity: e to the mean negative log-likelihood a token, of `scored_tokens` tokens; each window's first token has
    nothing before it and is not scored. perplexity_change: the model's perplexity over the reference's, minus 1.
    top1_agreement: share of positions where both rank the same token first.
    kl_*_nats: Kullback-Leibler divergence of the model's next-token distribution from the reference's, over positions.
    text_sha256: of the text's UTF-8 bytes.
    """

    model: EvaluatedModel
    reference: EvaluatedModel
    text_sha256: str
    text_bytes: int
    window_tokens: int
    windows: int
    scored_tokens: int
    perplexity: Figure
    reference_perplexity: Figure
    perplexity_change: Figure
    top1_agreement: Figure
    kl_mean_nats: Figure
    kl_p99_nats: float
    confidence: float
    task: TaskScore | None

    def to_dict(self) -> dict[str, Any]:
        """JSON's own types only."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


@dataclass(frozen=True, slots=True)
class _Window:
    """Sums over one window's scored positions, and the divergence of each."""

    tokens: int
    loss: float
    reference_loss: float
    agreed: int
    divergence: Array


def evaluate(
    model: Scorer | Path | str,
    text: str,
    *,
    reference: Scorer | Path | str | None = None,
    compute: ComputeChoice = "auto",
    reference_compute: ComputeChoice = "fp32",
    window_tokens: int = DEFAULT_WINDOW_TOKENS,
    max_tokens: int | None = None,
    task: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a store, GGUF file or folder against a reference (by default itself, computed in float32).

    The text is cut into windows of `window_tokens`, at most `max_tokens` altogether. `task`: a JSONL file as
    `read_task` describes. `progress` gets (tokens done, tokens in all). The same input gives the same figures.

    Raises EvaluationError, and what loading raises: ModelFormatError, StoreError, MemoryBudgetError.
    """
    ours = model if isinstance(model, Scorer) else Scorer.load(model, compute=compute)
    if reference is None:
        reference = model if not isinstance(model, Scorer) else ours
    theirs = reference if isinstance(reference, Scorer) else Scorer.load(reference, compute=reference_compute)
    items = read_task(task) if task is not None else None
    windows = cut_windows(ours, theirs, text, window_tokens, max_tokens)
    total, done = sum(map(len, windows)), 0
    measured = []
    for tokens in windows:
        measured.append(_compare(ours, theirs, tokens))
        done += len(tokens)
        if progress is not None:
            progress(done, total)
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape"))
    return Evaluation(
        model=_described(ours),
        reference=_described(theirs),
        text_sha256=digest.hexdigest(),
        text_bytes=len(text.encode("utf-8", "surrogateescape")),
        window_tokens=window_tokens,
        windows=len(windows),
        confidence=CONFIDENCE,
        task=None if items is None else score_task(items, ours, theirs, CONFIDENCE),
        **_figures(measured),
    )


def cut_windows(ours: Scorer, theirs: Scorer, text: str, window_tokens: int, max_tokens: int | None) -> list[list[int]]:
    """The text's tokens in windows of at least 2. Raises EvaluationError."""
    if window_tokens < 2:
        raise EvaluationError(f"windows of {window_tokens} tokens leave nothing to predict; 2 or more are needed")
    if ours.tokenizer is None:
        raise EvaluationError(f"{ours.manifest.source_name} has no tokenizer, so no text can be read with it")
    if ours.manifest.config.vocab_size != theirs.manifest.config.vocab_size:
        raise EvaluationError(
            f"the reference has a vocabulary of {theirs.manifest.config.vocab_size} tokens, the model of "
            f"{ours.manifest.config.vocab_size}: their probabilities cannot be compared"
        )
    tokens = ours.tokenizer.encode(text)
    if theirs.tokenizer is not None and theirs.tokenizer.encode(text) != tokens:
        raise EvaluationError("the reference cuts this text into other tokens: the two cannot be compared")
    window = min(window_tokens, ours.max_tokens, theirs.max_tokens)
    tokens = tokens[:max_tokens]
    windows = [tokens[at : at + window] for at in range(0, len(tokens), window)]
    windows = [piece for piece in windows if len(piece) >= 2]
    if not windows:
        raise EvaluationError(f"the text has {len(tokens)} tokens; at least 2 are needed, and thousands to be sure")
    return windows


def _described(scorer: Scorer) -> EvaluatedModel:
    manifest = scorer.manifest
    return EvaluatedModel(
        digest=manifest.digest,
        source=manifest.source_name,
        quantization=str(manifest.quantization.get("scheme", "")),
        compute=scorer.compute,
        kernels=scorer.kernels,
    )


def _compare(ours: Scorer, theirs: Scorer, tokens: Several[int]) -> _Window:
    """Both models on one window, piece by piece, so that no more than one piece of logits of each is in memory."""
    loss = reference_loss = 0.0
    agreed = 0
    divergence: list[Array] = []
    following = torch.tensor(tokens[1:])
    for (start, mine), (_, other) in zip(ours.logits(tokens), theirs.logits(tokens), strict=True):
        targets = following[start : start + len(mine)]  # one fewer than rows at the window's end
        count = len(targets)
        if not count:
            continue
        log_p = torch.log_softmax(other[:count].double(), dim=1)  # [count, V]
        log_q = torch.log_softmax(mine[:count].double(), dim=1)
        for log, scorer in ((log_q, ours), (log_p, theirs)):
            if not bool(torch.isfinite(log.amax(dim=1)).all()):
                name = scorer.manifest.source_name
                raise EvaluationError(f"{name} in {scorer.compute} produced NaN; its weights may be damaged")
        loss -= float(log_q.gather(1, targets[:, None]).sum())
        reference_loss -= float(log_p.gather(1, targets[:, None]).sum())
        agreed += int((log_q.argmax(dim=1) == log_p.argmax(dim=1)).sum())
        # xlogy's convention: what the reference rules out (log p = -inf) adds nothing.
        terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
        divergence.append(terms.sum(dim=1).clamp_min_(0.0).numpy())
    return _Window(len(tokens) - 1, loss, reference_loss, agreed, np.concatenate(divergence))


def _figures(windows: Several[_Window]) -> dict[str, Any]:
    tokens = np.array([window.tokens for window in windows], dtype=np.float64)
    loss = np.array([window.loss for window in windows])
    reference = np.array([window.reference_loss for window in windows])
    agreed = np.array([window.agreed for window in windows], dtype=np.float64)
    divergence = np.array([window.divergence.sum() for window in windows])
    return {
        "scored_tokens": int(tokens.sum()),
        "perplexity": _figure(loss, tokens, np.exp),
        "reference_perplexity": _figure(reference, tokens, np.exp),
        # Paired: both read the same windows, so the interval of the ratio is far tighter than each one's own.
        "perplexity_change": _figure(loss - reference, tokens, np.expm1),
        "top1_agreement": _figure(agreed, tokens, np.asarray),
        "kl_mean_nats": _figure(divergence, tokens, np.asarray),
        "kl_p99_nats": float(np.percentile(np.concatenate([window.divergence for window in windows]), 99)),
    }


def _figure(sums: Array, tokens: Array, transform: Callable[[Any], Any]) -> Figure:
    """transform(sum of sums / sum of tokens), with the interval of resampled windows."""
    from scipy.stats import bootstrap

    value = float(transform(sums.sum() / tokens.sum()))
    if len(sums) < 2:
        return Figure(value, None, None)

    def statistic(numerator: Array, denominator: Array, axis: int = -1) -> Any:
        return transform(numerator.sum(axis=axis) / denominator.sum(axis=axis))

    interval = bootstrap(
        (sums, tokens),
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    return Figure(value, low if math.isfinite(low) else None, high if math.isfinite(high) else None)

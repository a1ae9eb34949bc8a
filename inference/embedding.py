"""Texts as vectors: a decoder's last hidden states, pooled. For models made for it, and usable with any.

The states are those after the final norm, as sentence-transformers' Pooling takes them from such models: `mean` over
all tokens, or `last`, the state of the last token, which alone has seen the whole text. A store's manifest says which
the model was made for, where its source said so.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt
import torch

from inference.cache.pages import pages_for
from inference.errors import EmbeddingCancelled, EmbeddingFailed, InvalidRequest
from inference.group import lone_sequence
from inference.loading import LoadedModel
from inference.model.batch import build_batch
from inference.scheduler import CHUNK_TOKENS, Slice
from inference.sequence import Sequence
from inference.weights.manifest import Pooling

if TYPE_CHECKING:
    from inference.engine.accounts import Accounts

_WAIT_SECONDS = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A text's vector, float32 [H], and its share of the time of the steps that computed it."""

    vector: npt.NDArray[np.float32]
    compute_seconds: float


@dataclass(slots=True, eq=False)
class _Text:
    """A text on its way: what is computed of it, and the sum (mean) or the latest (last) of its states, float64 [H]."""

    index: int
    sequence: Sequence
    pooled: npt.NDArray[np.float64]

    @property
    def left(self) -> int:
        return len(self.sequence.tokens) - self.sequence.computed


class Embedder:
    """Runs texts through a model beside its engine: one step at a time under the engine's lock.

    stepping: held while a step is computed. step: gives the engine a step, which running requests get after each of
    the texts' own. accounts: the engine's, which count these steps among its own.
    """

    def __init__(
        self,
        model: LoadedModel,
        token_budget: int,
        stepping: threading.Lock,
        step: Callable[[], bool],
        accounts: Accounts,
    ) -> None:
        self._model = model
        self._budget = max(token_budget, CHUNK_TOKENS)
        self._stepping = stepping
        self._step = step
        self._accounts = accounts

    def check(self, prompts: Several[Several[int]], pooling: str) -> None:
        """Raises InvalidRequest, naming the item, where one is empty, too long or holds unknown tokens."""
        if pooling not in get_args(Pooling):
            raise InvalidRequest("pooling", f"must be one of {', '.join(get_args(Pooling))}, not {pooling!r}")
        config = self._model.manifest.config
        pages = self._model.sequence_pages
        for index, tokens in enumerate(prompts):
            field = f"prompts[{index}]"
            if not tokens:
                raise InvalidRequest(field, "is empty; at least one token is needed")
            if len(tokens) > config.max_context:
                raise InvalidRequest(field, f"has {len(tokens)} tokens; this model takes at most {config.max_context}")
            if pages_for(len(tokens)) > pages:
                raise InvalidRequest(
                    field, f"needs {pages_for(len(tokens))} cache pages; the engine's memory holds {pages}"
                )
            wrong = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(field, f"token id {wrong} is not in the vocabulary of {config.vocab_size}")

    def embed(
        self,
        prompts: Several[Several[int]],
        pooling: Pooling,
        normalize: bool,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Embedding]:
        """An embedding for each prompt, its vector of Euclidean length 1 where normalized.

        What a text gets does not depend on the others. cancelled: asked between steps, on this thread.
        Raises InvalidRequest, EmbeddingFailed, EmbeddingCancelled.
        """
        self.check(prompts, pooling)
        config = self._model.manifest.config
        waiting = deque(enumerate(prompts))
        running: list[_Text] = []
        vectors: dict[int, Embedding] = {}
        try:
            while waiting or running:
                if cancelled is not None and cancelled():
                    done = sum(embedding.compute_seconds for embedding in vectors.values())
                    raise EmbeddingCancelled(done + sum(text.sequence.compute_seconds for text in running))
                with self._stepping:
                    self._admit(waiting, running, config.hidden_size)
                    if running:
                        self._compute(running, pooling)
                for text in [text for text in running if not text.left]:
                    vectors[text.index] = _finished(text, pooling, normalize)
                    running.remove(text)
                    with self._stepping:
                        self._model.pages.release(text.sequence.pages)
                # A lock goes to whoever asks first, which would be this thread again and again.
                if not self._step() and waiting and not running:
                    time.sleep(_WAIT_SECONDS)
        finally:
            with self._stepping:
                for text in running:
                    self._model.pages.spoil(text.sequence.pages)
                    self._model.pages.release(text.sequence.pages)
        return [vectors[index] for index in range(len(prompts))]

    def _admit(self, waiting: deque[tuple[int, Several[int]]], running: list[_Text], hidden: int) -> None:
        """Begin texts, each with all its pages, as long as a step has room for them."""
        pages = self._model.pages
        while waiting and sum(min(text.left, CHUNK_TOKENS) for text in running) < self._budget:
            index, tokens = waiting[0]
            need = pages_for(len(tokens))
            if need > pages.available:
                return
            waiting.popleft()
            sequence = lone_sequence(tokens)
            sequence.rotation_offset = self._model.manifest.config.rotation_offset(len(tokens))
            sequence.pages = [pages.take() for _ in range(need)]
            running.append(_Text(index, sequence, np.zeros(hidden)))

    def _compute(self, running: list[_Text], pooling: Pooling) -> None:
        """A step: a piece of each text, cut at the same places of the text whatever the others are."""
        chosen: list[tuple[_Text, Slice]] = []
        budget = self._budget
        for text in running:
            start = text.sequence.computed
            count = min(text.left, CHUNK_TOKENS - start % CHUNK_TOKENS)
            if count > budget:
                break
            budget -= count
            chosen.append((text, Slice(text.sequence, start, count)))
        pieces = [piece for _, piece in chosen]
        started = time.perf_counter()
        with torch.inference_mode():
            states = self._model.decoder.states(build_batch(pieces), self._model.cache).numpy()  # float32 [M, H]
        self._accounts.record(pieces, started, time.perf_counter() - started, with_logits=False)
        row = 0
        for text, piece in chosen:
            part = states[row : row + piece.count].astype(np.float64)
            row += piece.count
            # Row after row: the sum's order depends on nothing but the text.
            text.pooled = text.pooled + np.add.reduce(part, axis=0) if pooling == "mean" else part[-1]
            text.sequence.computed += piece.count


def _finished(text: _Text, pooling: Pooling, normalize: bool) -> Embedding:
    vector = text.pooled / len(text.sequence.tokens) if pooling == "mean" else text.pooled
    if not np.isfinite(vector).all():
        raise EmbeddingFailed(f"prompts[{text.index}]: the model produced NaN or infinity; its weights may be damaged")
    if normalize:
        length = float(np.sqrt(np.add.reduce(vector * vector)))
        vector = vector / length if length > 0 else vector
    return Embedding(vector.astype(np.float32), text.sequence.compute_seconds)

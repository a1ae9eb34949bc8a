"""Logits of every position of a text that is given, not generated: what evaluation and calibration need."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import replace
from pathlib import Path

import torch

from inference.cache.pages import PAGE_TOKENS, pages_for
from inference.errors import CalibrationError, InvalidRequest
from inference.fitting import CacheChoice
from inference.group import lone_sequence
from inference.kernels.base import Compute
from inference.loading import ComputeChoice, LoadedModel, load_model
from inference.model.batch import build_batch
from inference.model.decoder import Decoder
from inference.model.feed_forward import Wrap
from inference.scheduler import CHUNK_TOKENS, Slice
from inference.tokenizer import Tokenizer

# Logits of one piece, in float32 elements: 64 MB whatever the vocabulary.
_PIECE_ELEMENTS = 2**24


class Scorer:
    """A loaded model that reads given tokens and tells its logits. One text at a time, from one thread."""

    def __init__(self, model: LoadedModel) -> None:
        self.manifest = model.manifest
        self.compute: Compute = model.compute
        self.kernels: str = model.decoder.kernels.name
        self.tokenizer: Tokenizer | None = model.tokenizer
        self._model = model

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        compute: ComputeChoice = "auto",
        cache: CacheChoice = "auto",
        memory_bytes: int | None = None,
    ) -> Scorer:
        """A weight store, a GGUF file or a Hugging Face folder; the errors are those of `Engine.load`."""
        model = load_model(
            path,
            compute=compute,
            cache=cache,
            max_batch=1,
            token_budget=CHUNK_TOKENS,
            memory_bytes=memory_bytes,
        )
        return cls(model)

    @property
    def max_tokens(self) -> int:
        """The longest text that fits the model's context and this scorer's memory, in tokens."""
        return min(self.manifest.config.max_context, self._model.sequence_pages * PAGE_TOKENS)

    def wrap_products(self, wrap: Wrap) -> None:
        """As `Decoder.wrap_products`. CalibrationError for a model that runs through transformers' own code."""
        if not isinstance(self._model.decoder, Decoder):
            raise CalibrationError(f"{self.manifest.config.architecture}: its layers cannot be observed in that code")
        self._model.decoder.wrap_products(wrap)

    def logits(self, tokens: Several[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces of (first position, float32 [positions, vocab]), in order, in bounded memory.

        Row i holds the logits of the token after position i. Raises InvalidRequest where the text is empty, longer
        than `max_tokens`, or has a token outside the vocabulary.
        """
        vocabulary = self.manifest.config.vocab_size
        if not 1 <= len(tokens) <= self.max_tokens:
            raise InvalidRequest("tokens", f"{len(tokens)} given; 1 to {self.max_tokens} can be scored at a time")
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise InvalidRequest("tokens", f"token id {wrong} is not in the vocabulary of {vocabulary}")
        sequence = lone_sequence(tokens)
        # This scorer is the cache's only user, so its pages need no pool; each text writes over the one before.
        sequence.pages = list(range(pages_for(len(tokens))))
        step = max(PAGE_TOKENS, min(CHUNK_TOKENS, _PIECE_ELEMENTS // vocabulary) // PAGE_TOKENS * PAGE_TOKENS)
        for start in range(0, len(tokens), step):
            count = min(step, len(tokens) - start)
            # The mode must not outlive the computing: the caller of a generator would be left in it.
            with torch.inference_mode():
                batch = build_batch([Slice(sequence, start, count)])
                rows = self._model.decoder.forward(replace(batch, logit_rows=torch.arange(count)), self._model.cache)
                logits = rows.values if rows.scales is None else rows.values * rows.scales[:, None]
            yield start, logits

"""What a model's layers are given to read: the second moments of their inputs on a calibration text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from inference.errors import CalibrationError
from inference.kernels.base import Linear, Rows
from inference.quant.groupwise import Array
from inference.scoring import Scorer

WINDOW_TOKENS = 512
# Enough for stable moments of a few thousand channels; more text costs time in proportion.
MAX_TOKENS = 16384
# Of moments held at a time; the layers beyond wait for another reading of the text.
MOMENTS_BYTES = 2**30
# Matrices that read the same input share its moments; the decoder names their product after the first of them.
_SHARED = {"k": "q", "v": "q", "up": "gate"}


class ObservedLinear:
    """A linear layer that, while `moments` is set, adds up X^T X of what it is given: float32 [K, K]."""

    def __init__(self, linear: Linear, width: int) -> None:
        self._linear = linear
        self.nbytes = linear.nbytes
        self.width = width
        self.moments: torch.Tensor | None = None

    @property
    def form(self) -> str:
        return self._linear.form

    def arrays(self) -> dict[str, torch.Tensor]:
        return self._linear.arrays()

    def over(self, arrays: Mapping[str, torch.Tensor]) -> ObservedLinear:
        return ObservedLinear(self._linear.over(arrays), self.width)

    def __call__(self, rows: Rows) -> torch.Tensor:
        if self.moments is not None:
            self.moments.addmm_(rows.values.T, rows.values)
        return self._linear(rows)


class Calibration:
    """The moments of a store's layers on a text, computed when they are first asked for, some layers at a time."""

    def __init__(self, store: Path, text_file: Path) -> None:
        """Raises CalibrationError, and what loading raises. The model is held in float32."""
        try:
            text = text_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CalibrationError(f"{text_file}: cannot be read as UTF-8 text: {error}") from None
        self._scorer = Scorer.load(store, compute="fp32")
        manifest = self._scorer.manifest
        self._observed: dict[str, ObservedLinear] = {}

        def observed(name: str, linear: Linear) -> ObservedLinear:
            self._observed[name] = ObservedLinear(linear, manifest.tensor(name).shape[1])
            return self._observed[name]

        self._scorer.wrap_products(observed)
        if self._scorer.tokenizer is None:
            raise CalibrationError(f"{manifest.source_name} has no tokenizer to read {text_file} with")
        tokens = self._scorer.tokenizer.encode(text)[:MAX_TOKENS]
        window = min(WINDOW_TOKENS, self._scorer.max_tokens)
        if len(tokens) < 2:
            raise CalibrationError(f"{text_file}: has {len(tokens)} tokens; thousands are needed")
        self._windows = [tokens[at : at + window] for at in range(0, len(tokens), window)]
        self._tokens = len(tokens)
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        self.is_used = False
        """Whether any matrix's moments have been asked for and told."""

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {"method": "gptq", "text_sha256": self._digest, "tokens": self._tokens}

    def moments(self, name: str) -> Array | None:
        """X^T X of what that matrix reads, float32 [K, K]; None for a matrix that reads no layer's rows.

        An expert that no token was sent to has moments of zero.
        """
        head, dot, part = name.rpartition(".")
        observed = self._observed.get(head + dot + _SHARED.get(part, part))
        if observed is None:
            return None
        if observed.moments is None:
            self._read_for(observed)
        assert observed.moments is not None
        self.is_used = True
        found: Array = observed.moments.numpy()
        return found

    def _read_for(self, first: ObservedLinear) -> None:
        """Read the text, observing this layer and as many of those after it as memory allows."""
        order = list(self._observed.values())
        room = MOMENTS_BYTES
        for observed in order:
            observed.moments = None
        for observed in order[order.index(first) :]:
            room -= 4 * observed.width**2
            if room < 0 and observed is not first:
                break
            observed.moments = torch.zeros((observed.width, observed.width))
        for window in self._windows:
            for _ in self._scorer.logits(window):
                pass

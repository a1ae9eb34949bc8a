"""The naive way, as a baseline is measured with it. Torch is imported when a generator is loaded, not before."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.config import config
from penstock.registry.models import ModelRelease
from penstock.serving.admission import Admitted
from penstock.serving.prompts import plain_messages


@dataclass(frozen=True, slots=True)
class Generated:
    """One output. `duration_seconds` runs from the prompt's token ids to the last token."""

    text: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    ttft_seconds: float | None
    duration_seconds: float


class Generator(Protocol):
    """Unquantized weights, one prompt at a time, greedy. `dtype`, `threads` and `libraries` are those in use."""

    dtype: str
    threads: int
    libraries: dict[str, str]

    def generate(self, admitted: Admitted, *, max_tokens: int) -> Generated: ...


Loader = Callable[[ModelRelease], Generator]


class TransformersGenerator:
    """`inference.baseline.NaiveBaseline` on the weights that a release was made from."""

    def __init__(self, model: Any, threads: int) -> None:
        self._model = model
        self.dtype: str = model.dtype
        self.threads = threads
        self.libraries: dict[str, str] = dict(model.versions)

    @classmethod
    def load(cls, release: ModelRelease) -> "TransformersGenerator":
        """Raises inference.errors.ModelFormatError."""
        import torch

        from inference.baseline import NaiveBaseline

        # The engine of this process uses as many.
        model = NaiveBaseline.load(Path(release.source_path), threads=config().threads)
        return cls(model, torch.get_num_threads())

    def generate(self, admitted: Admitted, *, max_tokens: int) -> Generated:
        made = self._model.generate(plain_messages(admitted.body), max_tokens)
        return Generated(
            text=made.text,
            prompt_tokens=made.prompt_tokens,
            output_tokens=made.output_tokens,
            finish_reason=made.finish_reason,
            ttft_seconds=made.ttft_seconds,
            duration_seconds=made.duration_seconds,
        )

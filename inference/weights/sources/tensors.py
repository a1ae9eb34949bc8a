"""What a source of a model's tensors must offer. Their names are those of `weights.shapes`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from inference.errors import ModelFormatError
from inference.model.config import DecoderConfig
from inference.quant.groupwise import Array, GroupwiseTensor
from inference.quant.rotated import RotatedTensor
from inference.weights.manifest import Pooling
from inference.weights.safetensors_folder import read_json
from inference.weights.shapes import Entry

Weights = Array | GroupwiseTensor | RotatedTensor


class ModelSource(Protocol):
    """A model to import. `load` returns a tensor in the source's own precision, q and k rows in half-rotation order."""

    path: Path
    config: DecoderConfig
    format: str
    licence: str | None
    model_name: str | None
    pooling: Pooling | None

    def plan(self) -> list[Entry]:
        """(store file, tensor name, shape) of every tensor, in store order."""
        ...

    def load(self, name: str, shape: tuple[int, ...]) -> Weights: ...

    def digest(self) -> str: ...

    def tokenizer_files(self) -> dict[str, str]: ...

    def model_files(self) -> dict[str, str]:
        """What else the store must hold to run the model, file name -> content."""
        ...


def checked_config(path: Path, values: dict[str, Any]) -> DecoderConfig:
    """The configuration of those values; ModelFormatError where they contradict one another."""
    try:
        return DecoderConfig(**values)
    except (TypeError, ValueError) as error:
        raise ModelFormatError(path, "configuration", str(error)) from None


def licence_of_model_card(card: Path) -> str | None:
    """The `license:` line of the front matter of a model card, where there is one."""
    if not card.is_file():
        return None
    lines = card.read_text("utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key.strip() == "license" and value.strip():
            return value.strip().strip("\"'")
    return None


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Whatever goes wrong with what a source's files say becomes a ModelFormatError: nobody has checked them before."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ModelFormatError(source, "content", f"makes no sense: {type(error).__name__}: {error}") from error


def pooling_of_folder(folder: Path) -> Pooling | None:
    """What sentence-transformers' `1_Pooling/config.json` says of a model made for embeddings, where there is one.

    Raises ModelFormatError for ways that a decoder's states are not pooled by here.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    values = read_json(file)
    # The older files have a switch for each way, the newer ones name it.
    named = values.get("pooling_mode")
    ways = [named] if named else [key for key, on in values.items() if key.startswith("pooling_mode_") and on is True]
    match ways:
        case ["pooling_mode_mean_tokens" | "mean"]:
            return "mean"
        case ["pooling_mode_lasttoken" | "lasttoken"]:
            return "last"
        case _:
            raise ModelFormatError(
                file, "pooling mode", f"is {', '.join(map(str, ways)) or 'none'}; mean or last token"
            )

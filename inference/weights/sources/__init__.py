"""What an import reads from: one interface; a GGUF file, a Hugging Face folder or another store behind it."""

from __future__ import annotations

from pathlib import Path

from inference.errors import ModelFormatError
from inference.weights.manifest import MANIFEST_NAME
from inference.weights.safetensors_folder import read_json
from inference.weights.sources.families import FAMILIES
from inference.weights.sources.folder_source import FolderSource
from inference.weights.sources.foreign_source import ForeignSource
from inference.weights.sources.gguf_source import GGUFSource
from inference.weights.sources.store_source import StoreSource
from inference.weights.sources.tensors import ModelSource, Weights, reading

__all__ = [
    "FolderSource",
    "ForeignSource",
    "GGUFSource",
    "ModelSource",
    "StoreSource",
    "Weights",
    "open_source",
    "reading",
]


def open_source(path: Path) -> ModelSource:
    """The source at that path; a folder of a family not known here goes through transformers.

    ModelFormatError where it is no GGUF file, folder with config.json, or store.
    """
    if (path / MANIFEST_NAME).is_file():
        return StoreSource(path)
    with reading(path):
        if path.is_dir():
            kind = read_json(path / "config.json").get("model_type")
            return FolderSource(path) if kind in FAMILIES else ForeignSource(path, ", ".join(FAMILIES))
        if path.is_file():
            return GGUFSource(path)
    raise ModelFormatError(path, "path", "does not exist; a GGUF file, Hugging Face folder or store is expected")

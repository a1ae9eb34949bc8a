"""A weight store as the source of another: the same model at another precision."""

from __future__ import annotations

from pathlib import Path

from inference.errors import ModelFormatError
from inference.weights.manifest import StoreManifest
from inference.weights.shapes import Entry
from inference.weights.sources.tensors import Weights
from inference.weights.store import StoreReader


class StoreSource:
    """Reads a store as it is. Its own format names the first source's too; its digest is the store's."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError."""
        self.path = path
        self._reader = StoreReader(path)
        manifest = self._reader.manifest
        self.config = manifest.config
        self.format = "penstock-store"
        self.licence = manifest.licence
        self.model_name = manifest.model_name
        self.pooling = manifest.pooling

    @property
    def manifest(self) -> StoreManifest:
        return self._reader.manifest

    def plan(self) -> list[Entry]:
        return [(tensor.file, tensor.name, tensor.shape) for tensor in self.manifest.tensors]

    def load(self, name: str, shape: tuple[int, ...]) -> Weights:
        found = self.manifest.tensor(name)
        if found.shape != shape:
            raise ModelFormatError(self.path, f"tensor {name!r}", f"has shape {found.shape}; {shape} expected")
        return self._reader.tensor(name)

    def digest(self) -> str:
        return self.manifest.digest

    def tokenizer_files(self) -> dict[str, str]:
        return {name: self._text(name) for name in self.manifest.tokenizer_files}

    def model_files(self) -> dict[str, str]:
        known = {tensor.file for tensor in self.manifest.tensors} | set(self.manifest.tokenizer_files)
        return {file.name: self._text(file.name) for file in self.manifest.files if file.name not in known}

    def _text(self, name: str) -> str:
        return (self.path / name).read_text("utf-8", errors="surrogateescape")

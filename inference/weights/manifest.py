"""The manifest of a weight store: what the model is, where each tensor lies, and the digest that names the release."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from inference.errors import StoreError
from inference.model.config import DecoderConfig

Pooling = Literal["mean", "last"]

FORMAT = "penstock-store"
# Version 2 leaves the source's names out of the digest, version 3 may hold rotated 4-bit tensors; all are read.
FORMAT_VERSION = 3
_READABLE_VERSIONS = (1, 2, 3)
# What the source happened to be called where it was imported says nothing about the weights.
_NAMES = ("source_name", "model_name")
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file of the store. `name` is relative to the folder, `bytes` its size, `sha256` hexadecimal."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A run of bytes of a tensor. `role`: values, scales, minima, steps or offsets. `dtype`: NumPy's, or bfloat16."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the store. `group_size` 0: not grouped.

    `encoding`: int4, int4-rotated, int8, bfloat16, float16 or float32.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    encoding: str
    group_size: int
    parts: tuple[TensorPart, ...]

    def part(self, role: str) -> TensorPart | None:
        return next((part for part in self.parts if part.role == role), None)


@dataclass(frozen=True, slots=True)
class StoreManifest:
    """Everything about a store but the weights themselves.

    `source_digest` is the SHA-256 of the GGUF file, or, for a folder, of the list of its weight files' digests.
    `digest` is the SHA-256 of the canonical JSON of all other fields but the two names, the files' digests among them;
    it identifies the model release: one changed byte in any file, or in this manifest's other fields, makes another
    digest, and the same weights under another file name do not.
    `pooling`: how a text becomes a vector in a model made for that, where its source says so.
    """

    config: DecoderConfig
    files: tuple[StoreFile, ...]
    tensors: tuple[StoredTensor, ...]
    quantization: dict[str, Any]
    source_name: str
    source_format: str
    source_digest: str
    licence: str | None
    model_name: str | None
    parameters: int
    tokenizer_files: tuple[str, ...]
    digest: str = ""
    format_version: int = FORMAT_VERSION
    pooling: Pooling | None = None

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def tensor(self, name: str) -> StoredTensor:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise StoreError(MANIFEST_NAME, f"lists no tensor {name!r}")

    def _body(self) -> dict[str, Any]:
        body = asdict(self)
        body.pop("digest")
        body["config"] = self.config.as_dict()
        if self.pooling is None:
            body.pop("pooling")  # stores of before do not have it, and keep their digests
        return {"format": FORMAT, "format_version": body.pop("format_version"), **body}

    def computed_digest(self) -> str:
        named = self.format_version == 1
        body = {key: value for key, value in self._body().items() if named or key not in _NAMES}
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({**self._body(), "digest": self.computed_digest()}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoreManifest:
        values = dict(data)
        kind, version = values.pop("format", None), values.get("format_version")
        if kind != FORMAT:
            raise ValueError(f"is no weight store: format is {kind!r}, {FORMAT!r} expected")
        if version not in _READABLE_VERSIONS:
            readable = ", ".join(map(str, _READABLE_VERSIONS))
            raise ValueError(f"is of format version {version!r}; this program reads versions {readable}")
        values["config"] = DecoderConfig.from_dict(values["config"])
        values["files"] = tuple(StoreFile(**entry) for entry in values["files"])
        values["tensors"] = tuple(_tensor_from(entry) for entry in values["tensors"])
        values["tokenizer_files"] = tuple(values["tokenizer_files"])
        return cls(**values)

    @classmethod
    def load(cls, store: Path | str) -> StoreManifest:
        """Read a store's manifest; StoreError where it is missing, malformed, or not the one its digest was made of."""
        path = Path(store) / MANIFEST_NAME
        try:
            data = json.loads(path.read_text("utf-8"))
            manifest = cls.from_dict(data)
        except FileNotFoundError:
            raise StoreError(path, "is missing; a weight store is a folder that holds one") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(path, f"cannot be read: {error}") from None
        if manifest.digest != manifest.computed_digest():
            raise StoreError(path, f"its content gives digest {manifest.computed_digest()}, not {manifest.digest}")
        return manifest


def _tensor_from(entry: Mapping[str, Any]) -> StoredTensor:
    parts = tuple(TensorPart(**{**part, "shape": tuple(part["shape"])}) for part in entry["parts"])
    return StoredTensor(**{**entry, "shape": tuple(entry["shape"]), "parts": parts})

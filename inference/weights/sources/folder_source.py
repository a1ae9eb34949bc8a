"""A Hugging Face folder with safetensors, of one of the families that DecoderConfig describes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from inference.errors import ModelFormatError
from inference.model.config import DecoderConfig
from inference.quant.groupwise import Array
from inference.weights.safetensors_folder import SafetensorsFolder, digest_of_files
from inference.weights.shapes import Entry, tensor_shapes
from inference.weights.sources.families import FAMILIES, Family, shared_fields
from inference.weights.sources.settings import Settings
from inference.weights.sources.tensors import Weights, checked_config, licence_of_model_card, pooling_of_folder
from inference.weights.store import bfloat16_to_float32
from inference.weights.tokenizer_files import tokenizer_files_of_model

_EMBEDDING = "embed_tokens.weight"


class FolderSource:
    format = "safetensors"

    def __init__(self, path: Path) -> None:
        """Raises ModelFormatError where config.json or a weight file cannot be read, naming key or tensor."""
        self.path = path
        self.folder = SafetensorsFolder(path)
        self._family, settings = self._described()
        # A base model's tensors lack `model.`; a text model within one for images has more before its own.
        self._prefix = self._prefix_of_tensors()
        self._head = next((name for name in self.folder.tensors if name.endswith("lm_head.weight")), None)
        fields = shared_fields(self._family, settings, self._head is not None)
        self.config: DecoderConfig = checked_config(settings.file, fields)
        self.licence = licence_of_model_card(path / "README.md")
        self.model_name: str | None = self.folder.config.get("_name_or_path") or path.name
        self.pooling = pooling_of_folder(path)

    def _described(self) -> tuple[Family, Settings]:
        values, file = self.folder.config, self.path / "config.json"
        kind = values.get("model_type")
        if kind not in FAMILIES:
            raise ModelFormatError(file, "key 'model_type'", f"is {kind!r}; {', '.join(FAMILIES)} are read")
        inner = values.get("text_config")
        if isinstance(inner, dict):
            values = {"tie_word_embeddings": values.get("tie_word_embeddings")} | inner | {"model_type": kind}
        return FAMILIES[kind], Settings(file, values)

    def _prefix_of_tensors(self) -> str:
        names = [name for name in self.folder.tensors if name.endswith(_EMBEDDING)]
        if len(names) != 1:
            raise ModelFormatError(self.path, f"tensor '{_EMBEDDING}'", f"occurs {len(names)} times; once is right")
        return names[0].removesuffix(_EMBEDDING)

    def plan(self) -> list[Entry]:
        return list(tensor_shapes(self.config))

    def load(self, name: str, shape: tuple[int, ...]) -> Weights:
        family = self._family
        if name == "head":
            return self.folder.floats(self.folder.tensor(self._head or "lm_head.weight", shape))
        if name == "embedding":
            return self.folder.floats(self.folder.tensor(self._prefix + _EMBEDDING, shape))
        if name == "final_norm":
            return self._normed(self.folder.floats(self.folder.tensor(self._prefix + "norm.weight", shape)))
        _, layer, part = name.split(".", 2)
        inside = f"{self._prefix}layers.{layer}."
        if part.startswith("experts."):
            _, expert, kind = part.split(".")
            return self._of_expert(inside, int(expert), kind, shape)
        for fused, parts in family.fused.items():
            if part in parts:
                return self._rows_of(inside + fused + ".weight", part, parts, shape)
        bias = part.endswith("_bias")
        theirs = inside + family.name(part.removesuffix("_bias")) + (".bias" if bias else ".weight")
        weights = self.folder.floats(self.folder.tensor(theirs, shape))
        return self._normed(weights) if part.endswith("norm") else weights

    def _normed(self, weights: Array) -> Array:
        """A norm's weight as it multiplies: some families store it less 1."""
        offset = self._family.norm_offset
        if not offset:
            return weights
        whole = bfloat16_to_float32(weights) if weights.dtype == np.uint16 else weights.astype(np.float32)
        return whole + np.float32(offset)

    def _rows_of(self, theirs: str, part: str, parts: tuple[str, ...], shape: tuple[int, ...]) -> Array:
        """Our part of a matrix of theirs that holds several, one below the other."""
        config = self.config
        rows = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
        counts = [rows.get(one, config.intermediate_size) for one in parts]
        tensor = self.folder.tensor(theirs, (sum(counts), shape[1]))
        return self.folder.floats(tensor, sum(counts[: parts.index(part)]), shape[0])

    def _of_expert(self, inside: str, expert: int, kind: str, shape: tuple[int, ...]) -> Array:
        """One expert's matrix, which is a tensor of its own, or a slice of a tensor of all experts."""
        alone = inside + self._family.name(f"expert {kind}").format(expert) + ".weight"
        stacked = f"{inside}mlp.experts.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
        if alone in self.folder.tensors or stacked not in self.folder.tensors:
            return self.folder.floats(self.folder.tensor(alone, shape))
        count = 0 if self.config.experts is None else self.config.experts.count
        rows = shape[0] if kind == "down" else 2 * shape[0]
        tensor = self.folder.tensor(stacked, (count, rows, shape[1]))
        return self.folder.floats(tensor, expert * rows + (shape[0] if kind == "up" else 0), shape[0])

    def digest(self) -> str:
        return digest_of_files(self.folder.files)

    def tokenizer_files(self) -> dict[str, str]:
        return tokenizer_files_of_model(self.folder)

    def model_files(self) -> dict[str, str]:
        return {}

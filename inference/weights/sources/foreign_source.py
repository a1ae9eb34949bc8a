"""A Hugging Face folder of a family that only transformers' own code knows: its tensors are kept by their own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inference.errors import ModelFormatError
from inference.model.config import FOREIGN
from inference.weights.manifest import Pooling
from inference.weights.safetensors_folder import SafetensorsFolder, digest_of_files
from inference.weights.shapes import Entry
from inference.weights.sources.tensors import Weights, checked_config, licence_of_model_card
from inference.weights.tokenizer_files import tokenizer_files_of_model

_UNBOUNDED_CONTEXT = 2048


class ForeignSource:
    format = "safetensors"

    def __init__(self, path: Path, known: str) -> None:
        """Raises ModelFormatError where transformers has no causal model of that type. known: families of our own."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        self.path = path
        self.folder = SafetensorsFolder(path)
        kind, file = str(self.folder.config.get("model_type")), path / "config.json"
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ModelFormatError(
                file, "key 'model_type'", f"is {kind!r}; {known} are read, and what transformers generates text with"
            )
        try:
            settings: Any = AutoConfig.for_model(
                kind, **{key: value for key, value in self.folder.config.items() if key != "model_type"}
            )
        except Exception as error:  # whatever its own checks raise
            raise ModelFormatError(file, "configuration", f"transformers refuses it: {error}") from None
        text = settings.get_text_config(decoder=True)
        heads = _number(text, "num_attention_heads", 1)
        hidden = _number(text, "hidden_size", heads)
        self.config = checked_config(
            file,
            {
                "architecture": FOREIGN + kind,
                "vocab_size": _number(text, "vocab_size", 1),
                "hidden_size": hidden,
                "intermediate_size": _number(text, "intermediate_size", 4 * hidden),
                "layers": _number(text, "num_hidden_layers", 1),
                "heads": heads,
                "kv_heads": heads,
                "head_dim": max(2, hidden // heads // 2 * 2),
                # Positions without end (ALiBi, recurrent models) are cut off somewhere.
                "max_context": _number(text, "max_position_embeddings", _UNBOUNDED_CONTEXT),
                "rope_theta": 10000.0,
                "rms_norm_eps": 1e-6,
                "tied_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
            },
        )
        self.licence = licence_of_model_card(path / "README.md")
        self.model_name: str | None = self.folder.config.get("_name_or_path") or path.name
        self.pooling: Pooling | None = None

    def plan(self) -> list[Entry]:
        floating = (t for t in self.folder.tensors.values() if t.kind in ("F32", "F16", "BF16") and t.shape)
        return [("weights.bin", tensor.name, tensor.shape) for tensor in floating]

    def load(self, name: str, shape: tuple[int, ...]) -> Weights:
        return self.folder.floats(self.folder.tensor(name, shape))

    def digest(self) -> str:
        return digest_of_files(self.folder.files)

    def tokenizer_files(self) -> dict[str, str]:
        return tokenizer_files_of_model(self.folder)

    def model_files(self) -> dict[str, str]:
        kept = {key: value for key, value in self.folder.config.items() if key != "auto_map"}
        return {"config.json": json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n"}


def _number(settings: Any, key: str, default: int) -> int:
    value = getattr(settings, key, None)
    return value if isinstance(value, int) and value > 0 else default

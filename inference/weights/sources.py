"""What an import reads from: one interface, a GGUF file or a Hugging Face folder behind it.

Names on our side: embedding, final_norm, head, and per layer N `layers.N.` + attention_norm, q, k, v, o, mlp_norm,
gate, up, down.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from inference.errors import ModelFormatError
from inference.model.config import DecoderConfig, RopeScaling
from inference.quant.blocks import BLOCK_BYTES, take_over
from inference.quant.groupwise import Array, GroupwiseTensor
from inference.weights.gguf import GGUFFile
from inference.weights.gguf_tokenizer import tokenizer_files_from_gguf
from inference.weights.safetensors_folder import SafetensorsFolder, read_json
from inference.weights.store import sha256_of
from inference.weights.tokenizer_files import tokenizer_files_from_folder

Weights = Array | GroupwiseTensor


class ModelSource(Protocol):
    """A model to import. `load` returns a tensor in the source's own precision, q and k rows in half-rotation order."""

    config: DecoderConfig
    format: str
    licence: str | None
    model_name: str | None

    def load(self, name: str, shape: tuple[int, ...]) -> Weights: ...

    def digest(self) -> str: ...

    def tokenizer_files(self) -> dict[str, str]: ...


def tensor_shapes(config: DecoderConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(store file, tensor name, shape) of every tensor of a model of that config, in store order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "embedding.bin", "embedding", (config.vocab_size, hidden)
    for layer in range(config.layers):
        file, prefix = f"layer_{layer:03d}.bin", f"layers.{layer}."
        yield file, prefix + "attention_norm", (hidden,)
        yield file, prefix + "q", (config.query_size, hidden)
        yield file, prefix + "k", (config.kv_size, hidden)
        yield file, prefix + "v", (config.kv_size, hidden)
        yield file, prefix + "o", (hidden, config.query_size)
        yield file, prefix + "mlp_norm", (hidden,)
        yield file, prefix + "gate", (inner, hidden)
        yield file, prefix + "up", (inner, hidden)
        yield file, prefix + "down", (hidden, inner)
    yield "head.bin", "final_norm", (hidden,)
    if not config.tied_embeddings:
        yield "head.bin", "head", (config.vocab_size, hidden)


def open_source(path: Path) -> ModelSource:
    """The source at that path. ModelFormatError where it is neither a GGUF file nor a folder with config.json."""
    if path.is_dir():
        return FolderSource(path)
    if path.is_file():
        return GGUFSource(path)
    raise ModelFormatError(path, "path", "does not exist; a GGUF file or a Hugging Face folder is expected")


def _checked_config(path: Path, values: dict[str, Any]) -> DecoderConfig:
    try:
        return DecoderConfig(**values)
    except (TypeError, ValueError) as error:
        raise ModelFormatError(path, "configuration", str(error)) from None


_GGUF_NAMES = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


class GGUFSource:
    """A GGUF file of the llama architecture."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        self.config = self._config()
        licence = self.file.metadata.get("general.license")
        self.licence: str | None = licence if isinstance(licence, str) else None
        name = self.file.metadata.get("general.name")
        self.model_name: str | None = name if isinstance(name, str) else None

    def _config(self) -> DecoderConfig:
        file = self.file
        architecture = file.require("general.architecture", str)
        if architecture != "llama":
            raise ModelFormatError(
                self.path, "key 'general.architecture'", f"is {architecture!r}; this version reads 'llama'"
            )
        if any(name.endswith(("_exps.weight", ".bias")) for name in file.tensors):
            raise ModelFormatError(self.path, "tensors", "expert layers and biases are not read by this version")
        hidden = file.require("llama.embedding_length", int)
        heads = file.require("llama.attention.head_count", int)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2 or heads < 1:
            raise ModelFormatError(self.path, "tensor 'token_embd.weight'", "is missing or no matrix")
        head_dim = file.metadata.get("llama.attention.key_length", hidden // heads)
        if file.metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
            raise ModelFormatError(self.path, "key 'llama.rope.dimension_count'", f"must equal the head's {head_dim}")
        return _checked_config(
            self.path,
            {
                "architecture": "llama",
                "vocab_size": embedding.shape[0],
                "hidden_size": hidden,
                "intermediate_size": file.require("llama.feed_forward_length", int),
                "layers": file.require("llama.block_count", int),
                "heads": heads,
                "kv_heads": file.metadata.get("llama.attention.head_count_kv", heads),
                "head_dim": head_dim,
                "max_context": file.require("llama.context_length", int),
                "rope_theta": float(file.metadata.get("llama.rope.freq_base", 10000.0)),
                "rms_norm_eps": file.require("llama.attention.layer_norm_rms_epsilon", float),
                "tied_embeddings": "output.weight" not in file.tensors,
                "rope_scaling": self._rope_scaling(),
            },
        )

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self.file.metadata.get("llama.rope.scaling.type", "none")
        if "rope_freqs.weight" in self.file.tensors:
            raise ModelFormatError(self.path, "tensor 'rope_freqs.weight'", "per-frequency scaling is not read yet")
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling("linear", float(self.file.require("llama.rope.scaling.factor", float)))
        raise ModelFormatError(self.path, "key 'llama.rope.scaling.type'", f"is {kind!r}; none and linear are read")

    def load(self, name: str, shape: tuple[int, ...]) -> Weights:
        tensor = self.file.tensor(_gguf_name(name), shape)
        if tensor.kind in BLOCK_BYTES:
            kind: Any = tensor.kind
            weights: Weights = take_over(kind, self.file.raw(tensor), *shape)
        else:
            weights = self.file.floats(tensor)
        part = name.rsplit(".", 1)[-1]
        if part in ("q", "k"):
            heads = self.config.heads if part == "q" else self.config.kv_heads
            weights = _take_rows(weights, _half_rotation_rows(heads, self.config.head_dim))
        return weights

    def digest(self) -> str:
        return sha256_of(self.path)

    def tokenizer_files(self) -> dict[str, str]:
        return tokenizer_files_from_gguf(self.file)


def _gguf_name(name: str) -> str:
    top = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
    if name in top:
        return top[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def _half_rotation_rows(heads: int, head_dim: int) -> Array:
    """Row order that undoes llama.cpp's: it pairs rows (2i, 2i+1) of a head for rotation, we pair (i, i + d/2)."""
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def _take_rows(weights: Weights, rows: Array) -> Weights:
    if isinstance(weights, GroupwiseTensor):
        minima = None if weights.minima is None else weights.minima[rows]
        return GroupwiseTensor(weights.scheme, weights.group_size, weights.values[rows], weights.scales[rows], minima)
    return weights[rows]


_FOLDER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class FolderSource:
    """A Hugging Face folder of the llama model type."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = SafetensorsFolder(path)
        self.config = self._config()
        self.licence = _licence_of_model_card(path / "README.md")
        self.model_name: str | None = self.folder.config.get("_name_or_path") or path.name

    def _config(self) -> DecoderConfig:
        values, file = self.folder.config, self.path / "config.json"

        def number(key: str, default: Any = None) -> Any:
            value = values.get(key)
            value = default if value is None else value
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ModelFormatError(file, f"key {key!r}", f"is {value!r}; a number is needed")
            return value

        if values.get("model_type") != "llama":
            raise ModelFormatError(
                file, "key 'model_type'", f"is {values.get('model_type')!r}; this version reads 'llama'"
            )
        for key in ("attention_bias", "mlp_bias"):
            if values.get(key):
                raise ModelFormatError(file, f"key {key!r}", "is true; biases are not read by this version")
        if values.get("hidden_act", "silu") != "silu":
            raise ModelFormatError(file, "key 'hidden_act'", f"is {values['hidden_act']!r}; 'silu' is read")
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
        return _checked_config(
            file,
            {
                "architecture": "llama",
                "vocab_size": number("vocab_size"),
                "hidden_size": number("hidden_size"),
                "intermediate_size": number("intermediate_size"),
                "layers": number("num_hidden_layers"),
                "heads": number("num_attention_heads"),
                "kv_heads": number("num_key_value_heads", number("num_attention_heads")),
                "head_dim": number("head_dim", number("hidden_size") // max(1, number("num_attention_heads"))),
                "max_context": number("max_position_embeddings"),
                "rope_theta": float(theta),
                "rms_norm_eps": float(number("rms_norm_eps", 1e-6)),
                "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
                "rope_scaling": self._rope_scaling(rope),
            },
        )

    def _rope_scaling(self, rope: dict[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", float(rope["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
        raise ModelFormatError(
            self.path / "config.json", "key 'rope_type'", f"is {kind!r}; default, linear and llama3 are read"
        )

    def load(self, name: str, shape: tuple[int, ...]) -> Weights:
        top = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
        if name in top:
            theirs = top[name]
        else:
            _, layer, part = name.split(".")
            theirs = f"model.layers.{layer}.{_FOLDER_NAMES[part]}.weight"
        return self.folder.floats(self.folder.tensor(theirs, shape))

    def digest(self) -> str:
        lines = "".join(f"{sha256_of(file)}  {file.name}\n" for file in self.folder.files)
        return hashlib.sha256(lines.encode()).hexdigest()

    def tokenizer_files(self) -> dict[str, str]:
        generation = self.path / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.exists() else None
        return tokenizer_files_from_folder(
            self.path, eos if eos is not None else self.folder.config.get("eos_token_id")
        )


def _licence_of_model_card(card: Path) -> str | None:
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

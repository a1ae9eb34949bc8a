"""A GGUF file of one of the architectures that DecoderConfig describes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from inference.errors import ModelFormatError
from inference.model.config import MOST_LAYERS, DecoderConfig, RopeScaling
from inference.quant.blocks import BLOCK_BYTES, take_over
from inference.quant.groupwise import Array, GroupwiseTensor
from inference.weights.gguf import GGUFFile, GGUFTensor
from inference.weights.gguf_tokenizer import tokenizer_files_from_gguf
from inference.weights.manifest import Pooling
from inference.weights.shapes import Entry, tensor_shapes
from inference.weights.sources.gguf_architectures import ARCHITECTURES, Metadata
from inference.weights.sources.settings import yarn_attention_factor
from inference.weights.sources.tensors import Weights, checked_config
from inference.weights.store import sha256_of

_TOP = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_NAMES = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
}


# llama.cpp's numbers; others (none, the first token's, a ranking) are not what a decoder gives a vector by.
_POOLING: dict[int, Pooling] = {1: "mean", 3: "last"}


class GGUFSource:
    format = "gguf"

    def __init__(self, path: Path) -> None:
        """Raises ModelFormatError, naming the key or the tensor."""
        self.path = path
        self.file = GGUFFile(path)
        name = self.file.require("general.architecture", str)
        if name not in ARCHITECTURES:
            raise ModelFormatError(
                path, "key 'general.architecture'", f"is {name!r}; {', '.join(ARCHITECTURES)} are read"
            )
        self._architecture = ARCHITECTURES[name]
        self._metadata = Metadata(self.file, name)
        self.config = self._config()
        licence = self.file.metadata.get("general.license")
        self.licence: str | None = licence if isinstance(licence, str) else None
        title = self.file.metadata.get("general.name")
        self.model_name: str | None = title if isinstance(title, str) else None
        self.pooling = _POOLING.get(self._metadata.get("pooling_type", 0))

    def _config(self) -> DecoderConfig:
        metadata, tensors = self._metadata, self.file.tensors
        hidden, heads = metadata.require("embedding_length"), metadata.require("attention.head_count")
        layers = metadata.require("block_count")
        if not 1 <= layers <= MOST_LAYERS:
            raise ModelFormatError(
                self.path, f"key {metadata.key('block_count')!r}", f"is {layers}; 1 to {MOST_LAYERS} are read"
            )
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2 or heads < 1:
            raise ModelFormatError(self.path, "tensor 'token_embd.weight'", "is missing or no matrix")
        head_dim = metadata.get("attention.key_length", hidden // heads)
        if metadata.get("attention.value_length", head_dim) != head_dim:
            raise ModelFormatError(
                self.path, f"key {metadata.key('attention.value_length')!r}", f"must equal the keys' {head_dim}"
            )
        rotated = metadata.get("rope.dimension_count", head_dim)
        shared: dict[str, Any] = {
            "architecture": metadata.architecture,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": metadata.require("feed_forward_length"),
            "layers": layers,
            "heads": heads,
            "kv_heads": metadata.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_context": metadata.require("context_length"),
            "rope_theta": float(metadata.get("rope.freq_base", 10000.0)),
            "rms_norm_eps": metadata.require("attention.layer_norm_rms_epsilon", float),
            "tied_embeddings": "output.weight" not in tensors,
            "rope_scaling": self._rope_scaling(),
            "rotary_dim": 0 if rotated == head_dim else rotated,
            "qkv_bias": "blk.0.attn_q.bias" in tensors,
            "o_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        }
        return checked_config(self.path, shared | self._architecture.read(metadata, shared))

    def _rope_scaling(self) -> RopeScaling | None:
        metadata, tensors = self._metadata, self.file.tensors
        if "rope_freqs.weight" in tensors:
            return RopeScaling("factors", short_factors=self._factors("rope_freqs.weight"))
        context = metadata.require("context_length")
        original = int(metadata.get("rope.scaling.original_context_length", context))
        if "rope_factors_long.weight" in tensors:
            factor = context / original
            spread = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            return RopeScaling(
                "longrope",
                factor,
                original_max_context=original,
                attention_factor=float(metadata.get("rope.scaling.attn_factor", spread)),
                short_factors=self._factors("rope_factors_short.weight"),
                long_factors=self._factors("rope_factors_long.weight"),
            )
        kind = metadata.get("rope.scaling.type", "none")
        if kind == "none":
            return None
        factor = float(metadata.require("rope.scaling.factor", float))
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "yarn":
            attention = yarn_attention_factor(factor, None, None)
            return RopeScaling("yarn", factor, original_max_context=original, attention_factor=attention)
        raise ModelFormatError(
            self.path, f"key {metadata.key('rope.scaling.type')!r}", f"is {kind!r}; none, linear and yarn are read"
        )

    def _factors(self, name: str) -> tuple[float, ...]:
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) != 1 or tensor.kind != "F32":
            raise ModelFormatError(self.path, f"tensor {name!r}", "must be a list of F32 numbers")
        return tuple(map(float, self.file.floats(tensor)))

    def plan(self) -> list[Entry]:
        return list(tensor_shapes(self.config))

    def load(self, name: str, shape: tuple[int, ...]) -> Weights:
        if name in _TOP:
            return self._rows(self.file.tensor(_TOP[name], shape), 0, shape)
        _, layer, part = name.split(".", 2)
        block = f"blk.{layer}."
        if part.startswith("experts."):
            _, expert, kind = part.split(".")
            count = 0 if self.config.experts is None else self.config.experts.count
            stacked = self.file.tensor(f"{block}{_NAMES[kind]}_exps.weight", (count, *shape))
            return self._rows(stacked, int(expert) * shape[0], shape)
        fused = self._fused(block, part, shape)
        if fused is not None:
            return fused
        bare = part.removesuffix("_bias")
        kind = "weight" if bare == part else "bias"
        weights = self._rows(self.file.tensor(f"{block}{_NAMES[bare]}.{kind}", shape), 0, shape)
        if bare in ("q", "k") and self._architecture.paired:
            heads = self.config.heads if bare == "q" else self.config.kv_heads
            return _take_rows(weights, _half_rotation_rows(heads, self.config.head_dim))
        return weights

    def _fused(self, block: str, part: str, shape: tuple[int, ...]) -> Array | GroupwiseTensor | None:
        """Rows of q, k and v in one tensor, or of gate and up in one, where the file has them so (Phi-3)."""
        config, tensors = self.config, self.file.tensors
        starts = {"q": 0, "k": config.query_size, "v": config.query_size + config.kv_size}
        if part in starts and f"{block}attn_qkv.weight" in tensors:
            whole = (config.query_size + 2 * config.kv_size, config.hidden_size)
            return self._rows(self.file.tensor(f"{block}attn_qkv.weight", whole), starts[part], shape)
        if part in ("gate", "up") and f"{block}ffn_gate.weight" not in tensors:
            whole = (2 * config.intermediate_size, config.hidden_size)
            start = 0 if part == "gate" else config.intermediate_size
            return self._rows(self.file.tensor(f"{block}ffn_up.weight", whole), start, shape)
        return None

    def _rows(self, tensor: GGUFTensor, start: int, shape: tuple[int, ...]) -> Array | GroupwiseTensor:
        """The tensor, or that many of its rows from `start` on, in the shape wanted."""
        total = math.prod(tensor.shape[:-1]) if len(shape) > 1 else 1
        count = shape[0] if len(shape) > 1 else 1
        if count != total:
            row = tensor.nbytes // total
            tensor = GGUFTensor(tensor.name, tensor.kind, shape, tensor.offset + start * row, count * row)
        if tensor.kind in BLOCK_BYTES:
            kind: Any = tensor.kind
            return take_over(kind, self.file.raw(tensor), *shape)
        return self.file.floats(tensor)

    def digest(self) -> str:
        return sha256_of(self.path)

    def tokenizer_files(self) -> dict[str, str]:
        return tokenizer_files_from_gguf(self.file)

    def model_files(self) -> dict[str, str]:
        return {}


def _half_rotation_rows(heads: int, head_dim: int) -> Array:
    """Row order that undoes llama.cpp's: it pairs rows (2i, 2i+1) of a head for rotation, we pair (i, i + d/2)."""
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def _take_rows(weights: Array | GroupwiseTensor, rows: Array) -> Weights:
    if isinstance(weights, GroupwiseTensor):
        minima = None if weights.minima is None else weights.minima[rows]
        return GroupwiseTensor(weights.scheme, weights.group_size, weights.values[rows], weights.scales[rows], minima)
    return weights[rows]

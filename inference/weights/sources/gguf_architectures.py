"""What sets each GGUF architecture apart: its metadata beyond what all have, and how rows of q and k are ordered.

Keys and tensor names: gguf/constants.py of the gguf library. What files leave out (window patterns, layers without
rotation) is fixed by llama.cpp for each architecture, and so it is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference.model.config import NO_ROTATION, Experts
from inference.weights.gguf import GGUFFile

Fields = dict[str, Any]


class Metadata:
    """The keys of an open file under its architecture's name."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def key(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def require(self, key: str, kind: type | tuple[type, ...] = int) -> Any:
        return self.file.require(self.key(key), kind)

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(self.key(key), default)


@dataclass(frozen=True, slots=True)
class Architecture:
    """read: fields of DecoderConfig beside those that all have. paired: q and k rows lie as pairs to rotate."""

    read: Callable[[Metadata, Fields], Fields] = lambda metadata, shared: {}
    paired: bool = False


def _llama(metadata: Metadata, shared: Fields) -> Fields:
    return _everywhere(metadata, shared) | _experts(metadata, shared)


def _everywhere(metadata: Metadata, shared: Fields) -> Fields:
    window = metadata.get("attention.sliding_window", 0)
    narrow = 0 < window < shared["max_context"]
    return {"windows": (window,) * shared["layers"] if narrow else ()}


def _experts(metadata: Metadata, shared: Fields) -> Fields:
    count = metadata.get("expert_count", 0)
    if not count:
        return {}
    size = metadata.get("expert_feed_forward_length", shared["intermediate_size"])
    return {"experts": Experts(count, metadata.require("expert_used_count"), size)}


def _qwen3(metadata: Metadata, shared: Fields) -> Fields:
    return {"qk_norm": "head"} | _experts(metadata, shared)


def _olmo2(metadata: Metadata, shared: Fields) -> Fields:
    return {"norms": "post", "qk_norm": "full"}


def _smollm3(metadata: Metadata, shared: Fields) -> Fields:
    return {"ropes": tuple(0 if (layer + 1) % 4 else NO_ROTATION for layer in range(shared["layers"]))}


def _granite(metadata: Metadata, shared: Fields) -> Fields:
    return {
        "attention_scale": float(metadata.require("attention.scale", float)),
        "embedding_scale": float(metadata.get("embedding_scale", 1.0)),
        "residual_scale": float(metadata.get("residual_scale", 1.0)),
        "logit_scale": 1.0 / float(metadata.get("logit_scale", 1.0)),
    }


def _gemma(metadata: Metadata, shared: Fields, pattern: int, layers_of_27b: int) -> Fields:
    window, layers = metadata.get("attention.sliding_window", 4096), range(shared["layers"])
    # The largest model of each generation scales by the hidden size's share of a head, all others by the head.
    hidden_share = shared["hidden_size"] / shared["heads"]
    scaled_by = hidden_share if shared["layers"] == layers_of_27b else shared["head_dim"]
    return {
        "norms": "both",
        "activation": "gelu_tanh",
        "embedding_scale": float(shared["hidden_size"] ** 0.5),
        "attention_scale": float(scaled_by**-0.5),
        "attention_softcap": float(metadata.get("attn_logit_softcapping", 0.0)),
        "logit_softcap": float(metadata.get("final_logit_softcapping", 0.0)),
        "windows": tuple(window if (layer + 1) % pattern else 0 for layer in layers)
        if window < shared["max_context"]
        else (),
    }


def _gemma1(metadata: Metadata, shared: Fields) -> Fields:
    return {"activation": "gelu_tanh", "embedding_scale": float(shared["hidden_size"] ** 0.5)}


def _gemma2(metadata: Metadata, shared: Fields) -> Fields:
    return _gemma(metadata, shared, 2, 46)


def _gemma3(metadata: Metadata, shared: Fields) -> Fields:
    return _gemma(metadata, shared, 6, 62) | {
        "qk_norm": "head",
        "local_rope_theta": float(metadata.get("rope.freq_base_swa", 10000.0)),
        "ropes": tuple(int((layer + 1) % 6 != 0) for layer in range(shared["layers"])),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, paired=True),
    "granite": Architecture(_granite, paired=True),
    "smollm3": Architecture(_smollm3, paired=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(_qwen3),
    "qwen3moe": Architecture(_qwen3),
    "phi3": Architecture(_everywhere),
    "gemma": Architecture(_gemma1),
    "gemma2": Architecture(_gemma2),
    "gemma3": Architecture(_gemma3),
    "olmo2": Architecture(_olmo2),
}

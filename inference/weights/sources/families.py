"""What sets each family of Hugging Face models apart: keys of its config.json, and names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference.model.config import NO_ROTATION, Experts
from inference.weights.sources.settings import Settings

Fields = dict[str, Any]

_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "expert gate": "mlp.experts.{}.gate_proj",
    "expert up": "mlp.experts.{}.up_proj",
    "expert down": "mlp.experts.{}.down_proj",
}
_POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Family:
    """read: fields of DecoderConfig beside those that all families share. names: of tensors within a layer.

    fused: our parts that are rows of one matrix of theirs, in that order. norm_offset: what norms add to their stored
    weight. Defaults are those of transformers where config.json leaves a key out.
    """

    read: Callable[[Settings, Fields], Fields] = lambda settings, shared: {}
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_offset: float = 0.0
    tied: bool = False
    head_dim: int | None = None
    theta: float = 10000.0
    eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"

    def name(self, part: str) -> str:
        """Their name of our part, within a layer and without `.weight`."""
        return self.names.get(part) or _NAMES[part]


def shared_fields(family: Family, settings: Settings, has_head: bool) -> Fields:
    """The fields of DecoderConfig that are read alike for all families, and then the family's own."""
    hidden, heads = settings.number("hidden_size"), settings.number("num_attention_heads")
    head_dim = settings.number("head_dim", family.head_dim or hidden // max(1, heads))
    fields: Fields = {
        "architecture": settings.values["model_type"],
        "vocab_size": settings.number("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.number("intermediate_size"),
        "layers": settings.layers("num_hidden_layers"),
        "heads": heads,
        "kv_heads": settings.number("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_context": settings.number("max_position_embeddings"),
        "rope_theta": settings.theta(family.theta),
        "rms_norm_eps": float(settings.number("rms_norm_eps", family.eps)),
        "tied_embeddings": settings.flag("tie_word_embeddings", family.tied),
        "activation": settings.activation(family.activation_key, family.activation),
        "rotary_dim": settings.rotary_dim(head_dim),
        "rope_scaling": settings.rope_scaling(head_dim),
    }
    fields["has_head"] = has_head or fields["tied_embeddings"]
    return fields | family.read(settings, fields)


def _windows(window: Any, sliding: list[bool], context: int) -> tuple[int, ...]:
    """One window a layer; () where none is narrower than the context."""
    if not window or window >= context or not any(sliding):
        return ()
    return tuple(int(window) if slides else 0 for slides in sliding)


def _layer_types(settings: Settings, shared: Fields, otherwise: list[bool]) -> list[bool]:
    """Which layers slide: by `layer_types` where config.json has it."""
    types = settings.per_layer("layer_types", shared["layers"])
    if types is None:
        return otherwise
    unknown = next((kind for kind in types if kind not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        raise settings.wrong("layer_types", f"has {unknown!r}; full_attention and sliding_attention are read")
    return [kind == "sliding_attention" for kind in types]


def _llama(settings: Settings, shared: Fields) -> Fields:
    bias = settings.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": settings.flag("mlp_bias")}


def _mistral(settings: Settings, shared: Fields) -> Fields:
    everywhere = [True] * shared["layers"]
    return {"windows": _windows(settings.values.get("sliding_window"), everywhere, shared["max_context"])}


def _qwen(settings: Settings, shared: Fields) -> Fields:
    dense = settings.number("max_window_layers", 28)
    sliding = _layer_types(settings, shared, [layer >= dense for layer in range(shared["layers"])])
    window = settings.values.get("sliding_window") if settings.flag("use_sliding_window") else None
    return {"windows": _windows(window, sliding, shared["max_context"])}


def _qwen2(settings: Settings, shared: Fields) -> Fields:
    return _qwen(settings, shared) | {"qkv_bias": True}


def _qwen3(settings: Settings, shared: Fields) -> Fields:
    bias = settings.flag("attention_bias")
    return _qwen(settings, shared) | {"qk_norm": "head", "qkv_bias": bias, "o_bias": bias}


def _smollm3(settings: Settings, shared: Fields) -> Fields:
    layers = shared["layers"]
    every = settings.number("no_rope_layer_interval", 4)
    turns = settings.per_layer("no_rope_layers", layers) or [(layer + 1) % every != 0 for layer in range(layers)]
    sliding = _layer_types(settings, shared, [not turn for turn in turns])
    window = settings.values.get("sliding_window") if settings.flag("use_sliding_window") else None
    return _llama(settings, shared) | {
        "ropes": () if all(turns) else tuple(0 if turn else NO_ROTATION for turn in turns),
        "windows": _windows(window, sliding, shared["max_context"]),
    }


def _gemma(settings: Settings, shared: Fields) -> Fields:
    bias = settings.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "embedding_scale": float(shared["hidden_size"] ** 0.5)}


def _gemma2(settings: Settings, shared: Fields) -> Fields:
    sliding = _layer_types(settings, shared, [layer % 2 == 0 for layer in range(shared["layers"])])
    return _gemma(settings, shared) | {
        "norms": "both",
        "attention_scale": float(settings.number("query_pre_attn_scalar", 256) ** -0.5),
        "attention_softcap": _cap(settings, "attn_logit_softcapping", 50.0),
        "logit_softcap": _cap(settings, "final_logit_softcapping", 30.0),
        "windows": _windows(settings.number("sliding_window", 4096), sliding, shared["max_context"]),
    }


def _gemma3(settings: Settings, shared: Fields) -> Fields:
    if settings.flag("use_bidirectional_attention"):
        raise settings.wrong("use_bidirectional_attention", "is true; causal models are read")
    layers, every = shared["layers"], settings.number("sliding_window_pattern", 6)
    sliding = _layer_types(settings, shared, [(layer + 1) % every != 0 for layer in range(layers)])
    local = settings.rope("sliding_attention").get("rope_theta") or settings.number("rope_local_base_freq", 10000.0)
    return _gemma2(settings, shared) | {
        "qk_norm": "head",
        "attention_softcap": _cap(settings, "attn_logit_softcapping", 0.0),
        "logit_softcap": _cap(settings, "final_logit_softcapping", 0.0),
        "rope_theta": settings.theta(1_000_000.0, "full_attention"),
        "rope_scaling": settings.rope_scaling(shared["head_dim"], "full_attention"),
        "local_rope_theta": float(local),
        "ropes": tuple(map(int, sliding)),
        "windows": _windows(settings.number("sliding_window", 4096), sliding, shared["max_context"]),
    }


def _cap(settings: Settings, key: str, default: float) -> float:
    """A soft cap. Where the key is there and null, there is none."""
    return float(settings.values[key] or 0.0) if key in settings.values else default


def _granite(settings: Settings, shared: Fields) -> Fields:
    return _llama(settings, shared) | {
        "attention_scale": float(settings.number("attention_multiplier", 1.0)),
        "embedding_scale": float(settings.number("embedding_multiplier", 1.0)),
        "residual_scale": float(settings.number("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / float(settings.number("logits_scaling", 1.0)),
    }


def _olmo2(settings: Settings, shared: Fields) -> Fields:
    bias = settings.flag("attention_bias")
    return {"norms": "post", "qk_norm": "full", "qkv_bias": bias, "o_bias": bias}


def _mixtral(settings: Settings, shared: Fields) -> Fields:
    count = settings.values.get("num_local_experts") or settings.number("num_experts", 8)
    used = settings.number("num_experts_per_tok", 2)
    return _mistral(settings, shared) | {"experts": Experts(count, used, shared["intermediate_size"])}


def _qwen3_moe(settings: Settings, shared: Fields) -> Fields:
    bias, layers = settings.flag("attention_bias"), shared["layers"]
    window = settings.values.get("sliding_window") if settings.flag("use_sliding_window") else None
    every, dense = settings.number("decoder_sparse_step", 1), settings.values.get("mlp_only_layers") or []
    mixed = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
    experts = Experts(
        settings.values.get("num_local_experts") or settings.number("num_experts", 128),
        settings.number("num_experts_per_tok", 8),
        settings.number("moe_intermediate_size", 768),
        settings.flag("norm_topk_prob"),
    )
    return {
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
        "experts": experts,
        "expert_layers": () if all(mixed) else mixed,
        "windows": _windows(window, [True] * layers, shared["max_context"]),
    }


_GEMMA: Fields = {
    "norm_offset": 1.0,
    "tied": True,
    "activation_key": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "head_dim": 256,
}
_GEMMA3 = Family(_gemma3, _POST_NORMS, **_GEMMA)
_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert gate": "block_sparse_moe.experts.{}.w1",
    "expert up": "block_sparse_moe.experts.{}.w3",
    "expert down": "block_sparse_moe.experts.{}.w2",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(_mistral),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3, head_dim=128),
    "smollm3": Family(_smollm3, tied=True, theta=2_000_000.0),
    "phi3": Family(
        _mistral,
        fused={"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")},
        eps=1e-5,
    ),
    "gemma": Family(_gemma, **_GEMMA),
    "gemma2": Family(_gemma2, _POST_NORMS, **_GEMMA),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "granite": Family(_granite),
    "olmo2": Family(_olmo2, _POST_NORMS, eps=1e-5),
    "mixtral": Family(_mixtral, _MIXTRAL_NAMES, theta=1_000_000.0, eps=1e-5),
    "qwen3_moe": Family(_qwen3_moe),
}

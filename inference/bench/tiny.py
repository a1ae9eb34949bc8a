"""A tiny model with random weights, for checks of the engine's conduct that ask for many steps and no sense."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB_SIZE, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, MAX_CONTEXT = 320, 128, 192, 2, 4, 2, 512
SPREAD = 0.2  # of the weights: wide enough for outputs that differ from prompt to prompt


def write_tiny_model(folder: Path, seed: int = 0, kv_heads: int = KV_HEADS) -> None:
    """A Hugging Face folder of a Llama of some 0.4 million float32 weights, the same for the same seed.

    kv_heads: HEADS, 2 or 1.
    """
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * SPREAD).astype(np.float32)

    kv_size = HIDDEN * kv_heads // HEADS
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN),
        "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        tensors |= {
            layer + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            layer + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            layer + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            layer + "self_attn.k_proj.weight": matrix(kv_size, HIDDEN),
            layer + "self_attn.v_proj.weight": matrix(kv_size, HIDDEN),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            layer + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            layer + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            layer + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")

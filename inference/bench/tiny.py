"""A tiny model with random weights, for checks of the engine's conduct that ask for many steps and no sense."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

VOCAB_SIZE, HIDDEN, INTERMEDIATE, LAYERS, MAX_CONTEXT = 320, 128, 192, 2, 512
SPREAD = 0.2  # of the weights: wide enough for outputs that differ from prompt to prompt
SPECIAL = ("<pad>", "<s>", "</s>")
END = 2
_WORDS = ("true", "false", "null", '": "', '", "', '": ', "name", "items", "value", " the", " and", "ing", "12", "20")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, the key-value heads that they share, and the size of each, a multiple of 32."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 32

    def __str__(self) -> str:
        return f"{self.heads} over {self.kv_heads} of {self.size}"


USUAL = HeadShape()


def write_tiny_model(folder: Path, seed: int = 0, shape: HeadShape = USUAL) -> None:
    """A Hugging Face folder of a Llama of some 0.4 million float32 weights, the same for the same seed.

    Its tokenizer knows every byte, and a few tokens of several characters.
    """
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * SPREAD).astype(np.float32)

    q_size, kv_size = shape.heads * shape.size, shape.kv_heads * shape.size
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
            layer + "self_attn.q_proj.weight": matrix(q_size, HIDDEN),
            layer + "self_attn.k_proj.weight": matrix(kv_size, HIDDEN),
            layer + "self_attn.v_proj.weight": matrix(kv_size, HIDDEN),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, q_size),
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
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.size,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": END,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[END]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")


def _tokenizer() -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE tokens: the special ones, the bytes, and what words are put together of."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *sorted(ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        letters = word.replace(" ", "Ġ")  # as bytes are written
        for end in range(1, len(letters)):
            pair = letters[:end], letters[end]
            if len(vocabulary) < VOCAB_SIZE and "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary)
                merges.append(pair)
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer

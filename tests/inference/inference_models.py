"""Tiny models with random weights, made by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def tiny_llama(**changes: Any) -> Any:
    """A LlamaForCausalLM of transformers in float32, the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "eos_token_id": 2,
    }
    torch.manual_seed(20261130)
    model: Any = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    return model.eval()


def save_chat_model(folder: Path, store: Path) -> Any:
    """A tiny model in a folder with the tokenizer and the chat template of a store; returns the model."""
    settings = json.loads((store / "tokenizer_settings.json").read_text("utf-8"))
    model = tiny_llama(vocab_size=49152, num_hidden_layers=1, tie_word_embeddings=True, max_position_embeddings=2048)
    model.save_pretrained(folder)
    shutil.copy(store / "tokenizer.json", folder)
    chat = {"chat_template": settings["chat_template"], "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(chat), "utf-8")
    return model

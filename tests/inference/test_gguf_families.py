"""GGUF files of every architecture, written from transformers' weights with the gguf library's own tensor names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_families import PROMPTS, make_model
from whole_prompts import logits_of

from inference.errors import ModelFormatError
from inference.kernels.reference import ReferenceKernels
from inference.model.decoder import Decoder
from inference.weights import import_model

# Our name of the variant -> the architecture, and the model's configuration beside it. What llama.cpp fixes for an
# architecture (window patterns, layers without rotation) must be what the model is made with.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {}),
    "llama, linear": ("llama", {}),
    "llama, yarn": ("llama", {}),
    "llama 3.1": ("llama", {}),
    "mistral": ("llama", {}),
    "mixtral": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 moe, normalized": ("qwen3moe", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "phi3": ("phi3", {}),
    "phi3, longrope": ("phi3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
}
PAIRED = ("llama", "granite", "smollm3")


def paired(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as llama.cpp's converter leaves them: rotated elements next to each other."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def tensors_of(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        weights = tensor.float().numpy()
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if ".mlp.experts." in name:
            block = f"blk.{name.split('.')[2]}."
            if name.endswith("gate_up_proj"):
                gate, up = np.split(weights, 2, axis=1)
                yield block + "ffn_gate_exps.weight", gate
                yield block + "ffn_up_exps.weight", up
            else:
                yield block + "ffn_down_exps.weight", weights
            continue
        if name.endswith("mlp.gate.weight"):
            name = name.replace("mlp.gate", "block_sparse_moe.gate")
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weights = weights + 1
        if architecture in PAIRED and ".q_proj." in name:
            weights = paired(weights, config.num_attention_heads)
        if architecture in PAIRED and ".k_proj." in name:
            weights = paired(weights, config.num_key_value_heads)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        yield theirs, weights


def write_gguf(path: Path, model: Any, architecture: str, kind: Any) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if rope["rope_type"] == "longrope":
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], dtype=np.float32))
    if rope["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.numpy()
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))
    for name, weights in tensors_of(model, architecture):
        stored = gguf.GGMLQuantizationType.F32 if weights.ndim == 1 or "gate_inp" in name else kind
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weights), stored), raw_dtype=stored)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b"])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0])
    writer.add_token_types([2, 3, 3, 1, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", FILES)
def test_logits_of_a_gguf_file_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, changes = FILES[name]
    model = make_model(name, **changes)
    write_gguf(tmp_path / "model.gguf", model, architecture, gguf.GGMLQuantizationType.F32)
    config = import_model(tmp_path / "model.gguf", tmp_path / "store").config
    decoder = Decoder.load(tmp_path / "store", ReferenceKernels(config, "fp32"))
    for prompt, logits in zip(PROMPTS, logits_of(decoder, PROMPTS, 40), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "phi3"])
def test_quantized_blocks_of_stacked_matrices_are_taken_over(name: str, tmp_path: Path) -> None:
    architecture, changes = FILES[name]
    model = make_model(name, **changes)
    write_gguf(tmp_path / "model.gguf", model, architecture, gguf.GGMLQuantizationType.Q8_0)
    manifest = import_model(tmp_path / "model.gguf", tmp_path / "store")
    assert manifest.quantization["scheme"] == "int8 group 32"
    decoder = Decoder.load(tmp_path / "store", ReferenceKernels(manifest.config, "fp32"))
    (logits,) = logits_of(decoder, PROMPTS[1:2], 40)
    with torch.inference_mode():
        theirs = model(torch.tensor(PROMPTS[1:2])).logits[0]
    assert (logits - theirs).norm() < 0.1 * theirs.norm()


def test_an_architecture_that_is_not_read_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "mamba")
    writer.add_tensor("token_embd.weight", model.model.embed_tokens.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match=r"'mamba'.*llama, granite"):
        import_model(tmp_path / "model.gguf", tmp_path / "store")

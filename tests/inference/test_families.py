"""Every family against transformers: a tiny model with random weights, written by transformers, read and run by us."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_prompts import PAGES, kernels_of, logits_of, sequences_of

from inference import Engine, SamplingParams
from inference.errors import ModelFormatError
from inference.kernels.base import KeyValueCache, Linear, Rows
from inference.kernels.reference import ReferenceKernels
from inference.model.batch import build_batch
from inference.model.config import DecoderConfig
from inference.model.decoder import Decoder
from inference.scheduler import Slice
from inference.weights import StoreManifest, import_model

VOCABULARY = 320

# Lengths on both sides of the window (24), of a page (32), and of two.
PROMPTS = [[(7 * i * i + 11 * p + 5) % VOCABULARY for i in range(length)] for p, length in enumerate([1, 30, 75])]

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + i / 16 for i in range(12)],
    long_factor=[1.5 + i / 4 for i in range(12)],
    partial_rotary_factor=0.75,
) | {"original_max_position_embeddings": 64}

# Name of the configuration class -> what differs from TINY, one entry a variant.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama, linear": ("Llama", rope("linear", factor=4.0)),
    "llama, dynamic": ("Llama", rope("dynamic", factor=4.0)),
    "llama, yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama, narrow heads": ("Llama", {"head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2, sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "hidden_size": 96}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3", {"sliding_window": 24}),
    "phi3, longrope": ("Phi3", LONGROPE),
    "gemma": ("Gemma", {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 48, "sliding_window_pattern": 2},
    ),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "qwen3 moe, normalized": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}


def make_model(name: str, **changes: Any) -> Any:
    """The family's causal model of transformers with random weights, norms and biases among them."""
    import transformers

    kind, differences = FAMILIES[name]
    config = getattr(transformers, kind + "Config")(**(TINY | differences | changes))
    torch.manual_seed(20261130)
    model: Any = getattr(transformers, kind.removesuffix("Text") + "ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_in_float32_equal_transformers(kind: str, name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    config = import_model(tmp_path / "model", tmp_path / "store").config
    decoder = Decoder.load(tmp_path / "store", kernels_of(kind, config, "fp32"))
    for prompt, logits in zip(PROMPTS, logits_of(decoder, PROMPTS, 40), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        assert theirs.std() > 0.1
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_int8_a_rows_bits_are_its_own_and_close_to_float32(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    config = import_model(tmp_path / "model", tmp_path / "store").config
    kernels = kernels_of("native", config, "int8")
    decoder = Decoder.load(tmp_path / "store", kernels)
    together = logits_of(decoder, PROMPTS, 40, kernels.cache_kinds[0])
    exact = logits_of(Decoder.load(tmp_path / "store", ReferenceKernels(config, "fp32")), PROMPTS, 40)
    for prompt, logits, precise in zip(PROMPTS, together, exact, strict=True):
        (alone,) = logits_of(decoder, [prompt], 75, kernels.cache_kinds[0])
        assert torch.equal(alone, logits)
        # Random weights are far less kind to rounding than trained ones are.
        assert torch.nn.functional.cosine_similarity(logits, precise, dim=1).mean() > 0.9


# Those with experts, or no norm before a half of a layer are computed layer by layer.
LAYER_BY_LAYER = {"olmo2", "mixtral", "qwen3 moe", "qwen3 moe, normalized"}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_in_one_call_give_the_bits_of_layer_by_layer(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    config = import_model(tmp_path / "model", tmp_path / "store").config
    kernels = kernels_of("native", config, "int8")
    decoder = Decoder.load(tmp_path / "store", kernels)
    assert (decoder._together is None) == (name in LAYER_BY_LAYER or kernels.rows_at_once is None)
    # The last have more rows together than go through a gated network at once.
    prompts = [*PROMPTS, *([(5 * i * i + p) % VOCABULARY for i in range(210)] for p in range(3))]
    at_once = [logits_of(decoder, prompts, cuts, kernels.cache_kinds[0]) for cuts in (40, 210)]
    decoder.wrap_products(lambda name, product: Watched(product))
    assert decoder._together is None
    for cuts, logits in zip((40, 210), at_once, strict=True):
        assert all(map(torch.equal, logits, logits_of(decoder, prompts, cuts, kernels.cache_kinds[0])))


class Watched:
    """A product that nothing is known of."""

    def __init__(self, product: Linear) -> None:
        self._product = product
        self.form, self.nbytes = product.form, product.nbytes

    def __call__(self, rows: Rows) -> torch.Tensor:
        return self._product(rows)

    def arrays(self) -> dict[str, torch.Tensor]:
        return self._product.arrays()

    def over(self, arrays: Mapping[str, torch.Tensor]) -> Watched:
        return Watched(self._product.over(arrays))


@pytest.mark.parametrize("name", ["mixtral", "gemma2", "gemma3", "olmo2", "phi3, longrope", "smollm3"])
def test_seeded_tokens_and_logprobs_are_the_same_alone_in_a_batch_and_after_a_prefix_hit(
    name: str, tmp_path: Path
) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    engine = Engine.load(tmp_path / "store", threads=1, compute="int8", max_batch=8, memory_bytes=256 * 1024**2)
    if engine.stats().kernels != "native":
        pytest.skip("only the compiled kernels promise it")
    sampling = SamplingParams(max_tokens=24, temperature=0.9, seed=5, logprobs=2, ignore_eos=True)
    prompts = [*PROMPTS, [*PROMPTS[2], 5, 6, 7]]
    together = engine.generate(prompts, sampling)
    engine.forget_prefixes()
    alone = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    # All but the tokens that the earlier prompt had not got: whole pages, and the part of one.
    assert alone[3].cached_prompt_tokens == len(PROMPTS[2])
    assert [(one.token_ids, one.logprobs) for one in together] == [(one.token_ids, one.logprobs) for one in alone]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    engine = Engine.load(tmp_path / "store", threads=1, compute="fp32", max_batch=4, memory_bytes=256 * 1024**2)
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        made = list(completion.token_ids)
        assert completion.error is None and len(made) == 6
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + made])).logits[0]
        assert made == logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_quantized(name: str, quantize: Any, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    manifest = import_model(tmp_path / "model", tmp_path / "store", quantize=quantize)
    assert any(label.startswith(quantize) for label in manifest.quantization["weights_by_encoding"])
    engine = Engine.load(tmp_path / "store", threads=1, max_batch=4, memory_bytes=256 * 1024**2)
    for completion in engine.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True)):
        assert completion.error is None and completion.output_tokens == 4


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama", {"num_attention_heads": "two"}, "num_attention_heads"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types"),
        ("phi3, longrope", {"original_max_position_embeddings": 64, **rope("longrope", short_factor=[1.0])}, "factor"),
    ],
)
def test_what_is_not_supported_is_named(name: str, change: dict[str, Any], key: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelFormatError, match=key):
        import_model(tmp_path / "model", tmp_path / "store")


def test_an_older_stores_manifest_keeps_its_digest(tmp_path: Path) -> None:
    make_model("llama 3.1").save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    written = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert set(written["config"]) == {
        *("architecture", "vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"),
        *("max_context", "rope_theta", "rms_norm_eps", "tied_embeddings", "rope_scaling"),
    }
    assert set(written["config"]["rope_scaling"]) == {
        *("kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_context")
    }


def test_the_text_part_of_a_model_for_images_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make_model("gemma3", tie_word_embeddings=True)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    weights = {f"language_{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    renamed = {name.replace("language_model.", "language_model.model.", 1): weights[name] for name in weights}
    save_file(renamed | {"vision_tower.weight": torch.ones(3)}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config = import_model(folder, tmp_path / "store").config
    decoder = Decoder.load(tmp_path / "store", ReferenceKernels(config, "fp32"))
    (logits,) = logits_of(decoder, PROMPTS[2:], 40)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(torch.tensor(PROMPTS[2:])).logits[0], rtol=1e-4, atol=1e-4)


def test_a_base_model_without_a_head_is_read_for_embeddings(tmp_path: Path) -> None:
    model = make_model("qwen3", tie_word_embeddings=False)
    model.model.save_pretrained(tmp_path / "model")
    config = import_model(tmp_path / "model", tmp_path / "store").config
    assert not config.has_head
    decoder = Decoder.load(tmp_path / "store", ReferenceKernels(config, "fp32"))
    prompt = PROMPTS[1]
    batch = build_batch([Slice(sequences_of([prompt], config)[0], 0, len(prompt))])
    with torch.inference_mode():
        ours = decoder.states(batch, KeyValueCache(config, PAGES, "fp32"))
        theirs = model.model(torch.tensor([prompt])).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    engine = Engine.load(tmp_path / "store", threads=1, max_batch=4, memory_bytes=256 * 1024**2)
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=4))
    assert completion.finish_reason == "error" and "no head" in str(completion.error)


@pytest.mark.parametrize("name", ["gemma3", "phi3, longrope", "qwen3 moe"])
def test_the_configuration_survives_the_manifest(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    made = import_model(tmp_path / "model", tmp_path / "store").config
    assert StoreManifest.load(tmp_path / "store").config == made
    assert DecoderConfig.from_dict(json.loads(json.dumps(made.as_dict()))) == made

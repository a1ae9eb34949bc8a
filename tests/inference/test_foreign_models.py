"""Models that only transformers' own code knows run behind the same engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inference import Engine, SamplingParams
from inference.errors import ModelFormatError, QuantizationError, StoreError
from inference.weights import StoreManifest, import_model

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 11 * p + 5) % VOCABULARY for i in range(length)] for p, length in enumerate([1, 30, 75])]
SIZES = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

MODELS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {**SIZES, **WIDE, "intermediate_size": 96, "max_position_embeddings": 256},
    "GPT2": {**SIZES, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "OPT": {**SIZES, **WIDE, "ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 64},
    "Bloom": {**SIZES, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    # No keys and values, but a state: computed from the start at every step.
    "Mamba": {**SIZES, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}


def make_model(name: str) -> Any:
    import transformers

    torch.manual_seed(20261130)
    model: Any = getattr(transformers, name + "ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(
        getattr(transformers, name + "Config")(**MODELS[name])
    )
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    manifest = import_model(tmp_path / "model", tmp_path / "store")
    assert manifest.config.architecture.startswith("transformers:")
    engine = Engine.load(tmp_path / "store", threads=1, compute="fp32", max_batch=4, memory_bytes=256 * 1024**2)
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        made = list(completion.token_ids)
        assert completion.error is None and len(made) == 6
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + made])).logits[0]
        assert made == logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()
    stats = engine.stats()
    assert stats.kernels == "transformers" and stats.running == 0


@pytest.mark.parametrize(
    ("name", "quantize"), [("GPT2", "keep"), ("GPT2", "int8"), ("GPT2", "int4"), ("GPT2", "bf16"), ("Mamba", "int8")]
)
def test_they_run_quantized_and_alone_as_in_a_batch(name: str, quantize: Any, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    manifest = import_model(tmp_path / "model", tmp_path / "store", quantize=quantize)
    if quantize in ("int4", "int8"):
        assert manifest.quantization["scheme"].startswith(quantize)
    engine = Engine.load(tmp_path / "store", threads=1, compute="int8", max_batch=4, memory_bytes=256 * 1024**2)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    together = engine.generate(PROMPTS, sampling)
    alone = [engine.generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert all(one.error is None for one in together)


def test_quantized_layers_stay_close_to_the_model(tmp_path: Path) -> None:
    from inference.model.foreign import ForeignDecoder

    model = make_model("GPTNeoX")
    model.save_pretrained(tmp_path / "model")
    config = import_model(tmp_path / "model", tmp_path / "store").config
    quantized: Any = ForeignDecoder.open(tmp_path / "store", config, "int8")
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPTS[2]])).logits[0]
        ours = quantized._model(torch.tensor([PROMPTS[2]])).logits[0]
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.5,
    )
    model: Any = BertForMaskedLM(config)
    model.save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    with pytest.raises(StoreError, match="not causal"):
        Engine.load(tmp_path / "store", threads=1, memory_bytes=256 * 1024**2)


def test_damaged_weights_are_told_when_loading(tmp_path: Path) -> None:
    model = make_model("GPTNeoX")
    model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    with pytest.raises(StoreError, match="NaN"):
        Engine.load(tmp_path / "store", threads=1, compute="fp32", memory_bytes=256 * 1024**2)
    with pytest.raises(QuantizationError, match="dense_h_to_4h"):
        Engine.load(tmp_path / "store", threads=1, compute="int8", memory_bytes=256 * 1024**2)


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_model("GPTNeoX").save_pretrained(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    lost = next(name for name in weights if "dense_h_to_4h.weight" in name)
    del weights[lost]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    import_model(tmp_path / "model", tmp_path / "store")
    with pytest.raises(StoreError, match="dense_h_to_4h"):
        Engine.load(tmp_path / "store", threads=1, memory_bytes=256 * 1024**2)


@pytest.mark.parametrize("kind", ["no-such-model", "vit"])
def test_what_generates_no_text_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make_model("GPT2").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))
    with pytest.raises(ModelFormatError, match=kind):
        import_model(tmp_path / "model", tmp_path / "store")


def test_the_store_is_verified_like_any_other(tmp_path: Path) -> None:
    from inference.weights import verify_store

    make_model("GPT2").save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    assert verify_store(tmp_path / "store") == StoreManifest.load(tmp_path / "store")
    (tmp_path / "store" / "config.json").write_text("{}")
    with pytest.raises(StoreError, match=r"config\.json"):
        verify_store(tmp_path / "store")

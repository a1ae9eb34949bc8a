"""The decoder against transformers, and the compiled kernels against the reference ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_prompts import kernels_of, logits_of, sequences_of

from inference import Engine, SamplingParams
from inference.errors import ModelFormatError
from inference.kernels.base import KeyValueCache
from inference.kernels.native.linear import PackedLinear
from inference.model.batch import build_batch
from inference.model.decoder import Decoder
from inference.model.linear import channel_levels
from inference.scheduler import Slice
from inference.weights import StoreManifest, import_model

PROMPTS = [[(7 * i * i + 11 * p + 5) % 512 for i in range(length)] for p, length in enumerate([1, 5, 32, 33, 70, 100])]

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head each, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "wide heads": {"head_dim": 64, "num_key_value_heads": 1},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama 3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_float32_equal_transformers(
    kind: str, variant: str, tmp_path: Path, tiny_llama: Callable[..., Any]
) -> None:
    model = tiny_llama(**VARIANTS[variant])
    model.save_pretrained(tmp_path / "model")
    config = import_model(tmp_path / "model", tmp_path / "store").config
    decoder = Decoder.load(tmp_path / "store", kernels_of(kind, config, "fp32"))
    cache = KeyValueCache(config, 64, "fp32")
    ours = logits_of(decoder, PROMPTS, [1, 2, 32, 7, 70, 64], cache)
    for prompt, logits in zip(PROMPTS, ours, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(dim=1), theirs.argmax(dim=1))


@pytest.mark.parametrize("compute", ["bf16", "int8"])
def test_compiled_kernels_agree_with_the_reference_in_every_arithmetic(compute: Any, smollm2_store: Path) -> None:
    config = StoreManifest.load(smollm2_store).config
    prompts = [[(31 * i + 17 * p + 100) % 40_000 for i in range(n)] for p, n in enumerate([1, 40, 65])]
    results = []
    for kind in ("torch", "native"):
        decoder = Decoder.load(smollm2_store, kernels_of(kind, config, compute))
        cache = "bf16"
        results.append(torch.cat(logits_of(decoder, prompts, [1, 40, 33], cache)))
    reference, native = (torch.log_softmax(logits, dim=1) for logits in results)
    # Rounding differs in the last place of each kernel; quantized activations then differ by a level here and there.
    divergence = (reference.exp() * (reference - native)).sum(dim=1)
    assert divergence.mean() < 0.01
    assert (reference.argmax(dim=1) == native.argmax(dim=1)).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["native"])
def test_a_rows_logits_are_the_same_bits_whatever_is_computed_beside_it(kind: str, smollm2_store: Path) -> None:
    config = StoreManifest.load(smollm2_store).config
    decoder = Decoder.load(smollm2_store, kernels_of(kind, config, "int8"))
    prompts = [[(31 * i + 17 * p + 100) % 40_000 for i in range(n)] for p, n in enumerate([1, 31, 64, 65, 90])]
    cache = KeyValueCache(config, 64, decoder.kernels.cache_kinds[0])
    together = logits_of(decoder, prompts, [1, 5, 64, 3, 16], cache)
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = logits_of(decoder, [prompt], [len(prompt)], cache)
        assert torch.equal(alone, logits)


def test_a_model_of_another_kind_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for change, message in [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"attention_bias": True}, "q_proj.bias"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelFormatError, match=message):
            import_model(folder, tmp_path / "store")


@pytest.mark.parametrize("quantize", ["int4", "int8", "bf16"])
def test_a_folder_runs_at_every_precision(quantize: Any, tiny_folder: Path, tmp_path: Path) -> None:
    import_model(tiny_folder, tmp_path / "store", quantize=quantize, group_size=32)
    engine = Engine.load(tmp_path / "store", threads=1, max_batch=4, memory_bytes=256 * 1024**2)
    (completion,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert completion.output_tokens == 8 and completion.error is None


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_cache_of_whole_numbers_stays_close_to_a_bfloat16_one_and_keeps_the_bits(
    kind: Any, smollm2_store: Path
) -> None:
    config = StoreManifest.load(smollm2_store).config
    decoder = Decoder.load(smollm2_store, kernels_of("native", config, "int8"))
    if kind not in decoder.kernels.cache_kinds:
        pytest.skip("this processor has no dot products of bytes")
    prompts = [[(31 * i + 17 * p + 100) % 40_000 for i in range(n)] for p, n in enumerate([1, 33, 64, 90])]
    cuts = [1, 5, 64, 32]
    levels = logits_of(decoder, prompts, cuts, kind)
    exact = torch.cat(logits_of(decoder, prompts, cuts, "bf16")).log_softmax(dim=1)
    divergence = (exact.exp() * (exact - torch.cat(levels).log_softmax(dim=1))).sum(dim=1)
    assert divergence.mean() < {"int8": 0.02, "int4": 0.5}[kind]
    for prompt, logits in zip(prompts, levels, strict=True):
        (alone,) = logits_of(decoder, [prompt], [len(prompt)], kind)
        assert torch.equal(alone, logits)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 64, 16), (3, 100, 50), (17, 576, 40), (70, 200, 33), *((rows, 100, 136) for rows in range(2, 14))],
)
def test_whole_number_products_are_exact(rows: int, inputs: int, outputs: int, smollm2_store: Path) -> None:
    kernels = kernels_of("native", StoreManifest.load(smollm2_store).config, "int8")
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(1))
    product = kernels.linear("weight", weight)
    if not isinstance(product, PackedLinear):
        pytest.skip("this processor has no dot products of bytes")
    levels, scales = channel_levels("weight", weight)
    given = kernels.norm(torch.randn((rows, inputs)), torch.ones(inputs))
    expected = (given.values[:, :inputs].long() - 128) @ levels.long().T  # no rounding anywhere
    assert torch.equal(product(given), expected.float() * scales)


def test_the_likeliest_tokens_are_those_of_the_logits(smollm2_store: Path) -> None:
    config = StoreManifest.load(smollm2_store).config
    decoder = Decoder.load(smollm2_store, kernels_of("native", config, "int8"))
    if not decoder.picks:
        pytest.skip("this processor has no dot products of bytes")
    prompt = [(37 * i + 100) % 40_000 for i in range(150)]
    (logits,) = logits_of(decoder, [prompt], [150], "int8")
    for count in (1, 4, 17, 150):
        cache = KeyValueCache(config, 64, "int8")
        batch = build_batch([Slice(sequences_of([prompt], config)[0], 0, 150)])
        batch = replace(batch, logit_rows=torch.arange(count))
        with torch.inference_mode():
            found = decoder.likeliest(batch, cache)
        assert found.scales is not None
        assert torch.equal(found.tokens, logits[:count].argmax(dim=1))
        assert torch.equal(found.tops * found.scales, logits[:count].amax(dim=1))

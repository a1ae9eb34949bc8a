"""In float32 the engine's greedy tokens are transformers' own, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inference import Engine, SamplingParams

NEW_TOKENS = 16

PROMPTS = [
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "List three uses of a paper clip.",
    "Translate to German: The water runs through the pipe.",
    "Write a haiku about rivers.",
    "Describe a hand-thrown ceramic mug with a speckled glaze in 40 words.",
    "請用繁體中文介紹台北這座城市。",
    "這個陶瓷馬克杯有什麼特色？請寫一段商品描述。",
    "水力發電廠的壓力鋼管有什麼作用？",
    "把下面這句話翻譯成英文：今天天氣很好，我們去爬山吧。",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n",
    "SELECT name, COUNT(*) FROM orders WHERE created_at > '2026-01-01' GROUP BY",
    'Fix this JSON: {"name": "mug", "price": 12.5, "tags": ["blue", }',
    "for (int i = 0; i < n; i++) { total += values[i] * 3.14159; }",
    "🎉🎊 Party time! What should I bring? 🍕🥤",
    "Reply with one emoji only: 😀 or 😢? 👩‍👩‍👧‍👦",
    "1 2 3 5 8 13 21 34",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 15 + "Summarize the text above.",
    ("水從高處流下，推動水輪機，轉動發電機。 " * 8) + "請摘要以上內容。",
]


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent),
        gguf_file=smollm2_gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    return model.eval()


@pytest.fixture(scope="module")
def exact_engine(smollm2_store: Path) -> Engine:
    return Engine.load(smollm2_store, threads=1, compute="fp32", max_batch=20, memory_bytes=3 * 1024**3)


def test_greedy_tokens_in_float32_equal_transformers_for_twenty_prompts_in_one_batch(
    exact_engine: Engine, reference: Any
) -> None:
    tokenizer = exact_engine.tokenizer
    prompts = [
        tokenizer.encode(text) if index % 4 == 3 else tokenizer.encode_chat([{"role": "user", "content": text}])
        for index, text in enumerate(PROMPTS)
    ]
    completions = exact_engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    for text, prompt, completion in zip(PROMPTS, prompts, completions, strict=True):
        made = list(completion.token_ids)
        assert len(made) == NEW_TOKENS
        # Given the tokens so far, each next one is the reference's likeliest: by induction this is its greedy output.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + made])).logits[0]
        greedy = logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()
        assert made == greedy, text


def test_a_whole_answer_equals_what_transformers_generates(exact_engine: Engine, reference: Any) -> None:
    prompt = exact_engine.tokenizer.encode_chat([{"role": "user", "content": PROMPTS[0]}])
    (completion,) = exact_engine.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2
        )
    assert list(completion.token_ids) == output[0, len(prompt) :].tolist()
    assert completion.finish_reason == "stop"
    assert completion.text == "The capital of France is Paris."

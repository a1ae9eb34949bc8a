"""Several samples of one request, and the log-probabilities of what was chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch

from inference import Completion, Engine, SamplingParams
from inference.request import GenerationRequest, TokenEvent

PROMPT = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def tiny(tiny_store: Path) -> Engine:
    return Engine.load(tiny_store, threads=1, max_batch=8, memory_bytes=1024**3)


def run(engine: Engine, sampling: SamplingParams, prompt: list[int] = PROMPT) -> Completion:
    (completion,) = engine.generate([prompt], sampling)
    assert completion.error is None
    return completion


def test_each_of_n_samples_is_what_its_seed_alone_would_give(tiny: Engine) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=4, ignore_eos=True, logprobs=0)
    completion = run(tiny, sampling)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in completion.choices}) == 4
    assert completion.choices == run(tiny, sampling).choices
    alone = run(tiny, SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True))
    assert completion.token_ids == completion.choices[0].token_ids == alone.token_ids
    assert completion.output_tokens == 4 * 12 and completion.prompt_tokens == len(PROMPT)
    assert completion.logprobs == completion.choices[0].logprobs
    for choice in completion.choices:
        assert choice.logprobs is not None and choice.finish_reason == "length"
        assert tuple(entry.token_id for entry in choice.logprobs) == choice.token_ids
        assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in choice.logprobs))


def test_best_of_returns_the_samples_with_the_highest_mean_log_probability(tiny: Engine) -> None:
    shared: dict[str, Any] = {"max_tokens": 9, "temperature": 1.3, "seed": 11}
    every = run(tiny, SamplingParams(n=6, logprobs=0, **shared))

    def mean(index: int) -> float:
        choice = every.choices[index]
        assert choice.cumulative_logprob is not None
        return choice.cumulative_logprob / len(choice.token_ids)

    best = sorted(range(6), key=mean, reverse=True)[:2]
    chosen = run(tiny, SamplingParams(n=2, best_of=6, **shared))
    assert [choice.token_ids for choice in chosen.choices] == [every.choices[index].token_ids for index in best]
    assert [choice.index for choice in chosen.choices] == [0, 1]
    assert chosen.token_ids == every.choices[best[0]].token_ids
    assert chosen.logprobs is None and all(choice.logprobs is None for choice in chosen.choices)
    assert chosen.output_tokens == every.output_tokens


def test_events_tell_which_sample_they_are_of_and_add_up_to_each(engine: Engine) -> None:
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "Name a fruit."}])
    events: list[TokenEvent] = []
    done: list[Completion] = []
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=2, n=3, logprobs=1)
    engine.submit(GenerationRequest("n", tuple(prompt), sampling), on_token=events.append, on_finish=done.append)
    while not done:
        assert engine.step()
    for choice in done[0].choices:
        own = [event for event in events if event.index == choice.index]
        assert "".join(event.text for event in own) == choice.text
        assert sum((event.token_ids for event in own), ()) == choice.token_ids
        assert sum((event.logprobs or () for event in own), ()) == choice.logprobs
    best: list[TokenEvent] = []
    ranked = SamplingParams(max_tokens=3, temperature=1.0, seed=2, n=1, best_of=2)
    engine.submit(GenerationRequest("best", tuple(prompt), ranked), on_token=best.append, on_finish=done.append)
    while len(done) < 2:
        assert engine.step()
    assert best == []


def test_cancelling_ends_every_sample_and_a_bad_one_is_one_error(tiny: Engine) -> None:
    done: list[Completion] = []
    sampling = SamplingParams(max_tokens=200, temperature=1.0, n=5, ignore_eos=True)
    tiny.submit(GenerationRequest("n", tuple(PROMPT), sampling), on_finish=done.append)
    for _ in range(4):
        tiny.step()
    assert tiny.stats().running == 5
    tiny.cancel("n")
    tiny.step()
    assert [completion.finish_reason for completion in done] == ["cancelled"]
    assert {choice.finish_reason for choice in done[0].choices} == {"cancelled"}
    assert 5 <= done[0].output_tokens == sum(len(choice.token_ids) for choice in done[0].choices)
    for field, values in {
        "logit_bias": {"logit_bias": ((512, 1.0),)},
        "stop_token_ids": {"stop_token_ids": (512,)},
    }.items():
        tiny.submit(GenerationRequest("bad", tuple(PROMPT), SamplingParams(n=3, **values)), on_finish=done.append)
        tiny.step()
        assert done[-1].finish_reason == "error"
        assert done[-1].error == f"{field}: token id 512 is not in the vocabulary of 512"
    tiny.submit(GenerationRequest("n", tuple(PROMPT), sampling), on_finish=done.append)
    tiny.submit(GenerationRequest("n", tuple(PROMPT), sampling), on_finish=done.append)
    tiny.step()
    assert done[-1].error is not None and "'n' is in use" in done[-1].error
    tiny.cancel("n")
    tiny.step()
    stats = tiny.stats()
    assert stats.running == stats.waiting == stats.cache_pages_used == 0


def test_a_stop_token_ends_the_output_and_its_text_is_left_out(engine: Engine) -> None:
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    (whole,) = engine.generate([prompt], SamplingParams(max_tokens=20))
    third = whole.token_ids[2]
    (ended,) = engine.generate([prompt], SamplingParams(max_tokens=20, stop_token_ids=(third,)))
    assert ended.token_ids == whole.token_ids[:3] and ended.finish_reason == "stop"
    assert ended.text == engine.tokenizer.decode(whole.token_ids[:2])
    (later,) = engine.generate([prompt], SamplingParams(max_tokens=6, stop_token_ids=(third,), min_tokens=5))
    assert third not in later.token_ids[:4]


def test_log_probabilities_are_those_of_transformers(tiny_llama: Callable[..., Any], tiny_store: Path) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=4, memory_bytes=1024**3, compute="fp32")
    completion = run(engine, SamplingParams(max_tokens=10, temperature=0.8, seed=3, logprobs=4, ignore_eos=True))
    with torch.inference_mode():
        logits = tiny_llama()(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0]
    expected = scipy.special.log_softmax(logits.double().numpy(), axis=1)[len(PROMPT) - 1 :]
    assert completion.logprobs is not None
    for place, entry in enumerate(completion.logprobs):
        assert entry.logprob == pytest.approx(expected[place, entry.token_id], abs=1e-4)
        assert [top.token_id for top in entry.top] == np.argsort(-expected[place])[:4].tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(np.sort(expected[place])[::-1][:4], abs=1e-4)


def test_log_probabilities_have_the_same_bits_alone_and_in_any_batch(engine: Engine) -> None:
    prompts = [[100 + i, 7, 8, 9 + i] * (1 + 9 * i) for i in range(5)]
    samplings = [
        SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=9, logprobs=2, temperature=1.0, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=7, logprobs=0, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.7, seed=2, n=2, best_of=3, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=5, ignore_eos=True),
    ]
    alone = [engine.generate([prompt], one)[0].choices for prompt, one in zip(prompts, samplings, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0, 1, 3]):
        mixed = engine.generate([prompts[i] for i in order], [samplings[i] for i in order])
        assert [completion.choices for completion in mixed] == [alone[i] for i in order]


def test_many_threads_may_submit_several_samples_at_once(tiny: Engine) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=1.0, seed=9, n=3)
    expected = [choice.token_ids for choice in run(tiny, sampling).choices]
    tiny.start()
    results: list[list[tuple[int, ...]]] = []
    threads = [
        threading.Thread(target=lambda: results.append([c.token_ids for c in run(tiny, sampling).choices]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tiny.stop()
    assert results == [expected] * 4

"""The running batch: who joins, who leaves, and that nobody's output depends on the others."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference import Completion, Engine, SamplingParams
from inference.errors import MemoryBudgetError, SettingError
from inference.request import GenerationRequest, InvalidRequest, TokenEvent

TEXTS = [
    "What is the capital of France?",
    "請用中文介紹台北。",
    "def add(a, b):",
    "Describe a ceramic mug. " * 12,
    "🎉 party",
]


class Listener:
    """Collects what a request reports."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.completions: list[Completion] = []
        self.ended = threading.Event()
        self.begun = threading.Event()

    def on_token(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.begun.set()

    def on_finish(self, completion: Completion) -> None:
        self.completions.append(completion)
        self.ended.set()


def submit(engine: Engine, name: str, prompt: list[int], sampling: SamplingParams, priority: int = 0) -> Listener:
    listener = Listener()
    engine.submit(
        GenerationRequest(name, tuple(prompt), sampling, priority),
        on_token=listener.on_token,
        on_finish=listener.on_finish,
    )
    return listener


def step_until(engine: Engine, *listeners: Listener) -> None:
    while not all(listener.completions for listener in listeners):
        assert engine.step()


def chat(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.encode_chat([{"role": "user", "content": text}])


def test_outputs_are_the_same_alone_and_in_any_mixed_batch(engine: Engine) -> None:
    prompts = [chat(engine, text) for text in TEXTS]
    samplings = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.3, top_p=0.8, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=14, ignore_eos=True),
    ]
    alone = [
        engine.generate([prompt], sampling)[0].token_ids for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    for seed in range(3):
        order = list(range(len(prompts))) * 2
        random.Random(seed).shuffle(order)
        mixed = engine.generate([prompts[i] for i in order], [samplings[i] for i in order])
        assert [completion.token_ids for completion in mixed] == [alone[i] for i in order]


def test_a_request_that_joins_midway_changes_nothing_for_those_that_run(engine: Engine) -> None:
    first, second = chat(engine, TEXTS[0]), chat(engine, TEXTS[3])
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    alone = [
        completion.token_ids
        for completion in (*engine.generate([first], sampling), *engine.generate([second], sampling))
    ]
    early = submit(engine, "early", first, sampling)
    for _ in range(5):
        engine.step()
    late = submit(engine, "late", second, sampling)
    step_until(engine, early, late)
    assert [early.completions[0].token_ids, late.completions[0].token_ids] == alone


def test_seeds_repeat_and_differ(engine: Engine) -> None:
    prompt = chat(engine, "Tell me a story.")
    first, again, other, free = engine.generate(
        [prompt] * 4, [SamplingParams(max_tokens=16, temperature=1.0, seed=seed) for seed in (1, 1, 2, None)]
    )
    assert first.token_ids == again.token_ids != other.token_ids
    assert free.error is None


def test_a_tiny_nucleus_is_greedy(engine: Engine) -> None:
    prompt = chat(engine, TEXTS[0])
    greedy, drawn = engine.generate(
        [prompt] * 2,
        [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=1.0, top_p=1e-6, seed=3)],
    )
    assert greedy.token_ids == drawn.token_ids


def test_the_texts_of_all_events_add_up_to_the_completions_text(engine: Engine) -> None:
    listeners = [
        submit(engine, f"r{i}", chat(engine, text), SamplingParams(max_tokens=24, stop=("。", "the ")))
        for i, text in enumerate(TEXTS)
    ]
    step_until(engine, *listeners)
    for listener in listeners:
        (completion,) = listener.completions
        assert "".join(event.text for event in listener.events) == completion.text
        assert tuple(token for event in listener.events for token in event.token_ids) == completion.token_ids
        assert not any("\ufffd" in event.text for event in listener.events[:-1])
        assert "the " not in completion.text


def test_a_stop_string_across_token_borders_ends_the_output_before_it(engine: Engine) -> None:
    prompt = chat(engine, TEXTS[0])
    (whole,) = engine.generate([prompt], SamplingParams(max_tokens=20))
    assert whole.text == "The capital of France is Paris."
    (stopped,) = engine.generate([prompt], SamplingParams(max_tokens=20, stop=("ital of Fr", "never")))
    assert stopped.text == "The cap"
    assert stopped.finish_reason == "stop"
    assert stopped.output_tokens < whole.output_tokens
    assert stopped.token_ids == whole.token_ids[: stopped.output_tokens]


def test_length_and_end_token_are_told_apart(engine: Engine) -> None:
    prompt = chat(engine, TEXTS[0])
    cut, ended, on, least = engine.generate(
        [prompt] * 4,
        [
            SamplingParams(max_tokens=3),
            SamplingParams(max_tokens=20),
            SamplingParams(max_tokens=20, ignore_eos=True),
            SamplingParams(max_tokens=20, min_tokens=15),
        ],
    )
    assert (cut.finish_reason, cut.output_tokens) == ("length", 3)
    assert ended.finish_reason == "stop" and ended.token_ids[-1] in engine.tokenizer.eos_token_ids
    assert (on.finish_reason, on.output_tokens) == ("length", 20)
    assert least.output_tokens >= 15 and 2 not in least.token_ids[:14]


def test_a_bad_request_ends_with_an_error_that_says_why_and_harms_nobody(engine: Engine) -> None:
    good = submit(engine, "good", chat(engine, TEXTS[0]), SamplingParams(max_tokens=20))
    bad = {
        "empty": (submit(engine, "empty", [], SamplingParams()), "at least one token"),
        "long": (
            submit(engine, "long", [5] * 8192, SamplingParams()),
            "has 8192 tokens; this model takes at most 8191",
        ),
        "alien": (submit(engine, "alien", [5, 49152], SamplingParams()), "49152 is not in the vocabulary"),
        "negative": (submit(engine, "negative", [-1], SamplingParams()), "-1 is not in the vocabulary"),
        "good": (submit(engine, "good", [5], SamplingParams()), "'good' is in use"),
    }
    step_until(engine, good, *(listener for listener, _ in bad.values()))
    assert good.completions[0].text == "The capital of France is Paris."
    for listener, message in bad.values():
        (completion,) = listener.completions
        assert completion.finish_reason == "error"
        assert completion.error is not None and message in completion.error
        assert completion.output_tokens == 0


def test_special_tokens_alone_are_a_prompt_like_any_other(engine: Engine) -> None:
    (completion,) = engine.generate([[0, 1, 2, 1, 2]], SamplingParams(max_tokens=4))
    assert completion.error is None


def test_callbacks_that_fail_are_contained(engine: Engine) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("not the engine's fault")

    engine.submit(GenerationRequest("failing", (5, 6), SamplingParams(max_tokens=3)), on_token=fail, on_finish=fail)
    fine = submit(engine, "fine", chat(engine, TEXTS[0]), SamplingParams(max_tokens=20))
    step_until(engine, fine)
    assert fine.completions[0].text == "The capital of France is Paris."


def test_a_cancelled_request_keeps_what_it_has_and_frees_its_place(engine: Engine) -> None:
    doomed = submit(engine, "doomed", chat(engine, TEXTS[0]), SamplingParams(max_tokens=200, ignore_eos=True))
    other = submit(engine, "other", chat(engine, TEXTS[1]), SamplingParams(max_tokens=8, ignore_eos=True))
    waiting = submit(engine, "waiting", chat(engine, TEXTS[2]), SamplingParams(max_tokens=8))
    engine.cancel("waiting")
    for _ in range(4):
        engine.step()
    engine.cancel("doomed")
    engine.cancel("unknown")
    step_until(engine, doomed, other, waiting)
    (completion,) = doomed.completions
    assert completion.finish_reason == "cancelled"
    assert 0 < completion.output_tokens < 8
    assert waiting.completions[0].finish_reason == "cancelled"
    assert other.completions[0].finish_reason == "length"
    assert engine.stats().cache_pages_used == 0


def test_a_budget_without_room_is_refused_with_figures(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_IMAGES", str(tmp_path))
    with pytest.raises(MemoryBudgetError, match=r"1000000 bytes .* allow \d+ bytes"):
        Engine.load(tiny_store, threads=1, memory_bytes=1_000_000)


def test_compute_seconds_add_up_to_the_busy_time(engine: Engine) -> None:
    before = engine.stats()
    completions = engine.generate([chat(engine, text) for text in TEXTS], SamplingParams(max_tokens=10))
    after = engine.stats()
    busy = after.busy_seconds - before.busy_seconds
    assert sum(completion.compute_seconds for completion in completions) == pytest.approx(busy)
    for completion in completions:
        assert completion.ttft_seconds is not None
        assert 0 <= completion.queued_seconds <= completion.ttft_seconds <= completion.duration_seconds
    assert after.output_tokens - before.output_tokens == sum(completion.output_tokens for completion in completions)
    computed, found = after.prefill_tokens - before.prefill_tokens, after.prefix_hit_tokens - before.prefix_hit_tokens
    assert computed + found == sum(completion.prompt_tokens for completion in completions)
    assert found == sum(completion.cached_prompt_tokens for completion in completions)


def test_a_background_thread_serves_many_threads_and_stops_cleanly(engine: Engine) -> None:
    prompts = [chat(engine, text) for text in TEXTS]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = [completion.token_ids for completion in engine.generate(prompts, sampling)]
    engine.start()
    engine.start()
    results: dict[int, list[Completion]] = {}

    def work(index: int) -> None:
        results[index] = engine.generate(prompts, sampling)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([completion.token_ids for completion in done] == expected for done in results.values())
    endless = submit(engine, "endless", prompts[0], SamplingParams(max_tokens=4000, ignore_eos=True))
    assert endless.begun.wait(60)
    engine.stop()
    assert endless.completions[0].finish_reason == "cancelled"
    assert engine.generate(prompts[:1], sampling)[0].token_ids == expected[0]


def test_an_unusable_sampling_is_refused_by_field() -> None:
    for field, values in {
        "max_tokens": {"max_tokens": 0},
        "temperature": {"temperature": -0.1},
        "top_p": {"top_p": 0.0},
        "stop": {"stop": ("",)},
        "min_tokens": {"min_tokens": 300},
        "seed": {"seed": 2**64},
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**values)  # type: ignore[arg-type]
        assert caught.value.field == field


def test_as_many_samplings_as_prompts_are_wanted(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="2 given for 1"):
        engine.generate([[5]], [SamplingParams(), SamplingParams()])


def test_the_number_of_threads_changes_no_token(tiny_store: Path) -> None:
    prompts = [[5 + i] * (1 + 37 * i) for i in range(6)]
    outputs = []
    for threads in (1, 2):
        engine = Engine.load(tiny_store, threads=threads, max_batch=6, memory_bytes=1024**3)
        done = engine.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
        outputs.append([completion.token_ids for completion in done])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("compute", ["fp32", "bf16", "int8"])
def test_without_compiled_kernels_a_prompt_longer_than_a_piece_is_answered(
    compute: Any, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    engine = Engine.load(tiny_store, threads=1, compute=compute, max_batch=2, memory_bytes=256 * 1024**2)
    (completion,) = engine.generate([[3 + i % 500 for i in range(300)]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert engine.stats().kernels == "torch"
    assert completion.error is None and completion.output_tokens == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("compute", "int2"),
        ("cache", "int3"),
        ("threads", 0),
        ("threads", "2"),
        ("memory_bytes", float("nan")),
        ("max_batch", 0),
        ("token_budget", 0),
        ("memory_bytes", -1),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(tiny_store: Path, setting: str, value: Any) -> None:
    with pytest.raises(SettingError, match=setting) as refused:
        Engine.load(tiny_store, **{setting: value})
    assert refused.value.setting == setting


def test_an_urgent_request_among_hundreds_gets_its_first_token_in_the_next_step(tiny_store: Path) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=64, memory_bytes=200_000_000)
    done: list[Completion] = []
    for number in range(300):
        request = GenerationRequest(f"row-{number}", (5, number % 50, 7), SamplingParams(max_tokens=40), priority=3)
        engine.submit(request, on_finish=done.append)
    for _ in range(5):
        engine.step()
    urgent = Listener()
    engine.submit(
        GenerationRequest("urgent", (1, 2, 3), SamplingParams(max_tokens=4), priority=0),
        on_token=urgent.events.append,
        on_finish=urgent.completions.append,
    )
    assert len(done) < 300 and not urgent.events
    engine.step()
    assert len(urgent.events) == 1
    while len(done) < 300:
        engine.step()
    assert {completion.finish_reason for completion in done} <= {"length", "stop"}  # paused, never lost


def test_prompts_may_be_arrays(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    prompts: Any = np.array([[5, 6]])
    assert engine.generate(prompts, sampling)[0].token_ids == engine.generate([[5, 6]], sampling)[0].token_ids


@pytest.mark.parametrize(
    "prompts", ["text", b"bytes", ["fine", None], ["fine", 5], ["fine", [1.5]], ["fine", "\ud800"]]
)
def test_generate_and_embed_compute_nothing_where_one_prompt_is_none(engine: Engine, prompts: Any) -> None:
    before = engine.stats()
    for call in (lambda: engine.generate(prompts, SamplingParams(max_tokens=1)), lambda: engine.embed(prompts)):
        with pytest.raises(InvalidRequest, match=r"^prompts" if isinstance(prompts, str | bytes) else r"^prompts\[1\]"):
            call()
    assert engine.stats() == before


def test_what_interrupts_a_call_cancels_its_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = engine.step, itertools.count()

    def interrupted() -> bool:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    cancelled = engine.stats().cancelled
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5], [6], [7]], SamplingParams(max_tokens=500, ignore_eos=True))
    monkeypatch.undo()
    (after,) = engine.generate([[5]], SamplingParams(max_tokens=2))
    assert after.error is None
    assert engine.stats().cancelled == cancelled + 3
    assert engine.stats().running == engine.stats().waiting == 0

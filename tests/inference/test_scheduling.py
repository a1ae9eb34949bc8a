"""Sharing of prefixes, memory that runs out, and urgent requests: nobody's output is changed by any of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from inference import Completion, Engine, SamplingParams
from inference.request import GenerationRequest, TokenEvent

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def reference(tiny_store: Path) -> Engine:
    """Shares nothing, and has room for everyone."""
    return Engine.load(tiny_store, threads=1, max_batch=64, memory_bytes=1024**3, share_prefixes=False)


@pytest.fixture
def make(tiny_store: Path) -> Make:
    """Makes an engine on the tiny model with so many pages of cache."""

    def engine(pages: int = 200, *, max_batch: int = 8, token_budget: int = 256, share_prefixes: bool = True) -> Engine:
        settings = {"max_batch": max_batch, "token_budget": token_budget}
        roomy = Engine.load(tiny_store, threads=1, memory_bytes=1024**3, **settings)
        spare = (roomy.stats().cache_pages_total - pages) * roomy.cache_page_bytes
        made = Engine.load(
            tiny_store,
            threads=1,
            memory_bytes=roomy.memory_bytes_at_most - spare,
            share_prefixes=share_prefixes,
            **settings,
        )
        assert made.stats().cache_pages_total == min(pages, roomy.stats().cache_pages_total)
        return made

    return engine


class Listener:
    """Collects what requests report, in the order in which they do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[str] = []
        self.completions: dict[str, Completion] = {}

    def submit(
        self, name: str, prompt: list[int], tokens: int = 8, priority: int = 0, seed: int | None = None
    ) -> SamplingParams:
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0.0 if seed is None else 1.0, seed=seed
        )
        self.engine.submit(
            GenerationRequest(name, tuple(prompt), sampling, priority), on_token=self.hear, on_finish=self.finish
        )
        return sampling

    def hear(self, event: TokenEvent) -> None:
        self.events.append(event.request_id)

    def finish(self, completion: Completion) -> None:
        self.completions[completion.request_id] = completion

    def run(self, *names: str) -> None:
        while not self.completions.keys() >= set(names):
            assert self.engine.step()


def tokens_of(length: int, salt: int) -> list[int]:
    return [(7 * i * i + 11 * i * salt + salt) % 500 + 5 for i in range(length)]


def outputs(engine: Engine, prompts: list[list[int]], tokens: int = 8) -> list[tuple[int, ...]]:
    return [made.token_ids for made in engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))]


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_part(
    make: Make, reference: Engine
) -> None:
    engine = make()
    common = tokens_of(100, 1)
    prompts = [common + tokens_of(20, salt) for salt in (2, 3)]
    expected = outputs(reference, prompts)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    (first,), (second,) = (engine.generate([prompt], sampling) for prompt in prompts)
    assert [first.token_ids, second.token_ids] == expected
    assert first.cached_prompt_tokens == 0
    assert second.cached_prompt_tokens == 96  # three pages of 32
    assert second.prompt_tokens == 120
    assert engine.stats().prefill_tokens == 120 + 24
    assert engine.stats().prefix_hit_tokens == 96


def test_the_last_token_of_a_prompt_is_always_computed(make: Make, reference: Engine) -> None:
    engine = make()
    prompt = tokens_of(64, 1)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    (expected,) = outputs(reference, [prompt], 4)
    for cached in (0, 63):
        (made,) = engine.generate([prompt], sampling)
        assert made.token_ids == expected
        assert made.cached_prompt_tokens == cached


def test_a_page_that_differs_further_on_is_copied_and_computed_from_there(make: Make, reference: Engine) -> None:
    engine = make()
    common = tokens_of(80, 1)
    prompts = [common + tokens_of(40, salt) for salt in (2, 3)]
    expected = outputs(reference, prompts)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    for cached, prompt, output in zip((0, 80), prompts, expected, strict=True):
        (made,) = engine.generate([prompt], sampling)
        assert made.cached_prompt_tokens == cached
        assert made.token_ids == output
    # The first one's own page is as it was.
    assert outputs(engine, prompts[:1]) == expected[:1]


def test_an_output_can_be_the_beginning_of_the_next_prompt(make: Make, reference: Engine) -> None:
    engine = make()
    prompt = tokens_of(40, 1)
    (answer,) = outputs(engine, [prompt], 40)
    again = [*prompt, *answer, 7, 8, 9]
    (made,) = engine.generate([again], SamplingParams(max_tokens=8, ignore_eos=True))
    assert made.cached_prompt_tokens == 64
    assert [made.token_ids] == outputs(reference, [again])


def test_prompts_that_come_together_compute_what_they_share_once(make: Make, reference: Engine) -> None:
    engine = make(max_batch=8, token_budget=512)
    common = tokens_of(300, 1)
    prompts = [common + tokens_of(10 + salt, salt) for salt in range(8)]
    assert outputs(engine, prompts) == outputs(reference, prompts)
    # 9 pages are whole in what they share; each computes its own rest of 12 tokens and more.
    rest = sum(len(prompt) - 288 for prompt in prompts)
    assert engine.stats().prefill_tokens == 288 + rest
    assert engine.stats().cache_pages_used == 0


def test_sharing_can_be_turned_off(make: Make) -> None:
    engine = make(share_prefixes=False)
    prompt = tokens_of(100, 1)
    assert outputs(engine, [prompt]) == outputs(engine, [prompt])
    assert engine.stats().prefix_hit_tokens == engine.stats().cache_pages_idle == 0


def test_prefixes_can_be_forgotten(make: Make) -> None:
    engine = make()
    outputs(engine, [tokens_of(100, 1)])
    assert engine.stats().cache_pages_idle == 3
    engine.forget_prefixes()
    assert engine.stats().cache_pages_idle == 0
    (made,) = engine.generate([tokens_of(100, 1)], SamplingParams(max_tokens=1))
    assert made.cached_prompt_tokens == 0


def test_requests_that_outgrow_the_memory_take_turns_and_give_the_same_outputs(make: Make, reference: Engine) -> None:
    engine = make(10)
    (refused,) = engine.generate([[5] * 30], SamplingParams(max_tokens=300))
    assert refused.finish_reason == "error"
    assert refused.error is not None and "need 11 cache pages; the engine's memory holds 10" in refused.error
    # Each needs 1 page at first and 5 of the 10 in the end.
    prompts = [tokens_of(20, salt) for salt in range(5)]
    listener = Listener(engine)
    for index, prompt in enumerate(prompts):
        listener.submit(f"r{index}", prompt, 140)
    most = 0
    while len(listener.completions) < 5:
        assert engine.step()
        assert engine.stats().cache_pages_used <= 10
        most = max(most, engine.stats().running)
    assert most > 2
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0
    assert stats.cache_pages_used == 0 and stats.cache_pages_peak == 10
    expected = outputs(reference, prompts, 140)
    assert [listener.completions[f"r{index}"].token_ids for index in range(5)] == expected
    # The first to come is never preempted, so it ends first.
    assert next(iter(listener.completions)) == "r0"


def test_a_drawn_output_goes_on_where_it_was_after_a_preemption(make: Make, reference: Engine) -> None:
    tight = Listener(make(6))
    roomy = Listener(reference)
    for listener in (tight, roomy):
        for index in range(4):
            listener.submit(f"d{index}", tokens_of(30, index), 100, seed=index)
        listener.run("d0", "d1", "d2", "d3")
    assert tight.engine.stats().preemptions > 0
    for name, completion in tight.completions.items():
        assert completion.token_ids == roomy.completions[name].token_ids
        assert completion.output_tokens == 100


def test_an_urgent_request_is_answered_before_the_full_batch_makes_another_token(make: Make) -> None:
    listener = Listener(make(max_batch=2, token_budget=256))
    for name in ("b0", "b1"):
        listener.submit(name, tokens_of(40, 1), 30, priority=9)
    for _ in range(6):
        listener.engine.step()
    heard = len(listener.events)
    listener.submit("urgent", tokens_of(90, 2), 4, priority=0)
    listener.engine.step()
    assert listener.events[heard:] == ["urgent"]
    assert listener.engine.stats().paused == 1
    assert listener.engine.stats().pauses == 1
    listener.run("urgent")
    assert listener.events[heard:].count("b0") == 3  # ran beside it, while the later one was paused
    assert listener.events[heard:].count("b1") == 0
    listener.run("b0", "b1")
    assert listener.engine.stats().paused == listener.engine.stats().preemptions == 0


def test_pausing_changes_no_output(make: Make, reference: Engine) -> None:
    listener = Listener(make(max_batch=3))
    prompts = {f"b{index}": tokens_of(50 + index, index) for index in range(3)}
    for name, prompt in prompts.items():
        listener.submit(name, prompt, 20, priority=9)
    for round_ in range(5):
        listener.engine.step()
        listener.submit(f"u{round_}", tokens_of(33, 50 + round_), 3, priority=round_ % 2)
    listener.run(*prompts, "u0", "u1", "u2", "u3", "u4")
    assert [listener.completions[name].token_ids for name in prompts] == outputs(reference, [*prompts.values()], 20)


def test_an_urgent_request_that_finds_no_memory_takes_it_from_the_least_urgent(make: Make, reference: Engine) -> None:
    listener = Listener(make(10))
    prompts = [tokens_of(100, salt) for salt in range(2)]
    for index, prompt in enumerate(prompts):
        listener.submit(f"b{index}", prompt, 30, priority=5)
    for _ in range(4):
        listener.engine.step()
    assert listener.engine.stats().running == 2
    heard = len(listener.events)
    listener.submit("urgent", tokens_of(150, 9), 20, priority=1)
    listener.engine.step()
    assert listener.events[heard:] == ["urgent"]
    assert listener.engine.stats().preemptions == 1
    listener.run("urgent", "b0", "b1")
    assert [listener.completions[f"b{i}"].token_ids for i in range(2)] == outputs(reference, prompts, 30)


def test_a_request_that_comes_during_a_step_is_answered_within_it_if_it_is_more_urgent(
    make: Make, reference: Engine
) -> None:
    listener = Listener(make(max_batch=1))
    engine = listener.engine
    prompt, urgent = tokens_of(60, 1), tokens_of(70, 2)
    listener.submit("batch", prompt, 10, priority=9)
    engine.step()
    late = threading.Event()

    def submit_midway() -> None:
        if not late.is_set():
            late.set()
            listener.submit("equal", urgent, 5, priority=9)
            listener.submit("urgent", urgent, 5, priority=0)

    # What the second step of the batch calls between its layers, as another thread might at that moment.
    engine_hook = engine._batch.step_ahead
    engine._batch.step_ahead = lambda: (submit_midway(), engine_hook())  # type: ignore[method-assign, assignment]
    heard = len(listener.events)
    engine.step()
    assert listener.events[heard:] == ["urgent", "batch"]
    listener.run("batch", "equal", "urgent")
    assert listener.completions["batch"].token_ids == outputs(reference, [prompt], 10)[0]
    assert listener.completions["urgent"].token_ids == outputs(reference, [urgent], 5)[0]
    total = sum(completion.compute_seconds for completion in listener.completions.values())
    assert total == pytest.approx(engine.stats().busy_seconds)


def test_equal_priority_runs_in_order_of_arrival(make: Make) -> None:
    listener = Listener(make(max_batch=1))
    for name, priority in [("a", 5), ("b", 5), ("c", 5), ("soon", 1)]:
        listener.submit(name, [5, 6, 7], 2, priority)
    listener.run("a", "b", "c", "soon")
    assert list(listener.completions) == ["soon", "a", "b", "c"]


@pytest.mark.parametrize("step", range(7))
def test_a_request_can_be_cancelled_at_any_step_and_frees_its_pages_at_once(make: Make, step: int) -> None:
    listener = Listener(make(max_batch=2, token_budget=256))
    listener.submit("stays", tokens_of(40, 1), 12)
    listener.submit("goes", tokens_of(500, 2), 12)
    listener.submit("waits", tokens_of(40, 3), 12)
    for _ in range(step):
        listener.engine.step()
    listener.engine.cancel("goes")
    listener.engine.step()
    assert listener.completions["goes"].finish_reason == "cancelled"
    held = listener.engine.stats()
    assert held.cache_pages_used <= 4
    listener.run("stays", "waits")
    assert listener.engine.stats().cache_pages_used == 0
    assert listener.engine.stats().cancelled == 1


def test_paused_and_preempted_requests_can_be_cancelled(make: Make) -> None:
    listener = Listener(make(10, max_batch=2))
    for name in ("b0", "b1"):
        listener.submit(name, tokens_of(60, ord(name[1])), 60, priority=5)
    for _ in range(3):
        listener.engine.step()
    listener.submit("u", tokens_of(40, 1), 60, priority=1)
    listener.engine.step()
    assert listener.engine.stats().paused == 1
    listener.engine.cancel("b1")
    listener.submit("big", tokens_of(250, 2), 60, priority=0)
    listener.engine.step()
    assert listener.completions["b1"].finish_reason == "cancelled"
    assert listener.engine.stats().preemptions > 0
    listener.engine.cancel("b0")
    listener.engine.cancel("u")
    listener.run("b0", "u", "big")
    assert listener.completions["big"].finish_reason == "length"
    assert listener.engine.stats().cache_pages_used == 0

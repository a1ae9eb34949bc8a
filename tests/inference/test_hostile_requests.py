"""No request brings the engine down, keeps a page, or changes what another one gets: whatever it asks for, and whenever
it is cancelled."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference import Completion, Constraint, Engine, SamplingParams
from inference.bench.invariance import tiny_model
from inference.bench.tiny import MAX_CONTEXT, VOCAB_SIZE
from inference.cache.pages import PagePool
from inference.errors import InvalidRequest
from inference.loading import LoadedModel
from inference.request import GenerationRequest

PAGES = 24
LONG = tuple(3 + (7 * i * i) % 300 for i in range(200))
SANE = (LONG[:80], SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2))
SCHEMA = Constraint.json_schema(
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
)


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    with tiny_model("int8") as model:
        yield model


def engine_of(model: LoadedModel, pages: int = PAGES, **given: Any) -> Engine:
    pool = PagePool(pages, model.cache.clear, model.cache.copy)
    return Engine(replace(model, pages=pool), threads=1, max_batch=4, token_budget=200, chunk_tokens=64, **given)


@pytest.fixture(scope="module")
def engine(model: LoadedModel) -> Engine:
    """One for all that is thrown at it."""
    return engine_of(model)


Outcome = tuple[object, ...]


def outcome(completion: Completion) -> Outcome:
    assert completion.error is None
    return completion.finish_reason, completion.token_ids, completion.text, completion.logprobs, completion.choices


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> Outcome:
    """What the sane request gets where there is no other."""
    (alone,) = engine_of(model, 64, share_prefixes=False).generate([SANE[0]], SANE[1])
    return outcome(alone)


class Inbox:
    """One completion a request, and no more."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.done: dict[str, Completion] = {}

    def submit(self, name: str, prompt: tuple[Any, ...], sampling: SamplingParams, priority: int = 0) -> None:
        self.engine.submit(GenerationRequest(name, prompt, sampling, priority), on_finish=self.finish)

    def finish(self, completion: Completion) -> None:
        assert self.done.setdefault(completion.request_id, completion) is completion

    def check(self, names: set[str], expected: Outcome) -> None:
        """All have ended, nothing is left, and the sane request gets what it always gets."""
        while self.engine.step():
            pass
        self.submit("sane afterwards", *SANE)
        while self.engine.step():
            pass
        assert self.done.keys() == names | {"sane afterwards"}
        assert outcome(self.done["sane afterwards"]) == expected
        stats = self.engine.stats()
        assert stats.running == stats.paused == stats.waiting == stats.cache_pages_used == 0
        for completion in self.done.values():
            assert (completion.error is not None) == (completion.finish_reason == "error")
            if completion.error is not None:
                assert len(completion.error) < 600 and "step failed" not in completion.error
                field = completion.error.split(":")[0]
                assert field in ("prompt", "constraint", "logit_bias", "stop_token_ids", "request_id"), completion.error


STRANGE_TOKENS = st.sampled_from([-1, VOCAB_SIZE, 2**70, -(2**70), None, "a", 1.5, float("nan"), (), [3]])
PROMPTS = st.one_of(
    st.just(()),
    st.just(LONG),
    st.integers(0, 80).map(lambda length: (*LONG[:length], 7, 8)),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=70).map(tuple),
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=70).map(tuple),  # special tokens alone
    st.sampled_from([MAX_CONTEXT - 1, MAX_CONTEXT, MAX_CONTEXT + 1, 300_000]).map(lambda length: (5,) * length),
    st.tuples(st.integers(0, 40), STRANGE_TOKENS).map(lambda drawn: (*LONG[: drawn[0]], drawn[1])),
)

TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "a", "^a$", "(", "(a*)*b", "[", "\\", "\ud800", "#", "#/$defs/a", "http://there/", "\0", "date"]
    ),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), TEXTS, st.lists(TEXTS, max_size=3)
)
KEYWORDS = st.sampled_from(
    re.findall(
        r"[a-zA-Z$]+",
        "type properties items prefixItems required enum const anyOf oneOf allOf not $ref $defs minLength maxLength "
        "pattern format minimum maximum exclusiveMinimum multipleOf minItems maxItems uniqueItems minProperties "
        "additionalProperties maxProperties patternProperties a b",
    )
)
KINDS = st.sampled_from(
    ["object", "array", "string", "integer", "number", "boolean", "null", "strange", ["string", "null"]]
)
SCHEMAS = st.recursive(
    st.one_of(LEAVES, st.fixed_dictionaries({"type": KINDS})),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYWORDS, inner, max_size=5),
        st.fixed_dictionaries({"type": KINDS}, optional={"properties": st.dictionaries(TEXTS, inner, max_size=3)}),
        st.fixed_dictionaries({"$defs": st.fixed_dictionaries({"a": inner}), "$ref": st.just("#/$defs/a")}),
    ),
    max_leaves=12,
)
ATOMS = st.sampled_from(re.findall(r"\S+", r"a b . [^a] (a|b) ( ) [ {2,3} {,} {9} {99999} * + ? | \d \w ^ $"))
BOMBS = st.sampled_from(
    [
        Constraint.regex("(((a{1,100}){1,100}){1,100}){1,100}b"),
        Constraint.regex(".*(a|b).{200}c"),
        Constraint.regex("(a*)*b"),
        Constraint.regex("(" * 5_000 + ")" * 5_000),
        Constraint.json_schema({"$ref": "#"}),
        Constraint.json_schema("false"),
        Constraint.json_schema({"type": "integer", "minimum": 5, "maximum": 4}),
        Constraint.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 100_000}),
        Constraint.json_schema({"enum": [f"value {i} of a long list" for i in range(2_000)]}),
        Constraint.json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_000)}}),
        Constraint.grammar("start: start"),
        Constraint.grammar('start: "a" start'),
        Constraint.grammar('start: s\ns: s s s | s s | "a" | '),
    ]
)


@st.composite
def constraints(draw: st.DrawFn) -> Constraint | None:
    """Raises InvalidRequest where it makes no sense that can be told at once."""
    kind = draw(st.sampled_from(["none", "none", "schema", "regex", "grammar", "choice", "bomb", "sane"]))
    if kind == "schema":
        return Constraint.json_schema(draw(SCHEMAS))
    if kind == "regex":
        return Constraint.regex("".join(draw(st.lists(ATOMS, max_size=12))))
    if kind == "grammar":
        return Constraint.grammar("start: " + draw(TEXTS) + draw(st.sampled_from(['"a"', "\nb: start", "b | /c/", ""])))
    if kind == "choice":
        return Constraint.choice(draw(st.lists(TEXTS, max_size=4)))
    if kind == "bomb":
        return draw(BOMBS)
    return SCHEMA if kind == "sane" else None


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    wild: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.sampled_from([0.0, 1e-9, 1.0, 100.0]),
                "seed": st.integers(-(2**63), 2**64 - 1),
                "top_k": st.sampled_from([0, 1, 10**12]),
                "top_p": st.sampled_from([1e-12, 0.5, 1.0]),
                "logprobs": st.integers(0, 20),
                "n": st.sampled_from([1, 2, 9]),
                "logit_bias": st.sampled_from(
                    [(), ((2, 100.0),), ((5, -100.0), (6, 100.0)), ((VOCAB_SIZE, 1.0),), ((10**30, 1.0),)]
                ),
                "stop": st.sampled_from([("e",), ("\ud800",), ("the value " * 1_000, "1"), (" ",) * 64]),
                "stop_token_ids": st.sampled_from([(2,), (0, 1, 2), (VOCAB_SIZE,), tuple(range(VOCAB_SIZE))]),
                "repetition_penalty": st.sampled_from([1e-9, 1.0, 100.0]),
                "ignore_eos": st.booleans(),
                "min_tokens": st.sampled_from([0, 3, 20]),
            },
        )
    )
    most = draw(st.sampled_from([20, 20, 40, 600, 10**12]))
    return SamplingParams(max_tokens=most, constraint=draw(constraints()), **wild)


@dataclass(frozen=True)
class Act:
    step: int
    prompt: tuple[Any, ...]
    sampling: SamplingParams
    priority: int
    cancel_step: int | None


@st.composite
def acts(draw: st.DrawFn) -> Act | None:
    """None: refused at once, with its field named."""
    try:
        sampling = draw(samplings())
    except InvalidRequest as error:
        assert error.field in ("constraint", "stop", "stop_token_ids", "min_tokens", "logit_bias")
        return None
    cancel = draw(st.one_of(st.none(), st.integers(0, 12)))
    return Act(draw(st.integers(0, 6)), draw(PROMPTS), sampling, draw(st.integers(0, 2)), cancel)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(acts(), min_size=1, max_size=8))
def test_whatever_is_asked_for_and_cancelled_at_whatever_step_the_engine_goes_on(
    engine: Engine, expected: Outcome, drawn: list[Act | None]
) -> None:
    inbox = Inbox(engine)
    given = {f"r{index}": act for index, act in enumerate(drawn) if act is not None}
    inbox.submit("sane beside", *SANE)
    for step in range(13):
        for name, act in given.items():
            if act.step == step:
                inbox.submit(name, act.prompt, act.sampling, act.priority)
            if act.cancel_step == step:
                engine.cancel(name)
        engine.step()
    for name, act in given.items():  # what would never end by itself
        if act.sampling.max_tokens > 100:
            engine.cancel(name)
    inbox.check({"sane beside", *given}, expected)
    assert outcome(inbox.done["sane beside"]) == expected


VICTIMS = {
    "of many pieces": (LONG, SamplingParams(max_tokens=6, ignore_eos=True)),
    "with a schema": (LONG[:50], SamplingParams(max_tokens=30, temperature=1.0, seed=3, constraint=SCHEMA)),
    "of three samples": (LONG[:90], SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=3, ignore_eos=True)),
    "the best of three": (LONG[:70], SamplingParams(max_tokens=5, temperature=1.0, seed=1, best_of=3, ignore_eos=True)),
    "with stop strings": (LONG[:40], SamplingParams(max_tokens=9, stop=("zzzz",), ignore_eos=True)),
}


@pytest.mark.parametrize("kind", VICTIMS)
def test_a_request_can_be_cancelled_at_every_step(kind: str, engine: Engine, expected: Outcome) -> None:
    prompt, sampling = VICTIMS[kind]
    (whole,) = engine.generate([prompt], sampling)
    for steps in range(100):
        engine.forget_prefixes()
        inbox = Inbox(engine)
        inbox.submit("victim", prompt, sampling)
        inbox.submit("sane beside", *SANE)
        for _ in range(steps):
            engine.step()
        ended = "victim" in inbox.done
        engine.cancel("victim")
        inbox.check({"victim", "sane beside"}, expected)
        assert outcome(inbox.done["sane beside"]) == expected
        made = inbox.done["victim"]
        if ended:
            assert outcome(made) == outcome(whole) and steps > 1
            return
        assert made.finish_reason == "cancelled"
        if sampling.best_of is None:
            for part, all_of_it in zip(made.choices, whole.choices, strict=True):
                assert part.token_ids == all_of_it.token_ids[: len(part.token_ids)]
    raise AssertionError("it never ended by itself")


def test_a_prompt_too_long_costs_no_memory_for_its_samples(engine: Engine, expected: Outcome) -> None:
    import tracemalloc

    prompt = (5,) * 1_000_000
    inbox = Inbox(engine)
    tracemalloc.start()
    try:
        inbox.submit("bulky", prompt, SamplingParams(n=128))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    inbox.check({"bulky"}, expected)
    assert "has 1000000 tokens" in str(inbox.done["bulky"].error)
    assert len(inbox.done["bulky"].choices) == 128


@pytest.mark.parametrize("place", ["choosing", "adding"])
def test_what_fails_in_one_requests_own_matters_fails_it_alone(
    place: str, engine: Engine, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library's fault would: the constraint of one request breaks down."""
    inbox = Inbox(engine)
    inbox.submit("unlucky", LONG[:40], SamplingParams(max_tokens=30, temperature=1.0, seed=1, constraint=SCHEMA))
    inbox.submit("sane beside", *SANE)
    engine.step()
    (sequence,) = [one for one in engine._batch.scheduler.running if one.request.request_id == "unlucky"]

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the library")

    constraint = sequence.constraint
    assert constraint is not None
    for name in ("allows", "allowed") if place == "choosing" else ("advance",):
        monkeypatch.setattr(type(constraint), name, fail)
    while "unlucky" not in inbox.done:
        assert engine.step()
    monkeypatch.undo()
    assert "RuntimeError: a fault of the library" in str(inbox.done.pop("unlucky").error)
    inbox.check({"sane beside"}, expected)
    assert outcome(inbox.done["sane beside"]) == expected


def test_a_fault_outside_of_the_model_ends_the_requests_at_hand_and_not_the_engine(
    model: LoadedModel, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    schedule, ended = engine._batch.scheduler.schedule, threading.Event()
    faults = iter([RuntimeError("nobody thought of this")])

    def sometimes() -> Any:
        for fault in faults:
            raise fault
        return schedule()

    monkeypatch.setattr(engine._batch.scheduler, "schedule", sometimes)
    done: list[Completion] = []

    def finish(completion: Completion) -> None:
        done.append(completion)
        ended.set()

    engine.start()
    engine.submit(GenerationRequest("unlucky", *SANE), on_finish=finish)
    assert ended.wait(60)
    assert "nobody thought of this" in str(done[0].error)
    (completion,) = engine.generate([SANE[0]], SANE[1])
    assert outcome(completion) == expected
    engine.stop()


def test_an_engine_can_be_stopped_by_what_it_calls(model: LoadedModel, expected: Outcome) -> None:
    engine, ended = engine_of(model), threading.Event()
    done: dict[str, Completion] = {}

    def finish(completion: Completion) -> None:
        done[completion.request_id] = completion
        if len(done) == 2:
            ended.set()

    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    engine.submit(GenerationRequest("endless", LONG[:40], endless), on_finish=finish)
    engine.submit(GenerationRequest("stops it", *SANE), on_token=lambda event: engine.stop(), on_finish=finish)
    engine.start()
    assert ended.wait(60)
    assert {completion.finish_reason for completion in done.values()} == {"cancelled"}
    (completion,) = engine.generate([SANE[0]], SANE[1])
    assert outcome(completion) == expected

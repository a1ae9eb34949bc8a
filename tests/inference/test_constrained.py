"""Outputs held to schemas, regular expressions, choices and grammars; and constraints that mean harm."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from inference import Completion, Constraint, Engine, SamplingParams
from inference.constrain import ConstraintCompiler
from inference.errors import InvalidRequest
from inference.request import GenerationRequest

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 20}, "number": {"type": "integer", "minimum": 1}},
    "required": ["street", "number"],
    "additionalProperties": False,
}

# Small enough that most outputs end before max_tokens, and varied in what they use.
SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -5, "maximum": 300},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["approve", "reject", 7, None, {"refer": True}]},
    {"const": {"a": [1, 2.5, None, True, "x"]}},
    {"type": "string", "minLength": 3, "maxLength": 12},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "email", "maxLength": 30},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}], "items": False, "minItems": 2},
    ADDRESS,
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 15}, "address": ADDRESS},
        "required": ["name", "address"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 8}]},
    {"oneOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}]},
    {
        "type": "object",
        "properties": {"risk": {"enum": ["low", "high"]}, "note": {"type": ["string", "null"], "maxLength": 10}},
        "required": ["risk"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "c": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]},
            {"properties": {"b": {"const": "fixed"}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {"minimum": 0}, "b": {}},
    },
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 3},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    {"type": "object", "properties": {"姓名": {"type": "string", "maxLength": 6}, "城市": {"enum": ["臺北", "高雄"]}},
     "required": ["姓名", "城市"], "additionalProperties": False},
]  # fmt: skip


def chat(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.encode_chat([{"role": "user", "content": text}])


def test_every_output_that_ends_by_itself_validates_against_its_schema(engine: Engine) -> None:
    samplings = [
        SamplingParams(max_tokens=60, temperature=1.0, seed=seed, constraint=Constraint.json_schema(schema))
        for schema in SCHEMAS
        for seed in (1, 2)
    ]
    prompt = chat(engine, "Answer in JSON.")
    ended = 0
    for sampling, completion in zip(samplings, engine.generate([prompt] * len(samplings), samplings), strict=True):
        assert completion.error is None and sampling.constraint is not None
        schema = json.loads(sampling.constraint.text)
        if completion.finish_reason == "stop":
            ended += 1
            jsonschema.validate(
                json.loads(completion.text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
        else:
            assert (completion.finish_reason, completion.output_tokens) == ("length", 60), schema
    assert ended > len(samplings) * 3 // 4


def test_forced_tokens_are_skipped_ahead_and_change_nothing(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"a_long_property_name": {"type": "boolean"}, "another_long_name": {"enum": ["left", "right"]}},
        "required": ["a_long_property_name", "another_long_name"],
        "additionalProperties": False,
    }
    prompt = chat(engine, "Which way?")
    constraint = Constraint.json_schema(schema)
    for values in ({}, {"temperature": 1.2, "seed": 8}):
        before = engine.stats().steps
        (skipping,) = engine.generate([prompt], SamplingParams(constraint=constraint, **values))
        between = engine.stats().steps
        # With log-probabilities each token's logits are computed, one a step.
        (stepping,) = engine.generate([prompt], SamplingParams(constraint=constraint, logprobs=0, **values))
        after = engine.stats().steps
        assert skipping.token_ids == stepping.token_ids and skipping.text == stepping.text
        assert stepping.logprobs is not None and len(stepping.logprobs) == stepping.output_tokens
        assert after - between >= stepping.output_tokens
        assert between - before <= stepping.output_tokens // 2
        jsonschema.validate(json.loads(skipping.text), schema)


def test_constrained_outputs_are_the_same_alone_and_in_any_batch(engine: Engine) -> None:
    prompts = [chat(engine, text) for text in ("A person.", "Yes or no?", "A code.", "Hello")]
    samplings = [
        SamplingParams(max_tokens=30, temperature=0.9, seed=1, constraint=Constraint.json_schema(ADDRESS)),
        SamplingParams(max_tokens=30, constraint=Constraint.choice(["yes", "no"])),
        SamplingParams(max_tokens=30, temperature=1.0, seed=2, n=2, constraint=Constraint.regex("[A-Z]{3}[0-9]{1,5}")),
        SamplingParams(max_tokens=12, ignore_eos=True),
    ]
    alone = [engine.generate([prompt], one)[0].choices for prompt, one in zip(prompts, samplings, strict=True)]
    for order in ([0, 1, 2, 3], [3, 2, 0, 0, 1, 2]):
        mixed = engine.generate([prompts[i] for i in order], [samplings[i] for i in order])
        assert [completion.choices for completion in mixed] == [alone[i] for i in order]


def test_regular_expressions_choices_and_grammars_are_followed_to_their_end(engine: Engine) -> None:
    odd = ["a (b) [c] {d}", "^$.*+?|\\", "x\ny", "臺北 🎉"]
    samplings = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=seed, constraint=constraint)
        for seed in range(4)
        for constraint in (
            Constraint.regex(r"[A-Z][a-z]{2,8} [0-9]{4}"),
            Constraint.choice(odd),
            Constraint.choice(["ab", "abc"]),
            Constraint.grammar('start: "(" (start | NUMBER) ")"\nNUMBER: /[0-9]{1,3}/'),
        )
    ]
    prompt = chat(engine, "Go on.")
    completions = engine.generate([prompt] * len(samplings), samplings)
    for place, completion in enumerate(completions):
        if completion.finish_reason == "length":
            continue
        assert (completion.finish_reason, completion.error) == ("stop", None)
        if place % 4 == 0:
            assert re.fullmatch(r"[A-Z][a-z]{2,8} [0-9]{4}", completion.text)
        elif place % 4 == 1:
            assert completion.text in odd
        elif place % 4 == 2:
            assert completion.text in ("ab", "abc")
        else:
            depth = completion.text.count("(")
            assert re.fullmatch(r"[0-9]{1,3}", completion.text[depth:-depth])
    # Greedy, with nothing to choose: one step for the whole text.
    (only,) = engine.generate([prompt], SamplingParams(constraint=Constraint.choice(["there is one way"])))
    assert (only.text, only.finish_reason) == ("there is one way", "stop")


def test_max_tokens_cuts_a_constrained_output_and_says_so(engine: Engine) -> None:
    prompt = chat(engine, "A list.")
    endless = Constraint.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 1000})
    for limit in (1, 7):
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=limit, constraint=endless))
        assert (completion.finish_reason, completion.output_tokens) == ("length", limit)
    # Forced tokens count too.
    (forced,) = engine.generate([prompt], SamplingParams(max_tokens=3, constraint=Constraint.choice(["a b c d e f g"])))
    assert (forced.finish_reason, forced.output_tokens) == ("length", 3)


def test_min_tokens_and_ignore_eos_keep_an_output_going_only_while_it_may(engine: Engine) -> None:
    prompt = chat(engine, "Digits.")
    digits = Constraint.regex("[0-9]{1,12}")
    (more,) = engine.generate([prompt], SamplingParams(max_tokens=20, constraint=digits, min_tokens=10))
    assert len(more.text) >= 10 and more.finish_reason == "stop"
    (full,) = engine.generate([prompt], SamplingParams(max_tokens=20, constraint=digits, ignore_eos=True))
    assert len(full.text) == 12 and full.finish_reason == "stop"


def chain(length: int, rule: str, last: str) -> Constraint:
    """A grammar in which each rule names the next."""
    rules = [rule.format(index, index + 1, index + 1) for index in range(length)]
    return Constraint.grammar("\n".join(["start: " + rules[0].split(":")[0], *rules, last.replace("'", '"')]))


HARMFUL = {
    "unclosed group": Constraint.regex("("),
    "look-around": Constraint.regex("(?=a)b"),
    "deep groups": Constraint.regex("(" * 20_000 + ")" * 20_000),
    "empty class": Constraint.regex(r"[^\s\S]"),
    "endless rule": Constraint.grammar("start: start"),
    "unknown rule": Constraint.grammar("start: nowhere"),
    "deep rule": Constraint.grammar("start: " + "(" * 9_000 + '"a"' + ")" * 9_000),
    "reference to itself": Constraint.json_schema({"$ref": "#"}),
    "all of itself": Constraint.json_schema({"allOf": [{"$ref": "#"}]}),
    "dangling reference": Constraint.json_schema({"$ref": "#/nowhere"}),
    "no number": Constraint.json_schema({"type": "integer", "minimum": 5, "maximum": 4}),
    "nothing": Constraint.json_schema("false"),
    "unique items": Constraint.json_schema({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}),
    "one of two that overlap": Constraint.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    "not": Constraint.json_schema({"not": {"type": "string"}}),
    "unknown format": Constraint.json_schema({"type": "string", "format": "weird"}),
    "leniency of its own": Constraint.json_schema(
        {"type": "array", "uniqueItems": True, "items": {"type": "integer"}, "x-guidance": {"lenient": True}}
    ),
    "doubling terminals": Constraint.grammar(
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "c"'
    ),
    "exploding combination": Constraint.json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(6)]} for i in range(12)
            ]
        }
    ),
}

# These compile; what goes wrong, if anything, shows on the way.
TREACHEROUS = {
    "doubling states": Constraint.regex(".*(a|b).{200}c"),
    "nested counts": Constraint.regex("(((a{1,100}){1,100}){1,100}){1,100}b"),
    "nested stars": Constraint.regex("(a*)*b"),
    "no end": Constraint.grammar('start: "a" start'),
    "ambiguous": Constraint.grammar('start: s\ns: s s s | s s | "a" | '),
    "huge array": Constraint.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 100_000}),
    "huge string": Constraint.json_schema({"type": "string", "minLength": 10_000_000}),
    "endless object": Constraint.json_schema(
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"], "additionalProperties": False}
    ),
    "chain of references": Constraint.json_schema(
        {
            "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)} | {"d2000": {}},
            "$ref": "#/$defs/d0",
        }
    ),
    "chain of rules": Constraint.grammar(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1200)) + '\nr1200: "c"'
    ),
    "two thousand properties": Constraint.json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    ),
    "huge enum": Constraint.json_schema({"enum": [f"value {i} of a long list" for i in range(3000)]}),
}


def test_harmful_constraints_are_errors_of_their_own_request_alone(engine: Engine) -> None:
    prompt = chat(engine, "What is the capital of France?")
    done: dict[str, Completion] = {}

    def submit(name: str, sampling: SamplingParams) -> None:
        request = GenerationRequest(name, tuple(prompt), sampling)
        engine.submit(request, on_finish=lambda completion: done.setdefault(name, completion))

    submit("innocent", SamplingParams(max_tokens=20))
    for name, constraint in (HARMFUL | TREACHEROUS).items():
        submit(name, SamplingParams(max_tokens=25, temperature=1.0, seed=1, constraint=constraint))
    while engine.step():
        pass
    assert done["innocent"].text == "The capital of France is Paris."
    for name in HARMFUL:
        completion = done[name]
        assert completion.finish_reason == "error" and completion.output_tokens == 0, name
        assert completion.error is not None and completion.error.startswith("constraint: "), name
        assert len(completion.error) < 500
    for name in TREACHEROUS:
        completion = done[name]
        assert completion.finish_reason in ("stop", "length", "error"), name
        assert (completion.error is not None) == (completion.finish_reason == "error")
        if completion.error is not None:
            assert completion.error.startswith("constraint: "), name


def test_compiled_constraints_are_kept_and_begun_apart(engine: Engine) -> None:
    compiler = ConstraintCompiler(engine.tokenizer, 49152)
    constraint = Constraint.regex("ab[cd]")
    compiled = compiler.compile(constraint)
    assert compiler.compile(Constraint.regex("ab[cd]")) is compiled
    first, second = compiled.copy(), compiled.copy()
    (a,), (b,) = engine.tokenizer.encode("a"), engine.tokenizer.encode("b")
    first.advance(a)
    assert first.allows(b) and not second.allows(b) and second.allows(a)
    assert second.allowed()[a] and not second.allowed()[b]
    for index in range(200):
        compiler.compile(Constraint.regex(f"x{index}"))
    assert compiler.compile(constraint) is not compiled
    with pytest.raises(InvalidRequest, match="constraint: "):
        compiler.compile(Constraint.regex("["))


def test_a_model_without_tokenizer_takes_no_constraint(tiny_store: Any) -> None:
    engine = Engine.load(tiny_store, threads=1, max_batch=2, memory_bytes=1024**3)
    (refused,) = engine.generate([[5]], SamplingParams(constraint=Constraint.choice(["a"])))
    assert refused.error == "constraint: this model has no tokenizer, so no output can be constrained"

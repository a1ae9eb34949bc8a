"""Which sampling parameters and constraints are taken, and which field is named where one is not."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.errors import InvalidRequest
from inference.parameters import MAX_CHOICES, MAX_CONSTRAINT_CHARACTERS, MAX_SCHEMA_DEPTH, Constraint, SamplingParams

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "max_tokens": [0, -1, 1.5, True, None],
        "temperature": [-0.1, 100.5, NAN, INFINITY, "1", 10**400],
        "top_p": [0.0, 1.01, NAN, -1.0],
        "top_k": [-1, 2.0, True],
        "min_p": [-0.1, 1.1, NAN],
        "repetition_penalty": [0.0, -1.0, INFINITY, NAN],
        "frequency_penalty": [2.1, -2.1, NAN],
        "presence_penalty": [2.1, -2.1, "0"],
        "logit_bias": [((-1, 1.0),), ((1, 101.0),), ((1, NAN),), ((1, 1.0), (1, 2.0)), ((1,),), (5,)],
        "logprobs": [-1, 21, 1.5, True],
        "seed": [2**64, -(2**63) - 1, 0.5, True],
        "n": [0, 129, 1.0],
        "best_of": [0, 129],
        "stop": ["text", None, {"a": 1}, ("",), (1,), tuple("abcdefgh" * 9)],
        "stop_token_ids": [(-1,), (1.5,), None, 7],
        "min_tokens": [-1, 257, 0.5, True],
        "ignore_eos": ["no", 1, None],
        "constraint": ["{}", {"type": "object"}],
    }.items(),
)
def test_an_unusable_value_is_refused_by_the_name_of_its_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field, value


def test_values_at_the_limits_are_taken() -> None:
    SamplingParams(
        max_tokens=1,
        temperature=100,
        top_p=1,
        top_k=1,
        min_p=1.0,
        repetition_penalty=0.01,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias=((0, -100.0), (1, 100.0)),
        logprobs=20,
        seed=2**64 - 1,
        n=128,
        best_of=128,
        min_tokens=1,
    )


def test_best_of_makes_at_least_as_many_samples_as_are_returned() -> None:
    assert SamplingParams(n=2, best_of=5).samples == 5
    assert SamplingParams(n=2).samples == 2
    with pytest.raises(InvalidRequest, match=r"best_of: must be a whole number from 3 to 128, not 2"):
        SamplingParams(n=3, best_of=2)


def test_stop_strings_do_not_cut_json() -> None:
    for constraint in (Constraint.json_object(), Constraint.json_schema({"type": "object"})):
        with pytest.raises(InvalidRequest, match="stop: would cut JSON short"):
            SamplingParams(stop=("}",), constraint=constraint)
    SamplingParams(stop=("\n",), constraint=Constraint.regex("[a-z\n]+"))


def test_constraints_that_no_compiler_should_see_are_refused() -> None:
    deep: Any = {}
    for _ in range(MAX_SCHEMA_DEPTH):
        deep = {"items": deep}
    for make in (
        lambda: Constraint.json_schema("{"),
        lambda: Constraint.json_schema("[1]"),
        lambda: Constraint.json_schema(deep),
        lambda: Constraint.json_schema("[" * 90_000),
        lambda: Constraint.json_schema({"enum": ["x" * MAX_CONSTRAINT_CHARACTERS]}),
        lambda: Constraint.json_schema({"properties": {"a": {"$ref": "https://example.org/schema.json"}}}),
        lambda: Constraint.json_schema({"a": object()}),
        lambda: Constraint.regex(""),
        lambda: Constraint.grammar(""),
        lambda: Constraint.grammar("start: " + '"a" ' * 5000),
        lambda: Constraint.choice([]),
        lambda: Constraint.choice([""]),
        lambda: Constraint.choice("one text"),
        lambda: Constraint.choice([str(i) for i in range(MAX_CHOICES + 1)]),
        lambda: Constraint("gbnf", "x"),  # type: ignore[arg-type]
        lambda: Constraint("regex", 5),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest) as caught:
            make()
        assert caught.value.field == "constraint"


def test_a_schema_keeps_the_order_of_its_properties_and_its_digest_tells_it_apart() -> None:
    first = Constraint.json_schema({"properties": {"b": {}, "a": {}}})
    second = Constraint.json_schema({"properties": {"a": {}, "b": {}}})
    assert list(json.loads(first.text)["properties"]) == ["b", "a"]
    assert first.digest != second.digest
    assert first.digest == Constraint.json_schema({"properties": {"b": {}, "a": {}}}).digest
    assert Constraint.regex("a").digest != Constraint.grammar("a").digest


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.none(), st.integers(-2, 5), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@given(field=st.sampled_from([field.name for field in fields(SamplingParams)]), value=JUNK)
def test_junk_is_taken_or_refused_by_its_fields_name_and_never_breaks(field: str, value: Any) -> None:
    try:
        SamplingParams(**{field: value})
    except InvalidRequest as error:
        # best_of counts beside n, and min_tokens beside max_tokens.
        assert error.field == field or {error.field, field} in ({"n", "best_of"}, {"max_tokens", "min_tokens"})

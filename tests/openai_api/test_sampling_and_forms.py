"""What a caller may ask of sampling and of the output's form, through the real client, server, engine and weights."""

import json
import math
from typing import Any

import httpx
import openai
import pytest
from jsonschema import validate

pytestmark = pytest.mark.django_db(transaction=True)

QUESTION: list[Any] = [{"role": "user", "content": "Name a colour of the rainbow."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "surname": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Taipei", "Tainan"]},
    },
    "required": ["surname", "age", "city"],
    "additionalProperties": False,
}


def last_request() -> Any:
    from penstock.serving.models import Request

    return Request.objects.latest("created_at")


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "smollm2", "messages": QUESTION, "max_tokens": 8, **fields})


def test_several_choices_come_whole_and_as_a_stream(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 10}
    whole = chat(client, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    assert 10 < whole.usage.completion_tokens <= 30
    row = last_request()
    assert row.output_texts == texts
    assert row.output_tokens == whole.usage.completion_tokens

    said, ends = ["", "", ""], ["", "", ""]
    for chunk in chat(client, **asked, stream=True):
        (choice,) = chunk.choices
        said[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert said == texts
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_a_chats_logprobs_are_openais_in_both_ways(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    asked = {"temperature": 0, "logprobs": True, "top_logprobs": 3}
    (choice,) = chat(client, **asked).choices
    items = choice.logprobs.content
    assert "".join(item.token for item in items).startswith(choice.message.content)
    for item in items:
        assert item.logprob <= 0
        assert bytes(item.bytes).decode() == item.token
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].token == item.token  # greedy: the likeliest was taken
        assert sum(math.exp(one.logprob) for one in item.top_logprobs) <= 1.0001
    streamed = [
        item
        for chunk in chat(client, **asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for item in chunk.choices[0].logprobs.content
    ]
    assert streamed == items


def test_completions_logprobs_are_parallel_lists(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "prompt": "Once upon",
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
    }
    (choice,) = client.completions.create(**asked).choices
    told = choice.logprobs
    assert told is not None
    assert told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 6
    assert "".join(told.tokens) == choice.text
    assert all(choice.text[at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True))
    assert all(len(top) == 2 for top in told.top_logprobs)
    offsets = [
        at
        for chunk in client.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for at in chunk.choices[0].logprobs.text_offset or []
    ]
    assert offsets == told.text_offset


def test_best_of_gives_the_best_and_counts_all(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "prompt": "Once", "max_tokens": 5, "temperature": 1.0, "seed": 1}
    answer = client.completions.create(**asked, n=1, best_of=4, extra_body={"ignore_eos": True})
    assert len(answer.choices) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_a_json_schema_is_followed_in_the_order_of_its_properties(
    client: openai.OpenAI, release: Any, engine_host: Any
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    answer = chat(client, response_format=form, temperature=1.0, seed=3, max_tokens=200)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    value = json.loads(choice.message.content)
    validate(value, PERSON)
    assert list(value) == list(PERSON["properties"])


def test_a_json_object_is_one(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    form = {"type": "json_object"}
    (choice,) = chat(client, response_format=form, temperature=0, max_tokens=300).choices
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_an_output_with_unicodes_other_line_ends_arrives_whole(
    server: Any, client: openai.OpenAI, release: Any, engine_host: Any
) -> None:
    text = "one\u2028two\x85three\u2029four"
    asked = {"temperature": 0, "max_tokens": 60}
    assert chat(client, **asked, extra_body={"guided_choice": [text]}).choices[0].message.content == text

    body = {"model": "smollm2", "messages": QUESTION, "stream": True, "guided_choice": [text], **asked}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    said = ""
    # httpx's own reader of lines ends one at each of the three characters.
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120) as answer:
        for line in answer.iter_lines():
            if line and line != "data: [DONE]":
                said += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    assert said == text


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["red", "blue"]}, {"red", "blue"}),
        ({"guided_regex": "x{3}"}, {"xxx"}),
        ({"structured_outputs": {"choice": ["violet"]}}, {"violet"}),
        ({"guided_json": {"const": 7}}, {"7"}),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, {"ab"}),
    ],
)
def test_vllms_forms_are_followed(
    client: openai.OpenAI, release: Any, engine_host: Any, extra: dict[str, Any], allowed: set[str]
) -> None:
    (choice,) = chat(client, temperature=0, extra_body=extra).choices
    assert choice.message.content in allowed
    assert choice.finish_reason == "stop"


def test_bias_penalties_and_cut_offs_change_what_is_said(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    from inference.tokenizer import Tokenizer

    token = Tokenizer.load(release.store_path).encode(" tea")[0]
    forced = chat(client, temperature=0, max_tokens=3, logit_bias={str(token): 100})
    assert forced.choices[0].message.content == " tea" * 3
    varied = chat(
        client, temperature=0, max_tokens=3, logit_bias={str(token): 20}, frequency_penalty=2, presence_penalty=2
    )
    assert varied.choices[0].message.content is not None
    greedy = chat(client, temperature=0).choices[0].message.content
    drawn = chat(client, temperature=2, seed=1, extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0})
    assert drawn.choices[0].message.content == greedy
    stopped = chat(
        client, temperature=0, max_tokens=3, logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token]}
    )
    assert stopped.choices[0].finish_reason == "stop"
    held = chat(
        client,
        temperature=0,
        max_tokens=9,
        logit_bias={str(token): 100},
        extra_body={"stop_token_ids": [token], "min_tokens": 4},
    )
    assert held.usage.completion_tokens == 5


def test_tokens_found_in_the_cache_are_told(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    messages = [{"role": "user", "content": "Colours of the rainbow, in order, please. " * 20}]
    chat(client, messages=messages, max_tokens=1)
    usage = chat(client, messages=messages, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens >= 32
    assert last_request().cached_prompt_tokens == usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"min_tokens": 9}}, "min_tokens"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "guided_choice"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "stop": ["}"]}, "stop"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_it(
    client: openai.OpenAI, release: Any, engine_host: Any, fields: dict[str, Any], param: str
) -> None:
    from inference.weights.manifest import StoreManifest

    release.manifest = {"config": {"vocab_size": StoreManifest.load(release.store_path).config.vocab_size}}
    release.save()
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert refused.value.param == param


def test_a_tasks_json_schema_binds_every_output(
    client: openai.OpenAI, people: Any, release: Any, engine_host: Any
) -> None:
    from penstock.registry.services import activate_task, create_task, submit_task

    task = create_task(
        user=people.operator,
        team=people.team,
        name="people",
        title="People",
        purpose="Makes up people.",
        latency_class="interactive",
        model_release=release,
        output_contract={"json_schema": PERSON},
    )
    submit_task(user=people.operator, task=task)
    activate_task(user=people.approver, task=task)
    whole = chat(client, model="people", temperature=1.0, seed=4, max_tokens=200)
    value = json.loads(whole.choices[0].message.content)
    validate(value, PERSON)
    assert list(value) == list(PERSON["properties"])
    assert last_request().valid is True

    cut = chat(client, model="people", temperature=1.0, seed=4, max_tokens=4)
    assert cut.choices[0].finish_reason == "length"
    row = last_request()
    assert (row.valid, row.truncated, row.violations) == (False, True, ["not_json"])

    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, model="people", extra_body={"guided_choice": ["yes", "no"]})
    assert (refused.value.code, refused.value.param) == ("form_against_contract", "guided_choice")

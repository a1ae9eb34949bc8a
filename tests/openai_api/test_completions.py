import json
import time
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.django_db(transaction=True)

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]


def last_request() -> Any:
    from penstock.serving.models import Request

    return Request.objects.latest("created_at")


def test_a_chat_answers_with_usage_and_fingerprint(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint == f"fp_{release.digest[:12]}"
    row = last_request()
    assert (row.pk, row.status, row.output_text) == (answer.id, "succeeded", choice.message.content)
    assert row.output_tokens == answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1
    *said, totals = chunks
    assert said[0].choices[0].delta.role == "assistant"
    assert said[0].choices[0].delta.content == ""
    assert said[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.choices[0].finish_reason is None for chunk in said[:-1])
    assert all(chunk.usage is None for chunk in said)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == whole.choices[0].message.content
    assert totals.choices == []
    assert totals.usage is not None
    assert whole.usage is not None
    assert totals.usage.completion_tokens == whole.usage.completion_tokens


def test_the_raw_stream_is_server_sent_events_that_no_proxy_holds_back(
    server: Any, client: openai.OpenAI, release: Any, engine_host: Any
) -> None:
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 4, "temperature": 0, "stream": True}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


def test_legacy_completions_answer_too(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    whole = client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=8, temperature=0)
    assert whole.object == "text_completion"
    assert whole.choices[0].text
    chunks = list(
        client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=8, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_request_counts_for_the_task_that_its_metadata_names(
    client: openai.OpenAI, people: Any, release: Any, engine_host: Any
) -> None:
    from penstock.registry.services import activate_task, create_task, submit_task

    task = create_task(
        user=people.operator,
        team=people.team,
        name="colours",
        title="Colours",
        purpose="Names colours.",
        latency_class="interactive",
        model_release=release,
    )
    submit_task(user=people.operator, task=task)
    activate_task(user=people.approver, task=task)
    metadata = {"task": "colours", "language": "en"}
    client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=4, temperature=0, metadata=metadata)
    row = last_request()
    assert (row.task.name, row.groups) == ("colours", {"language": "en"})


def test_a_client_that_hangs_up_cancels_its_request(client: openai.OpenAI, release: Any, engine_host: Any) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=2000, temperature=1.5, stream=True, seed=1
    )
    for number, _chunk in enumerate(stream):
        if number == 3:
            break
    stream.close()
    deadline = time.monotonic() + 60
    while last_request().finished_at is None and time.monotonic() < deadline:
        time.sleep(0.1)
    row = last_request()
    assert row.status == "cancelled"
    assert row.output_tokens < 2000


def test_a_client_that_gives_up_waiting_cancels_its_request(
    server: Any, client: openai.OpenAI, release: Any, engine_host: Any
) -> None:
    client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=1)  # the engine is loaded
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 4000, "temperature": 1.5, "seed": 2}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=3)
    deadline = time.monotonic() + 60
    while last_request().finished_at is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert last_request().status == "cancelled"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "gpt-none"}, 404, "model_not_found"),
        ({"model": "smollm2", "messages": []}, 400, "invalid_value"),
        ({"model": "smollm2", "messages": None}, 400, "missing_required_parameter"),
        ({"model": "smollm2", "temperature": 3}, 400, "invalid_value"),
        ({"model": "smollm2", "n": 129}, 400, "invalid_value"),
        ({"model": "smollm2", "tools": [{"type": "function"}]}, 400, "unsupported_parameter"),
        ({"model": "smollm2", "max_tokens": 100_000}, 400, "context_length_exceeded"),
        ({"model": "smollm2", "metadata": {"task": "none"}}, 404, "task_not_found"),
    ],
)
def test_what_is_wrong_is_told_before_a_stream_opens(
    server: Any, client: openai.OpenAI, release: Any, engine_host: Any, fields: dict[str, Any], status: int, code: str
) -> None:
    from penstock.serving.models import Request

    body = {"messages": QUESTION, "stream": True, **fields}
    body = {name: value for name, value in body.items() if value is not None}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert not Request.objects.exists()


def test_what_is_wrong_with_stream_options_is_told_by_that_name(client: openai.OpenAI, release: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="smollm2", messages=QUESTION, stream=True, extra_body={"stream_options": ["include_usage"]}
        )
    assert refused.value.param == "stream_options"


def test_without_an_engine_host_it_is_a_503(client: openai.OpenAI, release: Any) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="smollm2", messages=QUESTION)
    assert caught.value.status_code == 503
    assert caught.value.code == "no_engine_host"


def test_what_breaks_in_the_middle_of_a_stream_is_told_in_the_stream(
    client: openai.OpenAI, release: Any, engine_host: Any, engine_process: Any
) -> None:
    from penstock.settings import secret

    _host, inner_door = engine_process
    headers = {"Authorization": f"Bearer {secret('internal-token')}"}
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=4000, temperature=1.5, seed=3, stream=True
    )
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                httpx.post(f"{inner_door}/cancel/{chunk.id}", headers=headers)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == "interrupted"
    assert last_request().status == "failed"

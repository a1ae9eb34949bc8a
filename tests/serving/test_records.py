"""Records become requests by the task's template; all else passes as it is."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ValidationError

from penstock.serving.records import request_lines


@pytest.fixture
def task() -> Any:
    return SimpleNamespace(
        name="descriptions",
        system_prompt="Write in English.",
        prompt_template="Describe $name, made of $material.",
        max_output_tokens=40,
        fairness_plan={"group": "language"},
    )


def test_a_record_becomes_a_request_of_the_task(task: Any) -> None:
    record = {"id": "A1", "name": "a tray", "material": "oak", "language": "en"}
    (line,) = request_lines([json.dumps(record).encode()], task=task)
    assert json.loads(line) == {
        "custom_id": "A1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "descriptions",
            "messages": [
                {"role": "system", "content": "Write in English."},
                {"role": "user", "content": "Describe a tray, made of oak."},
            ],
            "max_tokens": 40,
            "temperature": 0,
            "metadata": {"language": "en"},
        },
    }


def test_a_record_without_identifier_is_known_by_its_line(task: Any) -> None:
    record = json.dumps({"name": "a tray", "material": "oak"}).encode()
    assert [json.loads(line)["custom_id"] for line in request_lines([record, b"\n", record], task=task)] == ["1", "3"]


def test_requests_and_broken_lines_pass_byte_for_byte(task: Any) -> None:
    lines = [
        b'{"custom_id": "x",  "method": "POST", "url": "/v1/chat/completions", "body": {}}\n',
        b"{broken\n",
        b"[]\n",
    ]
    assert list(request_lines(lines, task=task)) == lines


def test_a_record_that_lacks_a_field_is_named_by_its_line(task: Any) -> None:
    lines = [json.dumps({"name": "a", "material": "b"}).encode(), json.dumps({"name": "a"}).encode()]
    with pytest.raises(ValidationError, match=r"Line 2: .*material") as raised:
        list(request_lines(lines, task=task))
    assert "file" in raised.value.message_dict

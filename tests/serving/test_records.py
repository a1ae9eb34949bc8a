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
    first, blank, third = request_lines([record, b"\n", record], task=task)
    assert [json.loads(line)["custom_id"] for line in (first, third)] == ["1", "3"]
    assert blank == b"\n"  # so that intake, which passes over it, counts the lines as the file does


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


@pytest.mark.parametrize(
    "line",
    (
        b'{"id": "a", "name": "x", "name": "y", "material": "oak"}\n',
        b'{"id": "a", "name": NaN, "material": "oak"}\n',
        b'{"id": "a", "name": "\xff", "material": "oak"}\n',
    ),
)
def test_what_intake_would_refuse_in_a_request_is_left_for_it_to_refuse(task: Any, line: bytes) -> None:
    assert list(request_lines([line], task=task)) == [line]


def test_half_a_surrogate_pair_reaches_intake_which_names_its_line(task: Any) -> None:
    (line,) = request_lines([b'{"id": "a", "name": "\\ud800", "material": "oak"}\n'], task=task)
    assert json.loads(line.decode())["body"]["messages"][1]["content"] == "Describe \ud800, made of oak."


def test_a_mark_of_byte_order_is_no_part_of_the_first_record(task: Any) -> None:
    (line,) = request_lines([b'\xef\xbb\xbf{"id": "a", "name": "b", "material": "c"}\n'], task=task)
    assert json.loads(line)["custom_id"] == "a"


def test_an_integer_of_thousands_of_digits_is_refused_in_words_for_people() -> None:
    from penstock.serving.lines import read_json

    with pytest.raises(ValueError, match="5000 digits is too long"):
        read_json('{"max_tokens": ' + "9" * 5000 + "}")

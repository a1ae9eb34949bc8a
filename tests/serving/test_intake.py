"""Intake: every line is checked, every bad one is told with its field, and all or nothing goes in."""

from collections.abc import Callable
from typing import Any

import pytest

from governance.ledger.models import OutboxEntry
from penstock.config import config
from penstock.serving import intake as intaking
from penstock.serving.intake import intake
from penstock.serving.lines import MAX_LINE_BYTES
from penstock.serving.models import Batch, Request, Shard
from penstock.serving.services import cancel_batch

Lines = Callable[..., dict[str, Any]]
Submit = Callable[..., Any]


def without(line: dict[str, Any], *path: str) -> dict[str, Any]:
    """The line with the field at `path` left out."""
    if len(path) == 1:
        return {key: value for key, value in line.items() if key != path[0]}
    return {**line, path[0]: without(line[path[0]], *path[1:])}


def test_good_lines_become_requests_in_shards(taken_in: Submit, line: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config(), "shard_rows", 2)

    batch = taken_in([line(f"row-{n}", f"商品 {n} 🍵", metadata={"language": "zh-Hant"}) for n in range(5)])

    rows = list(batch.requests.order_by("line"))
    assert [row.custom_id for row in rows] == [f"row-{n}" for n in range(5)]
    assert [row.line for row in rows] == [1, 2, 3, 4, 5]
    assert [row.shard.number for row in rows] == [0, 0, 1, 1, 2]
    assert rows[3].body["messages"] == [{"role": "user", "content": "商品 3 🍵"}]
    assert rows[3].groups == {"language": "zh-Hant"}
    assert batch.total == 5
    assert (batch.task.name, batch.latency_class) == ("descriptions", "batch")
    assert OutboxEntry.objects.filter(kind="batch.started", subject=batch.pk).count() == 1


def test_a_blank_line_and_a_byte_order_mark_do_no_harm(taken_in: Submit, line: Lines) -> None:
    import json

    first = b"\xef\xbb\xbf" + json.dumps(line("a")).encode()

    batch = taken_in([first, b"", b"  ", line("b")])

    assert list(batch.requests.order_by("line").values_list("line", flat=True)) == [1, 4]


BAD_LINES: dict[str, tuple[Callable[[Lines], Any], str, str | None]] = {
    "broken JSON": (lambda line: b'{"custom_id": "x", ', "invalid_json_line", None),
    "an array": (lambda line: b"[1, 2]", "invalid_json_line", None),
    "NaN": (lambda line: b'{"custom_id": NaN}', "invalid_json_line", None),
    "a name that stands twice": (lambda line: b'{"custom_id": "x", "custom_id": "y"}', "invalid_json_line", None),
    "nested beyond reason": (lambda line: b"[" * 200_000, "invalid_json_line", None),
    "not UTF-8": (lambda line: b'{"custom_id": "\xff\xfe"}', "invalid_encoding", None),
    "no custom_id": (
        lambda line: without(line("x"), "custom_id"),
        "missing_required_parameter",
        "custom_id",
    ),
    "custom_id a number": (lambda line: {**line("x"), "custom_id": 7}, "invalid_custom_id", "custom_id"),
    "custom_id used before": (lambda line: line("good"), "duplicate_custom_id", "custom_id"),
    "method GET": (lambda line: {**line("x"), "method": "GET"}, "invalid_method", "method"),
    "no url": (lambda line: without(line("x"), "url"), "missing_required_parameter", "url"),
    "another endpoint": (lambda line: {**line("x"), "url": "/v1/embeddings"}, "invalid_url", "url"),
    "no body": (lambda line: without(line("x"), "body"), "missing_required_parameter", "body"),
    "body a text": (lambda line: {**line("x"), "body": "hello"}, "invalid_type", "body"),
    "a field too many": (lambda line: {**line("x"), "priority": 1}, "unknown_parameter", "priority"),
    "no model": (lambda line: without(line("x"), "body", "model"), "missing_required_parameter", "body.model"),
    "an unknown model": (lambda line: line("x", model="gpt-99"), "model_not_found", "body.model"),
    "an unknown task": (lambda line: line("x", metadata={"task": "no"}), "task_not_found", "body.metadata.task"),
    "no messages": (
        lambda line: without(line("x"), "body", "messages"),
        "missing_required_parameter",
        "body.messages",
    ),
    "messages empty": (lambda line: line("x", messages=[]), "invalid_value", "body.messages"),
    "an unknown role": (
        lambda line: line("x", messages=[{"role": "robot", "content": "hi"}]),
        "invalid_value",
        "body.messages.0.role",
    ),
    "content a number": (
        lambda line: line("x", messages=[{"role": "user", "content": 5}]),
        "invalid_value",
        "body.messages.0.content",
    ),
    "an image": (
        lambda line: line("x", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "invalid_value",
        "body.messages.0.content.0",
    ),
    "max_tokens a text": (lambda line: line("x", max_tokens="6"), "invalid_value", "body.max_tokens"),
    "max_tokens zero": (lambda line: line("x", max_completion_tokens=0), "invalid_value", "body.max_completion_tokens"),
    "more than the task allows": (
        lambda line: line("x", max_tokens=65),
        "max_tokens_above_task_limit",
        "body.max_tokens",
    ),
    "temperature 3": (lambda line: line("x", temperature=3), "invalid_value", "body.temperature"),
    "top_p 0": (lambda line: line("x", top_p=0), "invalid_value", "body.top_p"),
    "seed a float": (lambda line: line("x", seed=1.5), "invalid_value", "body.seed"),
    "five stops": (lambda line: line("x", stop=["a", "b", "c", "d", "e"]), "invalid_value", "body.stop"),
    "no choice": (lambda line: line("x", n=0), "invalid_value", "body.n"),
    "more choices than the task has tokens": (lambda line: line("x", n=65), "max_tokens_above_task_limit", "body.n"),
    "top_logprobs alone": (lambda line: line("x", top_logprobs=2), "invalid_value", "body.top_logprobs"),
    "a penalty of 3": (lambda line: line("x", presence_penalty=3), "invalid_value", "body.presence_penalty"),
    "a bias on a word": (lambda line: line("x", logit_bias={"tea": 1}), "invalid_value", "body.logit_bias.tea"),
    "min_tokens above max_tokens": (lambda line: line("x", min_tokens=7), "invalid_value", "body.min_tokens"),
    "tools": (lambda line: line("x", tools=[{"type": "function"}]), "unsupported_parameter", "body.tools"),
    "a form without its schema": (
        lambda line: line("x", response_format={"type": "json_schema"}),
        "invalid_value",
        "body.response_format",
    ),
    "a schema that nothing follows": (
        lambda line: line("x", guided_json={"type": "string", "pattern": "("}),
        "invalid_value",
        "body.guided_json",
    ),
    "two forms": (
        lambda line: line("x", guided_regex="a", guided_choice=["a"]),
        "invalid_value",
        "body.guided_choice",
    ),
    "a stop text in JSON": (
        lambda line: line("x", stop="}", response_format={"type": "json_object"}),
        "invalid_value",
        "body.stop",
    ),
    "streaming": (lambda line: line("x", stream=True), "unsupported_parameter", "body.stream"),
    "a misspelt parameter": (lambda line: line("x", temprature=0), "unknown_parameter", "body.temprature"),
    "metadata of numbers": (lambda line: line("x", metadata={"a": 1}), "invalid_value", "body.metadata.a"),
    "seventeen metadata": (
        lambda line: line("x", metadata={str(n): "v" for n in range(17)}),
        "invalid_value",
        "body.metadata",
    ),
    "a NUL": (lambda line: line("x", "a\x00b"), "invalid_value", "body"),
    "half a surrogate pair": (lambda line: line("x", "\ud83d"), "invalid_value", "body"),
    "a prompt past the context": (lambda line: line("x", "tea " * 9000), "context_length_exceeded", "body.messages"),
}


def encoded(line: Any) -> Any:
    """ASCII JSON, which alone can spell half a surrogate pair."""
    import json

    return json.dumps(line).encode() if isinstance(line, dict) else line


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_fails_the_batch_and_is_named(name: str, submit: Submit, line: Lines) -> None:
    make, code, param = BAD_LINES[name]
    batch = submit([line("good"), encoded(make(line)), line("also-good")])

    intake(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.FAILED
    [error] = batch.errors["data"]
    assert (error["code"], error["param"], error["line"]) == (code, param, 2)
    assert error["message"]
    assert not Request.objects.exists()
    assert not Shard.objects.exists()


def test_a_line_that_is_too_long_does_not_hide_the_next(submit: Submit, line: Lines) -> None:
    batch = submit([b"x" * (2 * MAX_LINE_BYTES + 7), b"{", line("a")])

    intake(batch.pk)

    batch.refresh_from_db()
    assert [(e["code"], e["line"]) for e in batch.errors["data"]] == [("line_too_long", 1), ("invalid_json_line", 2)]


def test_all_bad_lines_are_told_with_all_their_problems(submit: Submit, line: Lines) -> None:
    batch = submit([line("a", temperature=9, top_p=9), line("b"), b"{", line("b"), line("c", n=300)])

    intake(batch.pk)

    batch.refresh_from_db()
    assert [(e["line"], e["param"]) for e in batch.errors["data"]] == [
        (1, "body.temperature"),
        (1, "body.top_p"),
        (3, None),
        (4, "custom_id"),
        (5, "body.n"),
    ]
    assert OutboxEntry.objects.filter(kind="batch.failed", subject=batch.pk).count() == 1


def test_errors_past_the_limit_are_counted(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intaking, "MAX_TOLD_ERRORS", 3)
    batch = submit([b"{"] * 10)

    intake(batch.pk)

    batch.refresh_from_db()
    told = batch.errors["data"]
    assert len(told) == 4
    assert told[-1]["message"].startswith("7 ")


def test_lines_of_two_tasks_are_told_apart(make_task: Any, submit: Submit, line: Lines) -> None:
    make_task("summaries")
    batch = submit([line("a"), line("b", model="summaries")])

    intake(batch.pk)

    batch.refresh_from_db()
    [error] = batch.errors["data"]
    assert (error["code"], error["line"]) == ("mixed_tasks", 2)
    assert "summaries" in error["message"]
    assert "descriptions" in error["message"]


def test_a_batch_may_name_the_task_for_all_its_lines(taken_in: Submit, release: Any, line: Lines) -> None:
    batch = taken_in([line("a", model=release.name)], metadata={"task": "descriptions"})

    assert batch.task.name == "descriptions"


def test_lines_that_name_only_the_release_count_for_the_unassigned_task(
    taken_in: Submit, release: Any, line: Lines
) -> None:
    batch = taken_in([line("a", model=release.name)])

    assert batch.task.unassigned


def test_a_file_without_a_line_fails(submit: Submit) -> None:
    batch = submit([b"", b"   "])

    intake(batch.pk)

    batch.refresh_from_db()
    assert batch.errors["data"][0]["code"] == "empty_file"


def test_a_file_with_too_many_lines_fails(submit: Submit, line: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config(), "max_batch_rows", 2)
    batch = submit([line("a"), line("b"), line("c")])

    intake(batch.pk)

    batch.refresh_from_db()
    assert batch.errors["data"][0]["code"] == "too_many_requests_in_file"
    assert not Request.objects.exists()


def test_a_suspended_task_takes_nothing_in(people: Any, task: Any, submit: Submit, line: Lines) -> None:
    from penstock.registry.services.tasks import suspend_task

    batch = submit([line("a")])
    suspend_task(user=people.approver, task=task, reason="checked")

    intake(batch.pk)

    batch.refresh_from_db()
    assert batch.errors["data"][0]["code"] == "task_not_active"


def test_intake_twice_is_intake_once(taken_in: Submit, line: Lines) -> None:
    batch = taken_in([line("a"), line("b")])
    before = list(Request.objects.order_by("pk").values_list("pk", "salt"))

    intake(batch.pk)

    assert list(Request.objects.order_by("pk").values_list("pk", "salt")) == before
    assert OutboxEntry.objects.filter(kind="batch.started").count() == 1


def test_intake_that_breaks_in_the_middle_leaves_nothing(
    submit: Submit, line: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = submit([line("a"), line("b")])

    class Killed(BaseException):
        pass

    def break_off(**_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(intaking, "record", break_off)  # the last write of the transaction
        intake(batch.pk)

    batch.refresh_from_db()
    assert batch.status == Batch.Status.VALIDATING
    assert not Request.objects.exists()

    intake(batch.pk)

    assert Request.objects.count() == 2


def test_a_batch_cancelled_before_intake_is_not_taken_in(people: Any, submit: Submit, line: Lines) -> None:
    batch = submit([line("a")])

    cancelled = cancel_batch(user=people.operator, batch=batch)
    intake(batch.pk)

    batch.refresh_from_db()
    assert cancelled.status == batch.status == Batch.Status.CANCELLED
    assert not Request.objects.exists()


def test_a_tasks_system_prompt_stands_in_front_of_messages_without_one(
    make_task: Any, taken_in: Submit, line: Lines
) -> None:
    make_task("polite", system_prompt="Be polite.")
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    batch = taken_in([line("a", "Hi", model="polite"), line("b", model="polite", messages=own)])

    first, second = batch.requests.order_by("line")
    assert first.body["messages"] == [
        {"role": "system", "content": "Be polite."},
        {"role": "user", "content": "Hi"},
    ]
    assert second.body["messages"] == own


def test_without_max_tokens_the_tasks_own_count(taken_in: Submit, line: Lines) -> None:
    batch = taken_in([line("a", max_tokens=None)])

    assert batch.requests.get().body["max_tokens"] == 64

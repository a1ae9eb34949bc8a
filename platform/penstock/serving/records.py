"""Files of records: lines that are not requests yet, which a task's prompt template turns into requests."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from inference.json_lines import json_text
from penstock.registry.models import Task
from penstock.registry.prompts import PromptError, render_record
from penstock.serving.blobs import BlobMissing
from penstock.serving.bodies import CHAT_COMPLETIONS, ENDPOINTS
from penstock.serving.lines import BYTE_ORDER_MARK, numbered_lines, read_json
from penstock.serving.models import File


def request_lines(lines: Iterable[bytes], *, task: Task) -> Iterator[bytes]:
    """The lines of a JSONL file with its records made into requests of `task`.

    A line is a request if it has `body` or `method`; any other JSON object is a record. All else is left as it is, for
    intake to judge, and blank lines too: the lines that intake names are those of the file. Raises ValidationError on
    `file`, with the line, for a record that does not fit.
    """
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            yield line.rstrip(b"\r\n") + b"\n"
        else:
            yield _encoded(as_request(record, number, task)) + b"\n"


def endpoint_of(file: File) -> str:
    """What a file's first request names, where that is served; else chat completions, which records are made into."""
    try:
        _number, raw = next(numbered_lines(file.sha256))
        url = read_json(raw.decode())["url"]
    except (StopIteration, BlobMissing, ValueError, RecursionError, KeyError, TypeError):
        return CHAT_COMPLETIONS  # intake tells what is wrong with it
    return url if url in ENDPOINTS else CHAT_COMPLETIONS


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = read_json(line.removeprefix(BYTE_ORDER_MARK).decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "body" not in value and "method" not in value else None


def _encoded(request: dict[str, Any]) -> bytes:
    try:
        return json_text(request).encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair: escaped, it reaches intake, which refuses it by line and name.
        return json.dumps(request).encode()


def as_request(record: dict[str, Any], number: int, task: Task) -> dict[str, Any]:
    """The request for one record: greedy, at most the task's output tokens, with the record's group as metadata."""
    try:
        messages = render_record(task, record)
    except PromptError as error:
        place = {"line": number, "error": error}
        raise ValidationError({"file": _("Line %(line)s: %(error)s") % place}) from None
    except RecursionError:
        place = {"line": number, "error": _("The record is nested too deep.")}
        raise ValidationError({"file": _("Line %(line)s: %(error)s") % place}) from None
    group = task.fairness_plan.get("group", "")
    groups = {group: str(record[group])} if group in record else {}
    return {
        "custom_id": str(record.get("custom_id") or record.get("id") or number),
        "method": "POST",
        "url": CHAT_COMPLETIONS,
        "body": {
            "model": task.name,
            "messages": messages,
            "max_tokens": task.max_output_tokens,
            "temperature": 0,
            "metadata": groups,
        },
    }

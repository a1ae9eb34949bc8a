"""The items that both ways run: the first lines of the pilot's file, read and admitted alike."""

import json
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from inference.json_lines import json_line
from penstock.pilots.models import Pilot
from penstock.serving.admission import Admitted, admit
from penstock.serving.blobs import BlobMissing
from penstock.serving.lines import MAX_CUSTOM_ID_CHARACTERS, MAX_LINE_BYTES, numbered_lines
from penstock.serving.models import File
from penstock.serving.outcome import prompt_text
from penstock.serving.prompts import plain_messages
from penstock.serving.rejection import Rejected


class ItemsError(ValidationError):
    """A file of items that cannot be compared; names file and line."""


@dataclass(frozen=True, slots=True)
class PilotItem:
    """One line of the file of items: `request` is the object that it holds."""

    line: int
    custom_id: str
    request: dict[str, Any]

    @property
    def endpoint(self) -> str:
        return str(self.request.get("url", ""))

    def trial_line(self) -> bytes:
        """The line as the trial runs it: greedy, because only then do both ways do the same work."""
        body = {**self.request["body"], "temperature": 0}
        return json_line({**self.request, "body": body})


def read_items(file: File, count: int) -> list[PilotItem]:
    """The first `count` items of `file` (fewer, if it has fewer). Raises ItemsError."""
    items: list[PilotItem] = []
    seen: set[str] = set()
    try:
        for number, raw in numbered_lines(file.sha256):
            item = _item(file, number, raw)
            if item.custom_id in seen:
                raise _bad(file, number, _("custom_id '%(id)s' was used before.") % {"id": item.custom_id})
            if items and item.endpoint != items[0].endpoint:
                raise _bad(file, number, _("The url differs from that of the first line."))
            seen.add(item.custom_id)
            items.append(item)
            if len(items) == count:
                break
    except BlobMissing as error:
        raise ItemsError({"items_file": str(error)}) from error
    if not items:
        raise ItemsError({"items_file": _("%(file)s holds no request.") % {"file": file.filename}})
    return items


def admit_items(pilot: Pilot, items: list[PilotItem]) -> list[Admitted]:
    """Each item as serving would take it in: with the task's system prompt, its token ids, and the most output tokens.

    Raises ItemsError naming the first line that would be refused, or that counts for another task.
    """
    admitted = []
    for item in items:
        line = json.loads(item.trial_line())
        try:
            one = admit(
                team=pilot.task.team,
                api_key=None,
                body=line["body"],
                endpoint=item.endpoint,
                task_name=pilot.task.name,
            )
        except Rejected as problem:
            raise _bad(pilot.items_file, item.line, problem.message) from problem
        if one.task.pk != pilot.task.pk:
            raise _bad(
                pilot.items_file,
                item.line,
                _("The line counts for the task %(other)s, the pilot for %(own)s.")
                % {"other": one.task.name, "own": pilot.task.name},
            )
        if "messages" not in one.body or one.body.get("stop"):
            raise _bad(
                pilot.items_file,
                item.line,
                _("A baseline can run chat messages without stop texts; this line is another kind."),
            )
        admitted.append(one)
    return admitted


def prompt_of(admitted: Admitted) -> str:
    """The text that an output is compared with, as serving does."""
    return prompt_text(plain_messages(admitted.body))


def _item(file: File, number: int, raw: bytes) -> PilotItem:
    if len(raw) > MAX_LINE_BYTES:
        raise _bad(file, number, _("A line may have %(most)d bytes.") % {"most": MAX_LINE_BYTES})
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _bad(file, number, _("The line is not JSON: %(why)s") % {"why": error}) from error
    if not isinstance(line, dict) or not isinstance(line.get("body"), dict):
        raise _bad(file, number, _("The line must be a request: an object with custom_id, method, url and body."))
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS or "\x00" in custom_id:
        most = MAX_CUSTOM_ID_CHARACTERS
        raise _bad(file, number, _("custom_id must be a text of 1 to %(most)d characters.") % {"most": most})
    return PilotItem(line=number, custom_id=custom_id, request=line)


def _bad(file: File, number: int, what: str) -> ItemsError:
    place = {"file": file.filename, "line": number, "what": what}
    return ItemsError({"items_file": _("%(file)s, line %(line)s: %(what)s") % place})

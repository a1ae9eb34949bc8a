"""Records into prompts: a task's template filled with the fields of one record."""

import json
from collections.abc import Mapping
from string import Template
from typing import Any, Protocol

from django.utils.translation import gettext as _


class PromptError(Exception):
    """A malformed template, or a record that lacks a field of it; `field` names the field, if one is at fault."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class HasPrompts(Protocol):
    system_prompt: str
    prompt_template: str


def template_fields(template: str) -> list[str]:
    """The fields that a template names, in order. Raises PromptError for a stray `$`."""
    parsed = Template(template)
    if not parsed.is_valid():
        raise PromptError(_("A $ in the template is neither $field nor ${field}; write $$ for a dollar sign."))
    return parsed.get_identifiers()


def render_record(task: HasPrompts, record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The chat messages for one record: the system prompt, if there is one, and the filled template.

    Lists of plain values are joined with commas, other structures given as JSON. Raises PromptError naming the field.
    """
    if not task.prompt_template:
        raise PromptError(_("The task has no prompt template, so records cannot be turned into prompts."))
    values = {}
    for field in template_fields(task.prompt_template):
        if field not in record:
            known = ", ".join(record) or _("none")
            raise PromptError(
                _("The record has no field %(field)s, which the template asks for. Its fields: %(known)s.")
                % {"field": field, "known": known},
                field=field,
            )
        values[field] = _as_text(record[field])
    messages = [{"role": "user", "content": Template(task.prompt_template).substitute(values)}]
    if task.system_prompt:
        messages.insert(0, {"role": "system", "content": task.system_prompt})
    return messages


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(str(item) for item in value)
    return json.dumps(value, ensure_ascii=False)

"""The form that an output must have: what a request asks for, and what its task's contract asks of every output.

OpenAI's `response_format`, and vLLM's `structured_outputs` and older `guided_*`, are read here into the engine's
constraint. An admitted body keeps one of them all: `structured_outputs`, with a JSON schema as text, since PostgreSQL
does not keep the order of an object's names, and outputs follow the order of their schema's.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from django.utils.translation import gettext as _
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from inference.errors import InvalidRequest
from inference.request import Constraint
from penstock.registry.output_contract import OutputContract
from penstock.serving.rejection import Rejected

STRUCTURED_OUTPUTS = "structured_outputs"
FORM_PARAMETERS = (
    "response_format", STRUCTURED_OUTPUTS, "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
JSON_KINDS = ("json_schema", "json_object")


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class JsonSchemaFormat(_Part):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    given: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Has no effect: outputs always follow the schema, as OpenAI's do where it is true."""


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema", "The type 'json_schema' comes with the field 'json_schema', and no other type does"
            )
        return self


class StructuredOutputs(_Part):
    """vLLM's; exactly one of these."""

    json_form: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = (self.json_form, self.regex, self.choice, self.grammar, self.json_object)
        if sum(one is not None for one in given) != 1:
            raise PydanticCustomError("one_form", "Give exactly one of json, regex, choice, grammar, json_object")
        return self


class FormParameters(BaseModel):
    """The part of a body that says how outputs must look."""

    model_config = ConfigDict(strict=True, frozen=True)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None


def form_asked_for(body: Mapping[str, Any]) -> tuple[str, Constraint] | None:
    """The parameter of a parsed body that constrains the output, and the constraint. Raises Rejected naming it."""
    given = [name for name in FORM_PARAMETERS if body.get(name) is not None and not _is_text(name, body[name])]
    if not given:
        return None
    if len(given) > 1:
        message = _("Only one parameter may say how the output must look: %(first)s or %(second)s.")
        raise _rejected(given[1], message % {"first": given[0], "second": given[1]})
    (name,) = given
    try:
        return name, _constraint(name, body[name])
    except InvalidRequest as error:
        raise form_rejected(name, error) from error


def form_rejected(param: str, error: InvalidRequest) -> Rejected:
    return _rejected(param, _("%(param)s: %(problem)s.") % {"param": param, "problem": error.message})


def form_as_kept(constraint: Constraint) -> dict[str, Any]:
    """The value of `structured_outputs` in an admitted body."""
    match constraint.kind:
        case "json_schema":
            return {"json": constraint.text}
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": json.loads(constraint.text)}
        case kind:
            return {kind: constraint.text}


@lru_cache(maxsize=256)
def form_of_contract(contract: OutputContract) -> Constraint | None:
    """What the engine must hold a task's outputs to."""
    if contract.json_schema is not None:
        return Constraint.json_schema(contract.json_schema)
    return Constraint.json_schema({}) if contract.must_be_json else None


def agreed_form(asked: tuple[str, Constraint] | None, contract: OutputContract) -> Constraint | None:
    """The constraint of a request on a task: the task's where it names a schema, else the request's own, else any JSON
    where the task wants JSON. Raises Rejected where the two do not go together."""
    form = form_of_contract(contract)
    if asked is None or form is None:
        return asked[1] if asked is not None else form
    param, own = asked
    if contract.json_schema is None and own.kind in JSON_KINDS:
        return own
    if own.kind == "json_object" or _same_schema(own, form):
        return form
    raise _rejected(
        param,
        _("The task's output contract says how outputs must look; leave %(param)s out.") % {"param": param},
        code="form_against_contract",
    )


def _same_schema(one: Constraint, other: Constraint) -> bool:
    return one.kind == other.kind == "json_schema" and json.loads(one.text) == json.loads(other.text)


def _is_text(name: str, value: Any) -> bool:
    return name == "response_format" and value.get("type") == "text"


def _constraint(name: str, value: Any) -> Constraint:
    match name:
        case "response_format":
            schema = value["json_schema"].get("schema") if value["type"] == "json_schema" else None
            return Constraint.json_object() if schema is None else Constraint.json_schema(schema)
        case "structured_outputs":
            kind, given = next((key, one) for key, one in value.items() if one is not None)
            return _constraint(f"guided_{kind}", given)
        case "guided_json":
            return Constraint.json_schema(value)
        case "guided_regex":
            return Constraint.regex(value)
        case "guided_choice":
            return Constraint.choice(value)
        case "guided_grammar":
            return Constraint.grammar(value)
        case _:
            return Constraint.json_object()


def _rejected(param: str, message: str, *, code: str = "invalid_value") -> Rejected:
    return Rejected(http_status=400, code=code, param=param, message=message)

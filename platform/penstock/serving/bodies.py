"""The request bodies that serving accepts, and what is wrong with one that it does not.

Follows OpenAI's API reference for chat completions, (legacy) completions and embeddings, with vLLM's further
parameters of the former two, and `metadata` for all. A
parameter that would change the output and is not supported is refused unless it holds its neutral value; it is never
ignored in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from django.utils.translation import gettext as _
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from inference.parameters import MAX_SAMPLES, MAX_TOP_LOGPROBS
from penstock.serving.forms import FormParameters
from penstock.serving.rejection import Rejected

CHAT_COMPLETIONS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = (CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS)

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

MAX_INPUTS = 2048  # texts in one request for embeddings, as with OpenAI

# These say something about the caller or the connection, nothing about the output.
WITHOUT_EFFECT = frozenset(
    {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "stream_options"}
)
# Not supported; the values listed ask for what is done anyway.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}

MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=MAX_METADATA_KEY_CHARACTERS)]
MetadataValue = Annotated[str, StringConstraints(max_length=MAX_METADATA_VALUE_CHARACTERS)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA_PAIRS)]
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


def _text_or_list(value: object) -> str:
    """Which of two spellings was meant: so that only that one's faults are told."""
    return "list" if isinstance(value, list | tuple) else "str"


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class TextPart(_Part):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:
        """Of an image one hears that it is an image, not that it lacks a text."""
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise PydanticCustomError(
                "unsupported_part", "Only parts of the type 'text' are supported, not '{type}'", {"type": part["type"]}
            )
        return part


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("str")] | Annotated[list[TextPart], Field(min_length=1), Tag("list")],
        Discriminator(_text_or_list),
    ]
    name: str | None = None


class _Body(FormParameters):
    model: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            Annotated[StopText, Tag("str")] | Annotated[list[StopText], Field(max_length=4), Tag("list")],
            Discriminator(_text_or_list),
        ]
        | None
    ) = None
    stream: bool | None = None
    metadata: Metadata | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    # vLLM's, beyond OpenAI's
    top_k: Annotated[int, Field(ge=-1, le=10_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    ignore_eos: bool | None = None

    @property
    def samples(self) -> int:
        """How many outputs are made of the prompt."""
        return self.n or 1

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens


class ChatBody(_Body):
    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _goes_with_logprobs(cls, value: int | None, told: ValidationInfo) -> int | None:
        if value is not None and not told.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "It needs logprobs to be true")
        return value

    @property
    def asked_max_tokens(self) -> int | None:
        """OpenAI's newer name wins over the older."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionBody(_Body):
    prompt: Annotated[str, StringConstraints(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None

    @field_validator("best_of")
    @classmethod
    def _of_at_least_n(cls, value: int | None, told: ValidationInfo) -> int | None:
        n = told.data.get("n") or 1
        if value is not None and value < n:
            raise PydanticCustomError("best_of", "It must not be below n ({n})", {"n": n})
        if value is not None and value > n and told.data.get("stream"):
            raise PydanticCustomError("best_of", "Which outputs are the best is known at the end; it cannot stream")
        return value

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1


InputText = Annotated[str, StringConstraints(min_length=1)]
InputTokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _kind_of_input(value: object) -> str:
    """Which of the four spellings was meant: so that only that one's faults are told."""
    if not isinstance(value, list | tuple):
        return "str"
    first = value[0] if value else ""
    return "list[list[int]]" if isinstance(first, list | tuple) else "list[int]" if _is_int(first) else "list[str]"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class EmbeddingBody(BaseModel):
    """`input`: a text, texts, the token ids of one, or those of several."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    input: Annotated[
        Annotated[InputText, Tag("str")]
        | Annotated[list[InputText], Field(min_length=1, max_length=MAX_INPUTS), Tag("list[str]")]
        | Annotated[InputTokens, Tag("list[int]")]
        | Annotated[list[InputTokens], Field(min_length=1, max_length=MAX_INPUTS), Tag("list[list[int]]")],
        Discriminator(_kind_of_input),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    metadata: Metadata | None = None


class StreamOptions(_Part):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StreamOptionsHolder(_Part):
    """Names the parameter in what is wrong with it."""

    stream_options: StreamOptions | None


@dataclass(frozen=True, slots=True)
class InvalidBody(Exception):
    """A body that cannot be served, with everything that is wrong with it."""

    problems: tuple[Rejected, ...]


BODIES: Mapping[str, type[ChatBody | CompletionBody | EmbeddingBody]] = {
    CHAT_COMPLETIONS: ChatBody,
    COMPLETIONS: CompletionBody,
    EMBEDDINGS: EmbeddingBody,
}


def parse_body(body: object, endpoint: str) -> ChatBody | CompletionBody | EmbeddingBody:
    """The body as a typed value. Raises InvalidBody, whose problems each name the parameter."""
    if not isinstance(body, dict):
        raise InvalidBody((_problem("invalid_type", None, _("The body must be a JSON object.")),))
    model = BODIES[endpoint]
    known = set(model.model_fields)
    generates = endpoint != EMBEDDINGS
    problems = [_unsupported(name, value, generates) for name, value in body.items() if name not in known]
    found = [problem for problem in problems if problem is not None]
    try:
        parsed = model.model_validate({name: value for name, value in body.items() if name in known})
        if generates:
            StreamOptionsHolder.model_validate({"stream_options": body.get("stream_options")})
    except ValidationError as error:
        raise InvalidBody((*_problems_of(error), *found)) from error
    if found:
        raise InvalidBody(tuple(found))
    return parsed


def check_metadata(metadata: object) -> dict[str, str]:
    """A batch's metadata. Raises Rejected unless it is at most 16 pairs of text, 64 and 512 characters long."""
    if metadata is None:
        return {}

    class Holder(BaseModel):
        model_config = ConfigDict(strict=True)
        metadata: Metadata

    try:
        return Holder.model_validate({"metadata": metadata}).metadata
    except ValidationError as error:
        raise _problems_of(error)[0] from error


def unstorable_text(value: object) -> bool:
    """Whether a JSON value holds text that PostgreSQL cannot keep: a NUL, or half of a surrogate pair."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if "\x00" in item or any("\ud800" <= character <= "\udfff" for character in item):
                return True
        elif isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    return False


def _unsupported(name: str, value: Any, generates: bool) -> Rejected | None:
    """generates: whether the endpoint does; embeddings have no parameter beyond their own but `user`."""
    if name in (WITHOUT_EFFECT if generates else {"user"}) or value is None:
        return None
    if name not in NEUTRAL or not generates:
        return _problem("unknown_parameter", name, _("There is no parameter of this name: %(name)s.") % {"name": name})
    # `False == 0` and `True == 1` in Python; in JSON they differ.
    if any(type(value) is not bool and value == neutral for neutral in NEUTRAL[name] if type(neutral) is not bool):
        return None
    if any(value is neutral for neutral in NEUTRAL[name] if type(neutral) is bool):
        return None
    return _problem(
        "unsupported_parameter",
        name,
        _("This parameter is not supported yet: %(name)s. Leave it out.") % {"name": name},
    )


def _problems_of(error: ValidationError) -> list[Rejected]:
    """One problem a parameter: the first."""
    found: dict[str, Rejected] = {}
    for item in error.errors(include_url=False, include_input=False):
        place = [str(step) for step in item["loc"] if not _is_branch(step)]
        param = ".".join(place)
        if param in found:
            continue
        code = "missing_required_parameter" if item["type"] == "missing" else "invalid_value"
        if code == "missing_required_parameter":
            message = _("%(param)s is missing; it is required.") % {"param": param}
        else:
            message = _("%(param)s: %(problem)s.") % {"param": param, "problem": item["msg"]}
        found[param] = _problem(code, param, message)
    return list(found.values())


def _is_branch(step: str | int) -> bool:
    """Whether a step of pydantic's location names a branch of a union, not a key or an index."""
    return isinstance(step, str) and ("[" in step or step in {"str", "list"})


def _problem(code: str, param: str | None, message: str) -> Rejected:
    return Rejected(http_status=400, code=code, param=param, message=message)

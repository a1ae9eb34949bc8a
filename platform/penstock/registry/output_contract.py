"""The output contract of a task: what each of its outputs has to be."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from django.utils.translation import gettext as _
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from inference.constrain import check_meaning
from inference.errors import InvalidRequest
from inference.parameters import Constraint

Phrase = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class OutputContract(BaseModel):
    """Frozen. Raises `pydantic.ValidationError` naming the field for values that cannot be.

    Lengths are in Unicode code points, without white space at either end. The default contract asks for
    nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    language_from: str | None = Field(default=None, min_length=1)
    """Key in a request's metadata that carries the expected language as a BCP 47 tag ("en", "zh-Hant")."""

    min_characters: int = Field(default=0, ge=0)
    max_characters: int | None = Field(default=None, gt=0)

    must_be_json: bool = False
    """The whole output is one JSON text (RFC 8259), with no fence or remark around it. The engine is held to it."""

    json_schema: str | None = None
    """A JSON schema (draft 2020-12) that the whole output follows, as text, which keeps the order of its properties;
    given as an object too. The engine writes nothing else: only a cut at the token limit can leave an output invalid.
    """

    forbidden_phrases: tuple[Phrase, ...] = ()
    """Phrases that may not occur, whatever their case and width (compared in NFKC, case folded)."""

    repetition_limit: float | None = Field(default=None, gt=0, lt=1)
    """Highest share of 4-grams that may repeat an earlier one, 0 to 1. None leaves repetition unchecked."""

    copy_limit: float | None = Field(default=None, gt=0, lt=1)
    """Highest share of 4-grams that may stand in the prompt too, 0 to 1. None leaves copying unchecked."""

    allow_refusal: bool = False
    """A refusal can be a right answer (where the task includes requests that should be refused)."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_that_can_be_followed(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        try:
            constraint = Constraint.json_schema(value)
            check_meaning(constraint)
        except InvalidRequest as error:
            raise ValueError(_("This JSON schema cannot be followed: %(why)s.") % {"why": error.message}) from error
        return constraint.text

    @model_validator(mode="after")
    def _lengths_leave_room(self) -> Self:
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(_("The most characters must not be fewer than the least."))
        return self

    @property
    def asks_for_json(self) -> bool:
        return self.must_be_json or self.json_schema is not None

    @property
    def asks_for_something(self) -> bool:
        return self != _ASKS_FOR_NOTHING and self != _ONLY_ALLOWS_REFUSAL

    def expected_language(self, metadata: Mapping[str, object] | None) -> str | None:
        """The expected language that a request's metadata carries, or None."""
        if self.language_from is None or not metadata:
            return None
        value = metadata.get(self.language_from)
        return value if isinstance(value, str) and value.strip() else None


_ASKS_FOR_NOTHING = OutputContract()
_ONLY_ALLOWS_REFUSAL = OutputContract(allow_refusal=True)

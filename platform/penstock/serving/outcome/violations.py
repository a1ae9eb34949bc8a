"""The ways in which an output can miss its contract: a code for machines, a label for people."""

from django.db.models.enums import TextChoices
from django.utils.translation import gettext_lazy as _


class Violation(TextChoices):
    """A code is stored and counted, so it never changes its meaning; a label may be reworded."""

    EMPTY = "empty", _("No output")
    TOO_SHORT = "too_short", _("Shorter than required")
    TOO_LONG = "too_long", _("Longer than allowed")
    NOT_JSON = "not_json", _("Not valid JSON")
    SCHEMA = "schema", _("Does not follow the JSON schema")
    LANGUAGE = "language", _("Not in the expected language")
    MIXED_LANGUAGE = "mixed_language", _("More than one language")
    MIXED_SCRIPT = "mixed_script", _("Traditional and Simplified Chinese characters mixed")
    FORBIDDEN_PHRASE = "forbidden_phrase", _("Contains a forbidden phrase")
    REPETITION = "repetition", _("Repeats itself")
    COPIES_PROMPT = "copies_prompt", _("Repeats the prompt instead of answering it")
    REFUSED = "refused", _("Refused to answer")


VIOLATION_LABELS = dict(Violation.choices)
"""Label for each code, translated when it is shown."""

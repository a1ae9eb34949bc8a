"""Judges one output against its task's contract."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from jsonschema import Draft202012Validator

from penstock.registry.output_contract import OutputContract

from .language import Detection, contradicts, detect, expects_variant, is_language_tag
from .refusal import is_refusal
from .repetition import copied_share, repeated_share
from .violations import Violation


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of one output.

    `valid` is True when every check that the contract asks for was made and passed, False when one failed, and None
    when there is nothing to say: the request failed, the contract asks for nothing, or a check could not be made (the
    expected language is missing or cannot be told, the prompt was not given) while all others passed.
    `refused` is None when there is no output to look at. `truncated` (cut off at the token limit) stands on its own:
    a truncated output can be valid. `detected_language` is a BCP 47 tag; None when the request failed. `violations`
    are codes of `Violation`.
    """

    valid: bool | None
    refused: bool | None
    truncated: bool
    detected_language: str | None
    violations: tuple[str, ...]


def assess(
    *,
    text: str,
    finish_reason: str,
    error: bool,
    contract: OutputContract,
    expected_language: str | None,
    prompt: str | None = None,
) -> Outcome:
    """Judge the output `text` of a request; never raises.

    `finish_reason` is OpenAI's ("stop", "length", "content_filter", ...). `expected_language` is a BCP 47 tag, as
    `contract.expected_language(metadata)` gives it; when present, the language is checked. `prompt` is the text of all
    messages (`prompt_text`), needed only by a contract with a `copy_limit`. A failed request (`error`) has no outcome
    to judge: it counts as an error, not as an invalid output.
    """
    if error:
        return Outcome(None, None, False, None, ())
    stripped = text.strip()
    document, is_json = _parse_json(stripped) if contract.asks_for_json else (None, True)
    # Of a JSON output, the language is that of its values: keys are named by the contract, not by the model.
    prose = "\n".join(_strings(document)) if contract.asks_for_json and is_json else stripped
    detection = detect(prose, expected_language)
    refused = is_refusal(prose) if stripped else None
    if finish_reason == "content_filter":
        refused = True

    violations: list[Violation] = []
    wrong_language = _language_violation(detection, expected_language) if stripped else None
    if contract.asks_for_something or expected_language is not None:
        violations += _form_violations(stripped, is_json, contract, prompt)
        if contract.json_schema is not None and is_json and not _validator(contract.json_schema).is_valid(document):
            violations.append(Violation.SCHEMA)
        if wrong_language:
            violations.append(wrong_language)
        if refused and not contract.allow_refusal:
            violations.append(Violation.REFUSED)

    return Outcome(
        valid=_verdict(violations, contract, expected_language, prompt),
        refused=refused,
        truncated=finish_reason == "length",
        detected_language=detection.tag,
        violations=tuple(violation.value for violation in violations),
    )


def prompt_text(messages: Sequence[Mapping[str, object]]) -> str:
    """The text of chat messages as one string; parts that are not text are left out."""
    texts = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts)


def _verdict(
    violations: list[Violation], contract: OutputContract, expected_language: str | None, prompt: str | None
) -> bool | None:
    if violations:
        return False
    if expected_language is None and not contract.asks_for_something:
        return None
    language_is_due = contract.language_from is not None or expected_language is not None
    if language_is_due and not (expected_language is not None and is_language_tag(expected_language)):
        return None
    if contract.copy_limit is not None and prompt is None:
        return None
    return True


def _form_violations(stripped: str, is_json: bool, contract: OutputContract, prompt: str | None) -> list[Violation]:
    if not stripped:
        return [Violation.EMPTY]
    found = []
    length = len(unicodedata.normalize("NFC", stripped))
    if length < contract.min_characters:
        found.append(Violation.TOO_SHORT)
    if contract.max_characters is not None and length > contract.max_characters:
        found.append(Violation.TOO_LONG)
    if not is_json:
        found.append(Violation.NOT_JSON)
    if contract.forbidden_phrases:
        folded = _fold(stripped)
        if any(phrase in folded for phrase in _folded_phrases(contract.forbidden_phrases)):
            found.append(Violation.FORBIDDEN_PHRASE)
    if contract.repetition_limit is not None:
        share = repeated_share(stripped)
        if share is not None and share > contract.repetition_limit:
            found.append(Violation.REPETITION)
    if contract.copy_limit is not None and prompt is not None:
        share = copied_share(stripped, prompt)
        if share is not None and share > contract.copy_limit:
            found.append(Violation.COPIES_PROMPT)
    return found


@lru_cache(maxsize=256)
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema))


def _language_violation(detection: Detection, expected_language: str | None) -> Violation | None:
    if expected_language is None:
        return None
    different = contradicts(detection, expected_language)
    if different is None:
        return None
    if detection.tag == "mul":
        return Violation.MIXED_LANGUAGE
    if different:
        return Violation.LANGUAGE
    if detection.mixed_script and expects_variant(expected_language):
        return Violation.MIXED_SCRIPT
    return None


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


@lru_cache(maxsize=256)
def _folded_phrases(phrases: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_fold(phrase) for phrase in phrases)


def _no_such_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")  # RFC 8259, section 6


def _parse_json(text: str) -> tuple[object, bool]:
    try:
        return json.loads(text, parse_constant=_no_such_number), True
    except (ValueError, RecursionError):
        return None, False


def _strings(document: object) -> list[str]:
    """All string values in a JSON document, in order."""
    found, waiting = [], [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            waiting.extend(reversed(value.values()))
        elif isinstance(value, list):
            waiting.extend(reversed(value))
    return found

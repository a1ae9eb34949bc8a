"""How the tokens of one request are chosen: sampling parameters and constraints, checked. Free of torch.

Names and meanings are those of vLLM's SamplingParams and of OpenAI's completions API, so that a request means the same
here as there. The order of application is in `inference.sampling`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Literal

from inference.errors import InvalidRequest

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

MAX_SAMPLES = 128  # of one request; OpenAI's limit for n
MAX_TOP_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_CONSTRAINT_CHARACTERS = 100_000
MAX_GRAMMAR_CHARACTERS = 20_000  # of Lark, whose compiler may take a time that grows with the square of it
MAX_CHOICES = 2_000
MAX_SCHEMA_DEPTH = 64  # nesting beyond it would cost stack in the grammar's compiler
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 1_024


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must look like, from its first byte to its last.

    Made by one of `json_schema`, `json_object`, `regex`, `choice`, `grammar`. `text`: the JSON schema or the list of
    choices as JSON, the regular expression, or the Lark grammar. Checked for size and depth here, and for meaning when
    the request is submitted (`inference.constrain`). Raises InvalidRequest naming `constraint`.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "json_object", "regex", "choice", "grammar"):
            raise InvalidRequest("constraint", f"is of the unknown kind {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidRequest("constraint", f"must be text, not {type(self.text).__name__}")
        most = MAX_GRAMMAR_CHARACTERS if self.kind == "grammar" else MAX_CONSTRAINT_CHARACTERS
        if len(self.text) > most:
            raise InvalidRequest("constraint", f"has {len(self.text)} characters; at most {most} are taken")
        if self.kind == "json_schema":
            _check_schema(_parsed(self.text))
        elif self.kind == "choice":
            _check_choices(_parsed(self.text))
        elif self.kind != "json_object" and not self.text:
            raise InvalidRequest("constraint", f"an empty {self.kind} allows nothing; leave the constraint out")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """Outputs that validate against a JSON schema (draft 2020-12), given as an object or as its text."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            # In the order given: the properties of an output follow the order of the schema's.
            return cls("json_schema", json.dumps(schema, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest("constraint", f"the schema cannot be written as JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object (OpenAI's `response_format` of type `json_object`)."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Outputs that match a regular expression whole (Rust's regex syntax; no look-around, no back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Several[str]) -> Constraint:
        """Exactly one of these texts."""
        if isinstance(choices, str):
            raise InvalidRequest("constraint", "choice needs a list of texts, not one text")
        try:
            return cls("choice", json.dumps(list(choices), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise InvalidRequest("constraint", f"the choices cannot be written as JSON: {error}") from None

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """Sentences of a context-free grammar in llguidance's variant of Lark, beginning at the rule `start`."""
        return cls("grammar", lark)

    @property
    def digest(self) -> str:
        """SHA-256 over kind and text, the key under which the compiled form is kept."""
        return hashlib.sha256(f"{self.kind}\n{self.text}".encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when the output ends.

    max_tokens: tokens to generate at most, over all that the constraint forces too
    temperature: 0 is greedy; otherwise logits are divided by it (OpenAI)
    top_p: draw among the fewest likeliest tokens whose probability reaches it (nucleus sampling, arXiv 1904.09751)
    top_k: draw among that many likeliest tokens; 0 is all (arXiv 1805.04833; vLLM)
    min_p: drop tokens less likely than min_p times the likeliest (arXiv 2407.01082; vLLM)
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output so far;
        1 is none (CTRL, arXiv 1909.05858; vLLM)
    frequency_penalty: subtracted once for each time that a token is in the output so far, from -2 to 2 (OpenAI)
    presence_penalty: subtracted once for a token that is in the output so far, from -2 to 2 (OpenAI)
    logit_bias: (token id, -100 to 100) added to the logits; -100 bans and 100 all but forces (OpenAI)
    logprobs: report the log-probability of each token and of that many likeliest; 0 is the token's alone, None is
        nothing (OpenAI's logprobs with top_logprobs)
    seed: makes drawing repeatable whatever else is in the batch; sample i of n has a seed derived from it and i
    n: samples of one prompt. best_of: samples made, of which the n with the highest mean log-probability are returned
    stop: strings that end the output and are not part of it. stop_token_ids: tokens that end it; their text is left out
    ignore_eos: the end token does not end the output. min_tokens: no end or stop token comes before as many
    constraint: what the output must look like; a complete output ends whatever ignore_eos and min_tokens say. Stop
        strings, which would cut JSON short, go with the other kinds only

    Raises InvalidRequest, naming the field.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, None)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        for field in ("stop", "stop_token_ids", "logit_bias"):
            given = getattr(self, field)
            if not isinstance(given, tuple | list):
                raise InvalidRequest(field, f"must be a tuple or list, not {given!r}")
            object.__setattr__(self, field, tuple(given))  # frozen, and so to be had as a key
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", f"must be True or False, not {self.ignore_eos!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest("stop", "must be a tuple of strings that are not empty")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"must be from 0 to max_tokens ({self.max_tokens}), not {self.min_tokens!r}"
            )
        _whole("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_logit_bias()
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _whole("n", self.n, 1, MAX_SAMPLES)
        if self.best_of is not None:
            _whole("best_of", self.best_of, self.n, MAX_SAMPLES)
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)
        if self.constraint is not None:
            self._check_constraint(self.constraint)

    def _check_constraint(self, constraint: Any) -> None:
        if not isinstance(constraint, Constraint):
            raise InvalidRequest("constraint", f"must be a Constraint, not {type(constraint).__name__}")
        if constraint.kind in ("json_schema", "json_object"):
            for field, given in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
                if given:
                    raise InvalidRequest(field, "would cut JSON short, which ends by itself; leave it out")

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", f"has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIAS} are taken")
        for entry in self.logit_bias:
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise InvalidRequest("logit_bias", f"must hold pairs of token id and bias, not {entry!r}")
            _whole("logit_bias", entry[0], 0, None)
            _number("logit_bias", entry[1], -100.0, 100.0)
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise InvalidRequest("logit_bias", "names a token more than once")

    @property
    def samples(self) -> int:
        """Sequences to generate for the request: best_of where it is given, else n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_logprobs(self) -> bool:
        """Whether each token's log-probability is computed: it is asked for, or best_of has to rank by it."""
        return self.logprobs is not None or self.samples > self.n

    @property
    def changes_logits(self) -> bool:
        """Whether a penalty or a bias can move the highest logit."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
            or bool(self.logit_bias)
        )

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether each token is the one with the highest logit, and nothing else is to be known of the logits."""
        return self.temperature == 0 and not self.changes_logits and not self.needs_logprobs and self.constraint is None


def _whole(field: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(field, f"must be a whole number {allowed}, not {value!r}")


def _number(field: str, value: Any, low: float, high: float, *, open_below: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise InvalidRequest(field, f"must be a finite number, not {value!r}")
    if not low <= value <= high or (open_below and value == low):
        allowed = f"above {low:g} and at most {high:g}" if open_below else f"from {low:g} to {high:g}"
        raise InvalidRequest(field, f"must be {allowed}, not {value!r}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest("constraint", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidRequest("constraint", f"is not JSON: {error}") from None


def _check_schema(schema: Any) -> None:
    """Refuse what is no schema, what is nested too deeply, and references to other documents."""
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest("constraint", f"a JSON schema is an object, not {type(schema).__name__}")
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                reference = value.get("$ref")
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise InvalidRequest("constraint", f"$ref {reference[:200]!r} leads outside the schema")
                deeper.extend(value.values())
            elif isinstance(value, list):
                deeper.extend(value)
        level = [value for value in deeper if isinstance(value, (dict, list))]
        if not level:
            return
    raise InvalidRequest("constraint", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not choices:
        raise InvalidRequest("constraint", "choice needs a list of at least one text")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest("constraint", f"has {len(choices)} choices; at most {MAX_CHOICES} are taken")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest("constraint", "each choice must be a text that is not empty")

"""Outputs held to a JSON schema, a regular expression, a list of choices or a grammar, by the llguidance library.

A constraint is compiled once, on the thread that submits the request, and kept; each sample follows a copy of it. All
work on the stepping thread is bounded by llguidance's own limits (fuel for a token mask, items, lexer states), and
what goes beyond them is an error of that request alone.

JSON is written with one space after each colon and comma and no other white space, so that everything but the values
is forced by the schema, and need not be chosen token by token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from inference.background import start_in_background
from inference.errors import ConstraintFailed, InvalidRequest
from inference.parameters import Constraint
from inference.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_COMPILED_KEPT = 128
_COMPILE_SECONDS = 10
_MAX_STRAGGLERS = 2
_STACK_BYTES = 256 * 1024**2  # reserved, and used only as deep as a grammar goes
_MAX_LEXER_STATES = 10_000  # about 2 KB each: what one request may come to hold
_GRAMMAR_FUEL = 200_000  # about 4 ms
_MAX_ERROR_CHARACTERS = 300
_JSON_FORM: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Whatever the schema itself asks for: a keyword that is not understood is an error and not ignored.
    "lenient": False,
    "coerce_one_of": False,
}


class ConstraintState:
    """Where one output stands in its grammar. `beginning`: what every output begins with."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, beginning: tuple[int, ...] = ()) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.beginning = beginning

    def copy(self) -> ConstraintState:
        """The same place, to be followed apart."""
        return ConstraintState(self._matcher.deep_copy(), self._vocabulary, self.beginning)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow any more."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allows(self, token: int) -> bool:
        """Whether the token may come next; much cheaper than the mask of all."""
        return self._matcher.validate_tokens([token]) == 1

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[V]: which tokens may come next. Raises ConstraintFailed where there are none, or at the limits."""
        if self._matcher.is_stopped():
            self._raise("nothing may follow")
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._raise("the mask of allowed tokens cannot be computed")
        allowed = np.unpackbits(words, bitorder="little").view(np.bool_)[: self._vocabulary]
        if len(allowed) < self._vocabulary:
            allowed = np.concatenate([allowed, np.zeros(self._vocabulary - len(allowed), dtype=np.bool_)])
        if not allowed.any():
            raise ConstraintFailed("allows no token of this model here")
        return allowed

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as this tokenizer would write them; none where there is a choice."""
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def advance(self, token: int) -> None:
        """Go on past a token. Raises ConstraintFailed where it is not allowed, or at the limits."""
        if not self._matcher.consume_token(token):
            self._raise(f"token {token} cannot follow")

    def _raise(self, what: str) -> None:
        raise ConstraintFailed(f"{what}: {_shortened(self._matcher.get_error() or self._matcher.stop_reason())}")


class ConstraintCompiler:
    """Turns constraints into states for one tokenizer; from any thread. Keeps the latest outcomes, refusals too."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        """vocabulary: the number of logits of the model, which may be above the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._fast: LLTokenizer | None = None
        self._compiled: OrderedDict[str, ConstraintState | InvalidRequest] = OrderedDict()
        self._compiling = threading.Lock()  # one at a time; what is known already does not wait for it
        self._lock = threading.Lock()  # guards _compiled
        self._stragglers: list[threading.Thread] = []

    def compile(self, constraint: Constraint) -> ConstraintState:
        """The beginning of its grammar, to be copied before use. Raises InvalidRequest naming `constraint`."""
        outcome = self._known(constraint.digest)
        if outcome is None:
            with self._compiling:
                # Another thread may have compiled it while this one waited.
                outcome = self._known(constraint.digest)
                if outcome is None:
                    outcome = self._outcome(constraint)
                    self._keep(constraint.digest, outcome)
        if isinstance(outcome, InvalidRequest):
            raise InvalidRequest(outcome.field, outcome.message)
        return outcome

    def _known(self, digest: str) -> ConstraintState | InvalidRequest | None:
        with self._lock:
            outcome = self._compiled.get(digest)
            if outcome is not None:
                self._compiled.move_to_end(digest)
            return outcome

    def _keep(self, digest: str, outcome: ConstraintState | InvalidRequest) -> None:
        with self._lock:
            self._compiled[digest] = outcome
            while len(self._compiled) > _COMPILED_KEPT:
                self._compiled.popitem(last=False)

    def _outcome(self, constraint: Constraint) -> ConstraintState | InvalidRequest:
        """Compile on a thread of its own: with a stack for the deepest grammar, and not waited for without end.

        llguidance compiles by recursion, and a chain of a few thousand definitions, each naming the next, would
        overflow a usual stack and end the process.
        """
        self._stragglers = [thread for thread in self._stragglers if thread.is_alive()]
        if len(self._stragglers) >= _MAX_STRAGGLERS:
            raise InvalidRequest("constraint", "too many others are still being compiled; try again later")
        outcomes: list[ConstraintState | InvalidRequest] = []

        def work() -> None:
            try:
                outcomes.append(self._compile(constraint))
            except InvalidRequest as error:
                outcomes.append(error)
            except Exception as error:
                outcomes.append(InvalidRequest("constraint", _shortened(f"{type(error).__name__}: {error}")))

        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="constraint-compiler", daemon=True)
            start_in_background(thread)
        finally:
            threading.stack_size(before)
        thread.join(_COMPILE_SECONDS)
        if not outcomes:
            self._stragglers.append(thread)
            return InvalidRequest("constraint", f"is not compiled within {_COMPILE_SECONDS} s; simplify it")
        return outcomes[0]

    def _compile(self, constraint: Constraint) -> ConstraintState:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            # A grammar may spend it once for each of its terminals.
            initial_lexer_fuel=_GRAMMAR_FUEL if constraint.kind == "grammar" else None,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )
        try:
            matcher = LLMatcher(self._prepared(), _grammar(constraint), log_level=0, limits=limits)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest("constraint", _shortened(str(error))) from None
        if matcher.is_error():
            raise InvalidRequest("constraint", _shortened(matcher.get_error()))
        state = ConstraintState(matcher, self._vocabulary)
        # A grammar without sentences shows at its first mask.
        try:
            state.allowed()
        except ConstraintFailed as error:
            raise InvalidRequest("constraint", error.message) from None
        state.beginning = tuple(state.forced_tokens())
        return state

    def _prepared(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._fast is None:
            ends = sorted(self._tokenizer.eos_token_ids)
            try:
                self._fast = LLTokenizer(
                    self._tokenizer.to_json(),
                    n_vocab=max(self._vocabulary, self._tokenizer.vocab_size),
                    eos_token=ends or None,
                    slices=LLTokenizer.json_slices(),
                )
            except ValueError as error:
                raise InvalidRequest(
                    "constraint", f"this model's tokenizer cannot be constrained: {_shortened(str(error))}"
                ) from None
        return self._fast


def check_meaning(constraint: Constraint) -> None:
    """Raises InvalidRequest naming `constraint` where it cannot be followed, whatever the model."""
    from llguidance import LLMatcher

    try:
        problem = LLMatcher.validate_grammar(_grammar(constraint))
    except (ValueError, TypeError, OverflowError) as error:
        problem = str(error)
    if problem:
        raise InvalidRequest("constraint", _shortened(problem))


def _grammar(constraint: Constraint) -> str:
    """llguidance's form of the constraint."""
    from llguidance import LLMatcher

    text = constraint.text
    grammar: str
    if constraint.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    elif constraint.kind == "choice":
        grammar = LLMatcher.grammar_from_regex("|".join(_literal(choice) for choice in json.loads(text)))
    elif constraint.kind == "grammar":
        grammar = LLMatcher.grammar_from_lark(text)
    else:
        schema: Any = {"type": "object"} if constraint.kind == "json_object" else json.loads(text)
        if schema is False:
            raise InvalidRequest("constraint", "the schema `false` allows nothing")
        schema = {} if schema is True else schema
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), overrides=_JSON_FORM)
    return grammar


def _literal(text: str) -> str:
    """A regular expression in Rust's syntax that matches exactly this text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", r"\\\g<0>", text)


def _shortened(message: str) -> str:
    """A library's message without its appendices."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_ERROR_CHARACTERS else text[:_MAX_ERROR_CHARACTERS] + "…"

"""What becomes of a request before it costs anything: its sequences, or why it cannot run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import TypeVar

import numpy as np

from inference.cache.pages import pages_for
from inference.constrain import ConstraintCompiler, ConstraintState
from inference.errors import InvalidRequest
from inference.group import RequestGroup, new_group
from inference.loading import LoadedModel
from inference.parameters import Constraint
from inference.request import Completion, GenerationRequest, TokenEvent

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class Admission:
    """From any thread: what it does takes none of the stepping thread's time."""

    def __init__(self, model: LoadedModel) -> None:
        self._config = model.manifest.config
        self._pages = model.sequence_pages
        self._tokenizer = model.tokenizer
        self._constraints = ConstraintCompiler(model.tokenizer, self._config.vocab_size) if model.tokenizer else None
        self._arrivals = itertools.count()

    def group(
        self,
        request: GenerationRequest,
        on_token: Callable[[TokenEvent], None] | None,
        on_finish: Callable[[Completion], None],
    ) -> RequestGroup:
        """A request's samples; one that cannot run has none of its tokens, and `refused` says why."""
        prompt, most = len(request.prompt_token_ids), self._config.max_context
        max_tokens = min(request.sampling.max_tokens, max(1, most - prompt))
        refused, constraint = self._reason_to_reject(request, max_tokens), None
        if refused is None and request.sampling.constraint is not None:
            try:
                constraint = self._compiled(request.sampling.constraint)
            except InvalidRequest as error:
                refused = str(error)
        return new_group(
            request,
            self._arrivals,
            max_tokens,
            self._tokenizer,
            constraint,
            _contained(on_token) if on_token is not None else None,
            _contained(on_finish),
            rotation_offset=self._config.rotation_offset(prompt + max_tokens),
            refused=refused,
        )

    def _compiled(self, constraint: Constraint) -> ConstraintState:
        if self._constraints is None:
            raise InvalidRequest("constraint", "this model has no tokenizer, so no output can be constrained")
        return self._constraints.compile(constraint)

    def _reason_to_reject(self, request: GenerationRequest, max_tokens: int) -> str | None:
        """What is wrong with a request, its field first; None where it can run. The constraint is not looked at."""
        config, sampling, count = self._config, request.sampling, len(request.prompt_token_ids)
        if not config.has_head:
            return "model: has no head; it gives embeddings and generates no tokens"
        if count == 0:
            return "prompt: is empty; at least one token is needed"
        if count >= config.max_context:
            return (
                f"prompt: has {count} tokens; this model takes at most {config.max_context - 1} and one to answer with"
            )
        for field, tokens in (
            ("prompt", request.prompt_token_ids),
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            strange = _strange(tokens, config.vocab_size)
            if strange is not None:
                return f"{field}: token id {tokens[strange]!r} is not in the vocabulary of {config.vocab_size}"
        need = pages_for(count + max_tokens)
        if need > self._pages:
            return (
                f"prompt: {count} tokens and {max_tokens} to generate need {need} cache pages; the engine's "
                f"memory holds {self._pages}; ask for fewer tokens or give the engine more memory"
            )
        return None


def _contained(callback: Callable[[Value], None]) -> Callable[[Value], None]:
    def call(value: Value) -> None:
        try:
            callback(value)
        except Exception:
            logger.exception("a request's callback failed")

    return call


def _strange(tokens: Several[object], vocabulary: int) -> int | None:
    """The place of the first that is no token id of that vocabulary."""
    for place, token in enumerate(tokens):
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary:
            return place
    return None

"""From a stored body to what the engine reads: token ids, and how tokens are chosen. Free of torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from inference.constrain import ConstraintCompiler
from inference.request import SamplingParams
from inference.tokenizer import Tokenizer
from penstock.registry.models import LatencyClass, ModelRelease
from penstock.registry.output_contract import OutputContract
from penstock.serving.forms import agreed_form, form_asked_for

DEFAULT_TEMPERATURE = 1.0  # OpenAI's API reference
AS_THEY_ARE = (
    "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos",
)  # fmt: skip

# The engine's: a lower number is more urgent.
PRIORITIES = {
    LatencyClass.REALTIME: 0,
    LatencyClass.INTERACTIVE: 1,
    LatencyClass.NEARLINE: 2,
    LatencyClass.BATCH: 3,
}


class PromptTokenizer(Protocol):
    """What admission needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@lru_cache(maxsize=16)
def _tokenizer(store_path: str, digest: str) -> Tokenizer:
    return Tokenizer.load(store_path)


def tokenizer_of(release: ModelRelease) -> Tokenizer:
    """The release's tokenizer, kept for the next request. Raises inference.errors.StoreError."""
    return _tokenizer(release.store_path, release.tokenizer_digest)


@lru_cache(maxsize=4)
def _compiler(store_path: str, digest: str) -> ConstraintCompiler:
    tokenizer = _tokenizer(store_path, digest)
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size)


def compiler_of(release: ModelRelease) -> ConstraintCompiler:
    """Tells whether a constraint makes sense for the release. Raises inference.errors.StoreError."""
    return _compiler(release.store_path, release.tokenizer_digest)


def prompt_token_ids(tokenizer: PromptTokenizer, body: Mapping[str, Any]) -> tuple[int, ...]:
    """The prompt of a stored body: its messages through the model's chat template, or its text as it stands.

    Raises inference.errors.TemplateError where the model's template refuses the messages.
    """
    if "messages" in body:
        return tuple(tokenizer.encode_chat(plain_messages(body)))
    return tuple(tokenizer.encode(body["prompt"]))


def embedding_inputs(tokenizer: PromptTokenizer, body: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The token ids of each text of a stored body for embeddings: what it gives as ids stays as it is."""
    given = body["input"]
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    return [tuple(tokenizer.encode(one) if isinstance(one, str) else one) for one in given]


def plain_messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Messages as chat templates know them: the role `developer` is `system`, text parts are joined."""
    return [
        {
            "role": "system" if message["role"] == "developer" else message["role"],
            "content": message["content"]
            if isinstance(message["content"], str)
            else "".join(part["text"] for part in message["content"]),
        }
        for message in body["messages"]
    ]


def sampling_of(body: Mapping[str, Any], request_id: str) -> SamplingParams:
    """How tokens are chosen for a stored body, which `admit` has completed with `max_tokens`.

    Without a seed of its own, a request that samples gets one derived from its identifier: it can be run again.
    Raises inference.errors.InvalidRequest.
    """
    temperature = body.get("temperature")
    temperature = DEFAULT_TEMPERATURE if temperature is None else float(temperature)
    stop = body.get("stop") or ()
    seed = body.get("seed")
    if seed is None and temperature > 0:
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4])
    asked = form_asked_for(body)
    return SamplingParams(
        max_tokens=int(body["max_tokens"]),
        temperature=temperature,
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        top_k=max(0, body.get("top_k") or 0),  # vLLM writes -1 for all
        logit_bias=tuple((int(token), float(bias)) for token, bias in sorted((body.get("logit_bias") or {}).items())),
        logprobs=_logprobs(body),
        n=body.get("n") or 1,
        best_of=body.get("best_of"),
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
        constraint=asked[1] if asked is not None else None,
        **{name: body[name] for name in AS_THEY_ARE if body.get(name) is not None},
    )


def bound_sampling_of(body: Mapping[str, Any], request_id: str, contract: OutputContract) -> SamplingParams:
    """`sampling_of`, with outputs held to the task's contract. Raises InvalidRequest, Rejected."""
    sampling = sampling_of(body, request_id)
    form = agreed_form(form_asked_for(body), contract)
    return sampling if form == sampling.constraint else replace(sampling, constraint=form)


def _logprobs(body: Mapping[str, Any]) -> int | None:
    """How many of the likeliest tokens are told: chat says whether and how many, completions only how many."""
    asked = body.get("logprobs")
    if isinstance(asked, bool):
        return (body.get("top_logprobs") or 0) if asked else None
    return asked

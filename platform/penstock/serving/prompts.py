"""From a stored body to what the engine reads: token ids, and how tokens are chosen. Free of torch."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from inference.request import SamplingParams
from inference.tokenizer import Tokenizer
from penstock.registry.models import LatencyClass, ModelRelease

DEFAULT_TEMPERATURE = 1.0  # OpenAI's API reference
DEFAULT_TOP_P = 1.0

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


def prompt_token_ids(tokenizer: PromptTokenizer, body: Mapping[str, Any]) -> tuple[int, ...]:
    """The prompt of a stored body: its messages through the model's chat template, or its text as it stands.

    Raises inference.errors.TemplateError where the model's template refuses the messages.
    """
    if "messages" in body:
        return tuple(tokenizer.encode_chat(plain_messages(body)))
    return tuple(tokenizer.encode(body["prompt"]))


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
    """
    temperature = body.get("temperature")
    temperature = DEFAULT_TEMPERATURE if temperature is None else float(temperature)
    top_p = body.get("top_p")
    stop = body.get("stop") or ()
    seed = body.get("seed")
    if seed is None and temperature > 0:
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4])
    return SamplingParams(
        max_tokens=int(body["max_tokens"]),
        temperature=temperature,
        top_p=DEFAULT_TOP_P if top_p is None else float(top_p),
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )

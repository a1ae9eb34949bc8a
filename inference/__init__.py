"""Penstock's engine: batches of prompts through a language model, exactly and repeatably.

    from inference import Engine, SamplingParams

    engine = Engine.load("model.gguf")
    for completion in engine.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(completion.text)

Importing this package costs nothing: torch is loaded when `Engine` is first asked for, so that a web process can use
the request types, the tokenizer and the store's manifest without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.engine import Engine
    from inference.request import Completion, Constraint, SamplingParams

__all__ = ["Completion", "Constraint", "Engine", "SamplingParams"]

_HOMES = {
    "Completion": "inference.request",
    "Constraint": "inference.request",
    "Engine": "inference.engine",
    "SamplingParams": "inference.request",
}


def __getattr__(name: str) -> Any:
    """PEP 562: find an exported name in its module on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)

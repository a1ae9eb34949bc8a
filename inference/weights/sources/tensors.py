"""The tensors of a model by our names, and what a source of them must offer.

Names: embedding, final_norm, head, and per layer N `layers.N.` + attention_norm, q, k, v, q_norm, k_norm, o,
attention_post_norm, mlp_norm, gate, up, down, mlp_post_norm; biases are named for what they are added to (q_bias); in a
mixture `router`, and `experts.E.` + gate, up, down. Which of them there are is said by the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from inference.errors import ModelFormatError
from inference.model.config import DecoderConfig
from inference.quant.groupwise import Array, GroupwiseTensor
from inference.quant.rotated import RotatedTensor

Weights = Array | GroupwiseTensor | RotatedTensor
Entry = tuple[str, str, tuple[int, ...]]


class ModelSource(Protocol):
    """A model to import. `load` returns a tensor in the source's own precision, q and k rows in half-rotation order."""

    config: DecoderConfig
    format: str
    licence: str | None
    model_name: str | None

    def plan(self) -> list[Entry]:
        """(store file, tensor name, shape) of every tensor, in store order."""
        ...

    def load(self, name: str, shape: tuple[int, ...]) -> Weights: ...

    def digest(self) -> str: ...

    def tokenizer_files(self) -> dict[str, str]: ...

    def model_files(self) -> dict[str, str]:
        """What else the store must hold to run the model, file name -> content."""
        ...


def tensor_shapes(config: DecoderConfig) -> Iterator[Entry]:
    """(store file, tensor name, shape) of every tensor of a model of that config, in store order."""
    yield "embedding.bin", "embedding", (config.vocab_size, config.hidden_size)
    for layer in range(config.layers):
        file, prefix = f"layer_{layer:03d}.bin", f"layers.{layer}."
        for name, shape in _layer_shapes(config, layer):
            yield file, prefix + name, shape
    yield "head.bin", "final_norm", (config.hidden_size,)
    if config.has_head and not config.tied_embeddings:
        yield "head.bin", "head", (config.vocab_size, config.hidden_size)


def _layer_shapes(config: DecoderConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, experts = config.hidden_size, config.layer(layer).experts
    if config.norms != "post":
        yield "attention_norm", (hidden,)
    for part, size in (("q", config.query_size), ("k", config.kv_size), ("v", config.kv_size)):
        yield part, (size, hidden)
        if config.qkv_bias:
            yield part + "_bias", (size,)
        if part != "v" and config.qk_norm != "none":
            yield part + "_norm", (config.head_dim if config.qk_norm == "head" else size,)
    yield "o", (hidden, config.query_size)
    if config.o_bias:
        yield "o_bias", (hidden,)
    if config.norms != "pre":
        yield "attention_post_norm", (hidden,)
    if config.norms != "post":
        yield "mlp_norm", (hidden,)
    if experts is None:
        yield from _network_shapes("", hidden, config.intermediate_size, config.mlp_bias)
    else:
        yield "router", (experts.count, hidden)
        for expert in range(experts.count):
            yield from _network_shapes(f"experts.{expert}.", hidden, experts.size, False)
    if config.norms != "pre":
        yield "mlp_post_norm", (hidden,)


def _network_shapes(prefix: str, hidden: int, inner: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield prefix + part, shape
        if bias:
            yield f"{prefix}{part}_bias", shape[:1]


def checked_config(path: Path, values: dict[str, Any]) -> DecoderConfig:
    """The configuration of those values; ModelFormatError where they contradict one another."""
    try:
        return DecoderConfig(**values)
    except (TypeError, ValueError) as error:
        raise ModelFormatError(path, "configuration", str(error)) from None


def licence_of_model_card(card: Path) -> str | None:
    """The `license:` line of the front matter of a model card, where there is one."""
    if not card.is_file():
        return None
    lines = card.read_text("utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key.strip() == "license" and value.strip():
            return value.strip().strip("\"'")
    return None

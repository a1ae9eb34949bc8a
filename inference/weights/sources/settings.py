"""A Hugging Face config.json, read key by key: what is missing, of the wrong type or not supported is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inference.errors import ModelFormatError
from inference.model.config import MOST_LAYERS, Activation, RopeScaling

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class Settings:
    """The keys of one model's configuration."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def wrong(self, key: str, message: str) -> ModelFormatError:
        return ModelFormatError(self.file, f"key {key!r}", message)

    def number(self, key: str, default: Any = None) -> Any:
        """A number, or the default where the key is absent or null; without a default it must be there."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, f"is {value!r}; a number is needed")
        return value

    def layers(self, key: str) -> int:
        """How many layers; checked at once, because much is made for each of them."""
        count = self.number(key)
        if not isinstance(count, int) or not 1 <= count <= MOST_LAYERS:
            raise self.wrong(key, f"is {count!r}; a whole number from 1 to {MOST_LAYERS} is needed")
        return count

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    def activation(self, key: str, default: str = "silu") -> Activation:
        name = self.values.get(key) or default
        if name not in _ACTIVATIONS:
            raise self.wrong(key, f"is {name!r}; {', '.join(_ACTIVATIONS)} are read")
        return _ACTIVATIONS[name]

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with an entry a layer, or None where the key is absent."""
        values = self.values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != layers:
            raise self.wrong(key, f"must be a list with one entry for each of {layers} layers")
        return values

    def rope(self, layer_type: str | None = None) -> Mapping[str, Any]:
        """The parameters of rotary embedding, old and new spelling; {} where they are all at their defaults."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise self.wrong("rope_parameters", f"is {rope!r}; an object is needed")
        if layer_type is not None and isinstance(rope.get(layer_type), dict):
            return dict(rope[layer_type])
        return {} if any(isinstance(value, dict) for value in rope.values()) else rope

    def theta(self, default: float = 10000.0, layer_type: str | None = None) -> float:
        return float(self.rope(layer_type).get("rope_theta") or self.values.get("rope_theta") or default)

    def rotary_dim(self, head_dim: int) -> int:
        """Rotated elements of a head where they are not all; 0 where they are."""
        share = self.rope().get("partial_rotary_factor", self.values.get("partial_rotary_factor"))
        rotated = head_dim if share is None else int(head_dim * share)
        return 0 if rotated == head_dim else rotated

    def rope_scaling(self, head_dim: int, layer_type: str | None = None) -> RopeScaling | None:
        rope = self.rope(layer_type)
        kind = rope.get("rope_type", rope.get("type", "default"))
        # `dynamic` changes frequencies beyond max_position_embeddings only, where no sequence of ours goes.
        if kind in ("default", "dynamic", None):
            return None
        longest = self.number("max_position_embeddings")
        original = self.values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        original = int(original or longest)
        factor = rope.get("factor")
        try:
            if kind == "linear":
                return RopeScaling("linear", float(rope["factor"]))
            if kind == "llama3":
                low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
                return RopeScaling("llama3", float(rope["factor"]), low, high, original)
            # Phi-3's first configurations called longrope by yarn's name.
            if kind == "yarn" and "long_factor" not in rope:
                return self._yarn(rope, float(factor or longest / original), original)
            if kind in ("longrope", "su", "yarn"):
                return self._longrope(rope, float(factor or longest / original), original, head_dim)
        except KeyError as error:
            raise self.wrong("rope_parameters", f"lacks {error.args[0]!r}, which {kind!r} needs") from None
        raise self.wrong("rope_type", f"is {kind!r}; default, dynamic, linear, llama3, yarn and longrope are read")

    def _yarn(self, rope: Mapping[str, Any], factor: float, original: int) -> RopeScaling:
        given = rope.get("attention_factor")
        if given is None:
            given = yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
        return RopeScaling(
            "yarn",
            factor,
            original_max_context=original,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=float(given),
        )

    def _longrope(self, rope: Mapping[str, Any], factor: float, original: int, head_dim: int) -> RopeScaling:
        half = (self.rotary_dim(head_dim) or head_dim) // 2
        for key in ("short_factor", "long_factor"):
            if len(rope[key]) != half:
                raise self.wrong(key, f"has {len(rope[key])} entries; one for each of {half} frequencies is needed")
        given = rope.get("attention_factor")
        if given is None:
            given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            "longrope",
            factor,
            original_max_context=original,
            attention_factor=float(given),
            short_factors=tuple(map(float, rope["short_factor"])),
            long_factors=tuple(map(float, rope["long_factor"])),
        )


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What multiplies cosines and sines where the model does not say (arXiv 2309.00071, section 3.4)."""

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)

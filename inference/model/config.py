"""The shape of a decoder, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides the low ones, keeps the high ones, and
    blends between `low_freq_factor` and `high_freq_factor`, measured against `original_max_context`.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer. Sizes in elements; `max_context` in tokens, prompt and output together."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_context < 1:
            raise ValueError(f"max_context must be at least 1, not {self.max_context}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide into {self.kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, not {self.head_dim}")

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DecoderConfig:
        values = dict(data)
        scaling = values.get("rope_scaling")
        values["rope_scaling"] = RopeScaling(**scaling) if scaling else None
        return cls(**values)

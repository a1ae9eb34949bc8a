"""The shape of a decoder, as plain data: one description for all families (docs/models.md lists them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, get_args

Activation = Literal["silu", "gelu_tanh", "gelu"]
RopeKind = Literal["linear", "llama3", "yarn", "longrope", "factors"]
Norms = Literal["pre", "post", "both"]
HeadNorm = Literal["none", "head", "full"]

MOST_LAYERS = 4096
MOST_CONTEXT = 2**24  # tokens: tables of positions are made for all of them
MOST_ELEMENTS = 2**31 - 1  # of any size
_MOST_NUMBER = 1e38  # float32's
NO_ROTATION = -1
FOREIGN = "transformers:"
"""How the architecture's name begins where transformers' own code runs the model; its sizes are then approximate."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides the low ones, keeps the high ones, and
    blends between `low_freq_factor` and `high_freq_factor`, measured against `original_max_context`. `yarn` (arXiv
    2309.00071) blends between `beta_slow` and `beta_fast` rotations. `longrope` (arXiv 2402.13753) divides each
    frequency by its own factor, of `short_factors` for sequences within the original context and of `long_factors` for
    longer ones. `factors` divides each by its own of `short_factors`, whatever the length.
    `attention_factor` multiplies cosines and sines.
    """

    kind: RopeKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _one_of("rope scaling", self.kind, RopeKind)
        _whole("original_max_context", self.original_max_context, 1, MOST_CONTEXT)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _number(name, getattr(self, name), above=0.0)
        for factor in (*self.short_factors, *self.long_factors):
            _number("a rope factor", factor, above=0.0)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the one feed-forward network: `used` of `count`, each of width `size`.

    The router's softmax runs over all experts; `normalized`: the weights of those used are made to add up to 1.
    """

    count: int
    used: int
    size: int
    normalized: bool = True

    def __post_init__(self) -> None:
        for name in ("count", "used", "size"):
            _whole(f"experts: {name}", getattr(self, name), 1, MOST_ELEMENTS)
        if self.used > self.count:
            raise ValueError(f"{self.used} experts cannot be used of {self.count}")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What may differ from layer to layer.

    window: tokens that a row sees, itself among them; 0: all. rope: the rotary table, 0 (global), 1 (local), or
    NO_ROTATION. experts: None in a dense layer.
    """

    window: int
    rope: int
    experts: Experts | None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only transformer. Sizes in elements; `max_context` in tokens, prompt and output together.

    norms: `pre` before attention and feed-forward; `post` on their results, before these are added to the residual
    (OLMo 2); `both` (Gemma 2 and 3). qk_norm: of each head, or of queries and keys in full width, before rotation.
    attention_scale: of the scores, head_dim ** -0.5 unless given. The soft caps squash scores or logits x to
    cap * tanh(x / cap); 0: none. rotary_dim: leading elements of a head that are rotated; 0: all.
    embedding_scale, residual_scale and logit_scale multiply the embedding, what each half of a layer adds, and the
    logits. windows, ropes and expert_layers have one entry a layer, or none where all layers are alike.
    has_head: False for a base model, which gives embeddings and no tokens.
    """

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
    activation: Activation = "silu"
    norms: Norms = "pre"
    qk_norm: HeadNorm = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    rotary_dim: int = 0
    local_rope_theta: float | None = None
    windows: tuple[int, ...] = ()
    ropes: tuple[int, ...] = ()
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()
    has_head: bool = True

    def __post_init__(self) -> None:
        """ValueError, naming the field: the values come out of files, and compiled kernels believe them."""
        if not isinstance(self.architecture, str):
            raise ValueError(f"architecture must be a text, not {self.architecture!r}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim"):
            _whole(name, getattr(self, name), 1, MOST_ELEMENTS)
        _whole("layers", self.layers, 1, MOST_LAYERS)
        _whole("max_context", self.max_context, 1, MOST_CONTEXT)
        _whole("rotary_dim", self.rotary_dim, 0, self.head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads do not divide into {self.kv_heads} key-value heads")
        if self.head_dim % 2 or self.rotary_dim % 2:
            raise ValueError(f"rotation needs even sizes, not head_dim {self.head_dim}, rotary_dim {self.rotary_dim}")
        for name, kinds in (("activation", Activation), ("norms", Norms), ("qk_norm", HeadNorm)):
            _one_of(name, getattr(self, name), kinds)
        for name, above in (
            ("rope_theta", 1.0),
            ("rms_norm_eps", 0.0),
            ("local_rope_theta", 1.0),
            ("attention_scale", 0.0),
        ):
            if name in ("rope_theta", "rms_norm_eps") or getattr(self, name) is not None:
                _number(name, getattr(self, name), above=above)
        for name in ("embedding_scale", "residual_scale", "logit_scale"):
            _number(name, getattr(self, name))
        for name in ("attention_softcap", "logit_softcap"):
            if getattr(self, name) != 0:
                _number(name, getattr(self, name), above=0.0)
        for name in ("windows", "ropes", "expert_layers"):
            if len(getattr(self, name)) not in (0, self.layers):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.layers} layers")
        for window in self.windows:
            _whole("a window", window, 0, MOST_CONTEXT)
        for rope in self.ropes:
            _whole("a layer's rope", rope, NO_ROTATION, 0 if self.local_rope_theta is None else 1)
        self._check_rope_factors()

    def _check_rope_factors(self) -> None:
        scaling, half = self.rope_scaling, self.rotated // 2
        if scaling is None or scaling.kind not in ("longrope", "factors"):
            return
        lists = [scaling.short_factors, scaling.long_factors] if scaling.kind == "longrope" else [scaling.short_factors]
        for factors in lists:
            if len(factors) != half:
                raise ValueError(f"{len(factors)} rope factors; one for each of {half} frequencies is needed")

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

    @property
    def is_foreign(self) -> bool:
        """Whether transformers' own code runs the model."""
        return self.architecture.startswith(FOREIGN)

    @property
    def query_scale(self) -> float:
        """What multiplies the scores of attention."""
        return float(self.head_dim**-0.5) if self.attention_scale is None else self.attention_scale

    @property
    def rotated(self) -> int:
        """Leading elements of a head that are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def has_long_context(self) -> bool:
        """Whether rotation differs for sequences that outgrow the original context."""
        scaling = self.rope_scaling
        return scaling is not None and scaling.kind == "longrope" and scaling.original_max_context < self.max_context

    def rotation_offset(self, tokens: int) -> int:
        """Where the rotary tables of a sequence begin that may come to that many tokens (see RotaryTable).

        Told from the most it may come to, and so the same from its first token to its last.
        """
        outgrows = self.rope_scaling is not None and tokens > self.rope_scaling.original_max_context
        return self.max_context if self.has_long_context and outgrows else 0

    def layer(self, index: int) -> LayerShape:
        """What layer `index` looks like."""
        return LayerShape(
            window=self.windows[index] if self.windows else 0,
            rope=self.ropes[index] if self.ropes else 0,
            experts=self.experts if not self.expert_layers or self.expert_layers[index] else None,
        )

    @property
    def widest(self) -> int:
        """Elements of the widest row within a feed-forward network."""
        used = 0 if self.experts is None else self.experts.size
        return max(self.intermediate_size, used)

    def as_dict(self) -> dict[str, Any]:
        """Plain data. What is at its default is left out, so that a new field changes no older model's digest."""
        values = {key: value for key, value in asdict(self).items() if key in _ALWAYS or value != _DEFAULTS[key]}
        if self.rope_scaling is not None:
            values["rope_scaling"] = _changed(asdict(self.rope_scaling))
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DecoderConfig:
        values = dict(data)
        scaling, experts = values.get("rope_scaling"), values.get("experts")
        values["rope_scaling"] = RopeScaling(**{key: _frozen(v) for key, v in scaling.items()}) if scaling else None
        if experts:
            values["experts"] = Experts(**experts)
        return cls(**{key: _frozen(value) for key, value in values.items()})


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")


def _number(name: str, value: Any, above: float = -_MOST_NUMBER) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < _MOST_NUMBER:
        least = "" if above < 0 else f" above {above:g}"
        raise ValueError(f"{name} must be a finite number{least}, not {value!r}")


def _one_of(name: str, value: Any, kinds: Any) -> None:
    if value not in get_args(kinds):
        raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, not {value!r}")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _changed(scaling: dict[str, Any]) -> dict[str, Any]:
    """The first version wrote the first five fields always, and knew of no others."""
    first = ("kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_context")
    defaults = {field.name: field.default for field in fields(RopeScaling)}
    return {key: value for key, value in scaling.items() if key in first or value != defaults[key]}


_DEFAULTS = {field.name: field.default for field in fields(DecoderConfig)}
_ALWAYS = {name for name, default in _DEFAULTS.items() if default is MISSING} | {"rope_scaling"}

"""The tensors of a model by our names, and their shapes.

Names: embedding, final_norm, head, and per layer N `layers.N.` + attention_norm, q, k, v, q_norm, k_norm, o,
attention_post_norm, mlp_norm, gate, up, down, mlp_post_norm; biases are named for what they are added to (q_bias); in a
mixture `router`, and `experts.E.` + gate, up, down. Which of them there are is said by the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from inference.model.config import DecoderConfig

Entry = tuple[str, str, tuple[int, ...]]


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

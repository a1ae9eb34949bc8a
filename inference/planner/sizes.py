"""How large a model's parts are in the form that the kernels compute with, told from its store before it is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inference.kernels.base import CacheKind, page_head_bytes
from inference.memory.direct import aligned
from inference.model.config import DecoderConfig
from inference.model.layers import LayerReader


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes. layers: of each layer's matrices; head: of the head's, 0 without one; embedding: of its table as stored;
    small: of all norms, biases and routers, which are never streamed.
    """

    config: DecoderConfig
    layers: tuple[int, ...]
    head: int
    embedding: int
    small: int

    @classmethod
    def of(cls, parts: LayerReader) -> ModelSizes:
        config = parts.config
        layers = tuple(_bytes(parts, parts.products(index)) for index in range(config.layers))
        head = _bytes(parts, {"head": parts.head_product()}) if config.has_head else 0
        tensors = parts.reader.manifest.tensors
        small = sum(4 * math.prod(t.shape) for t in tensors if len(t.shape) == 1 or t.name.endswith(".router"))
        table = parts.reader.manifest.tensor("embedding")
        # Scales and minima of quantized tables are widened to float32 in memory.
        embedding = sum(part.bytes * (1 if part.role == "values" else 2) for part in table.parts)
        return cls(config, layers, head, embedding, small)

    @property
    def weights(self) -> int:
        """All that can be streamed."""
        return sum(self.layers) + self.head

    def page_of_layer(self, kind: CacheKind) -> int:
        """One page of one layer of the key-value cache."""
        return self.config.kv_heads * page_head_bytes(kind, self.config.head_dim)

    def workspace(self, max_batch: int, token_budget: int, rows_at_once: int | None) -> int:
        """Activations of the largest step: the residual stream, what attention takes and gives, a feed-forward network
        of as many rows as go through it at once, and logits of the whole batch; as much again for gaps, since
        freed pieces are kept for others of other sizes.
        """
        config = self.config
        rows = max(max_batch, token_budget)
        attention = 2 * (config.query_size + 2 * config.kv_size) + 2 * config.query_size
        network = min(rows, rows_at_once or rows) * 3 * config.widest
        floats = rows * (4 * config.hidden_size + attention) + network + max_batch * config.vocab_size
        return 8 * floats


def _bytes(parts: LayerReader, products: dict[str, tuple[tuple[str, ...], float]]) -> int:
    # An image keeps each of a product's few arrays at whole pages.
    return sum(aligned(parts.nbytes(names)) + 4 * aligned(1) for names, _ in products.values())

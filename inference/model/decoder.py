"""The decoder of all families that DecoderConfig describes, over a flat batch of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from inference.errors import StoreError
from inference.kernels.base import (
    Kernels,
    KeyValueCache,
    Likeliest,
    Linear,
    Part,
    PickingLinear,
    Rows,
    StepPages,
    joined,
)
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig, LayerShape
from inference.model.embedding import Embedding
from inference.model.feed_forward import Affine, ExpertMixture, FeedForward, GatedNetwork, Wrap
from inference.quant.rotated import RotatedTensor, stacked
from inference.weights.store import StoreReader


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; q, k and v are one matrix. Norms that the family has not got are None."""

    shape: LayerShape
    attention_norm: torch.Tensor | None  # [H]
    qkv: Affine  # H -> (heads + 2 kv_heads) * D
    q_norm: torch.Tensor | None  # [D] or [heads * D]
    k_norm: torch.Tensor | None  # [D] or [kv_heads * D]
    o: Affine  # heads * D -> H
    attention_post_norm: torch.Tensor | None  # [H]
    mlp_norm: torch.Tensor | None  # [H]
    feed_forward: FeedForward  # H -> H
    mlp_post_norm: torch.Tensor | None  # [H]

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.o.nbytes + self.feed_forward.nbytes

    def wrapped(self, prefix: str, wrap: Wrap) -> DecoderLayer:
        """The same layer with `wrap(name, product)` in each product's place; its name is its first matrix's."""
        return replace(
            self,
            qkv=self.qkv.wrapped(prefix + "q", wrap),
            o=self.o.wrapped(prefix + "o", wrap),
            feed_forward=self.feed_forward.wrapped(prefix, wrap),
        )

    def linears(self) -> dict[str, Linear]:
        """The layer's products, by names of their own. All else that it has is small."""
        return {"qkv": self.qkv.linear, "o": self.o.linear, **self.feed_forward.linears()}

    def with_linears(self, linears: Mapping[str, Linear]) -> DecoderLayer:
        """The same layer with other products of those names."""
        return replace(
            self,
            qkv=self.qkv.over(linears["qkv"]),
            o=self.o.over(linears["o"]),
            feed_forward=self.feed_forward.with_linears(linears),
        )


class _LayerReader:
    """Makes layers of a store's tensors."""

    def __init__(self, reader: StoreReader, kernels: Kernels) -> None:
        self.reader = reader
        self.config = reader.manifest.config
        self.kernels = kernels

    def vector(self, name: str) -> torch.Tensor | None:
        return torch.from_numpy(self.reader.float32(name)) if name in self.reader else None

    def linear(self, *names: str, factor: float = 1.0) -> Linear:
        stored = [self.reader.tensor(name) for name in names]
        rotated = [tensor for tensor in stored if isinstance(tensor, RotatedTensor)]
        if len(rotated) == len(stored) and (whole := stacked(rotated, factor)) is not None:
            return self.kernels.linear(names[0], whole)
        parts = [torch.from_numpy(self.reader.float32(name)) for name in names]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.kernels.linear(names[0], weight if factor == 1.0 else weight * factor)

    def affine(self, *names: str, factor: float = 1.0) -> Affine:
        """Matrices stacked by rows, with their biases where the store has these; both multiplied by the factor."""
        biases = [bias for name in names if (bias := self.vector(name + "_bias")) is not None]
        return Affine(self.linear(*names, factor=factor), torch.cat(biases) * factor if biases else None)

    def layer(self, index: int) -> DecoderLayer:
        prefix, shape = f"layers.{index}.", self.config.layer(index)
        # What multiplies a half's result goes into its last matrix.
        factor = self.config.residual_scale

        def network(prefix: str) -> GatedNetwork:
            return GatedNetwork(
                self.affine(prefix + "gate", prefix + "up"), self.affine(prefix + "down", factor=factor)
            )

        feed_forward: FeedForward
        if shape.experts is None:
            feed_forward = network(prefix)
        else:
            router = torch.from_numpy(self.reader.float32(prefix + "router"))
            experts = tuple(network(f"{prefix}experts.{expert}.") for expert in range(shape.experts.count))
            feed_forward = ExpertMixture(router, experts, shape.experts)
        return DecoderLayer(
            shape=shape,
            attention_norm=self.vector(prefix + "attention_norm"),
            qkv=self.affine(prefix + "q", prefix + "k", prefix + "v"),
            q_norm=self.vector(prefix + "q_norm"),
            k_norm=self.vector(prefix + "k_norm"),
            o=self.affine(prefix + "o", factor=factor),
            attention_post_norm=self.vector(prefix + "attention_post_norm"),
            mlp_norm=self.vector(prefix + "mlp_norm"),
            feed_forward=feed_forward,
            mlp_post_norm=self.vector(prefix + "mlp_post_norm"),
        )


class Decoder:
    """A model in memory, ready to run steps. The residual stream is float32 whatever the products compute in."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Embedding,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        head: Linear | None,
        kernels: Kernels,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head

    @classmethod
    def load(cls, store: Path, kernels: Kernels) -> Decoder:
        """Read a store's weights and prepare them for the kernels' arithmetic. Raises StoreError, QuantizationError."""
        reader = StoreReader(store)
        config = reader.manifest.config
        parts = _LayerReader(reader, kernels)
        layers = [parts.layer(index) for index in range(config.layers)]
        head = None
        if config.has_head:
            head = parts.linear("embedding" if config.tied_embeddings else "head", factor=config.logit_scale)
        final_norm = torch.from_numpy(reader.float32("final_norm"))
        return cls(config, Embedding(reader), layers, final_norm, head, kernels)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold in memory."""
        return self.layer_nbytes + self.head_nbytes + self._embedding.nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of all layers' matrices, which every step reads (of a mixture's, those of the experts chosen)."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def head_nbytes(self) -> int:
        """Bytes of the head, which a step reads where logits are wanted."""
        return 0 if self._head is None else self._head.nbytes

    def wrap_products(self, wrap: Wrap) -> None:
        """Put `wrap(name, product)` in the place of each product of the layers, in order: to observe its input."""
        self._layers = [layer.wrapped(f"layers.{index}.", wrap) for index, layer in enumerate(self._layers)]

    def forward(self, batch: StepBatch, cache: KeyValueCache, between_layers: Callable[[], None] | None = None) -> Rows:
        """Compute a step: keys and values of its rows go into the cache; returns logits of `batch.logit_rows`.

        between_layers is called before each layer, and may itself run a step of other sequences.
        Logits: float32 [L, vocab], to be multiplied by the scales [L] where those are not None. StoreError where the
        model has no head.
        """
        if self._head is None:
            raise StoreError(self.config.architecture, "has no head: it gives embeddings, and generates no tokens")
        x = self._run(batch, cache, between_layers)
        rows = self.kernels.norm(x[batch.logit_rows], self._final_norm)
        logits = self._head(rows)
        if self.config.logit_softcap:
            return Rows(self.kernels.soft_cap(logits, rows.scales, self.config.logit_softcap), None)
        return Rows(logits, rows.scales)

    @property
    def picks(self) -> bool:
        """Whether `likeliest` can be had."""
        return isinstance(self._head, PickingLinear) and not self.config.logit_softcap

    def likeliest(
        self, batch: StepBatch, cache: KeyValueCache, between_layers: Callable[[], None] | None = None
    ) -> Likeliest:
        """`forward`, but only the highest logit of each row: the logits themselves are never written to memory."""
        if not isinstance(self._head, PickingLinear):
            raise StoreError(self.config.architecture, "has a head that gives all logits or none")
        x = self._run(batch, cache, between_layers)
        return self._head.highest(self.kernels.norm(x[batch.logit_rows], self._final_norm))

    def states(self, batch: StepBatch, cache: KeyValueCache) -> torch.Tensor:
        """Compute a step; returns the last layer's states of all rows, normed: float32 [M, H]. For embeddings."""
        return self.kernels.norm_exact(self._run(batch, cache), self._final_norm)

    def _run(
        self, batch: StepBatch, cache: KeyValueCache, between_layers: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """The residual stream after the last layer, float32 [M, H]."""
        with cache.step(batch) as pages:
            return self._states(batch, pages, between_layers)

    def _states(
        self, batch: StepBatch, pages: StepPages, between_layers: Callable[[], None] | None = None
    ) -> torch.Tensor:
        kernels = self.kernels
        x = self._embedding(batch.token_ids)  # float32 [M, H]
        if self.config.embedding_scale != 1.0:
            x.mul_(self.config.embedding_scale)
        rows = kernels.norm(x, self._layers[0].attention_norm)
        for index, layer in enumerate(self._layers):
            if between_layers is not None:
                between_layers()
            y, scales = layer.qkv(rows)
            y, scales = layer.o(self._attended(layer, y, scales, pages.parts(index)))
            rows = kernels.add_norm(x, y, scales, layer.mlp_norm, post=layer.attention_post_norm)
            y, scales = layer.feed_forward(rows, x, layer.mlp_norm, kernels)
            if index + 1 < len(self._layers):
                following = self._layers[index + 1].attention_norm
                rows = kernels.add_norm(x, y, scales, following, post=layer.mlp_post_norm)
            else:
                kernels.add(x, y, scales, post=layer.mlp_post_norm)
        return x

    def _attended(
        self, layer: DecoderLayer, y: torch.Tensor, scales: torch.Tensor | None, parts: Iterator[Part]
    ) -> Rows:
        """Attention of queries, keys and values as `layer.qkv` gives them: [M, heads * head_dim]."""
        kernels, shape = self.kernels, layer.shape
        attended: list[Rows] = []
        for part in parts:
            q = kernels.rotate_and_store(
                y[part.rows],
                scales[part.rows] if scales is not None else None,
                part.batch,
                part.layer,
                rope=shape.rope,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
            )
            attended.append(kernels.attend(q, part.batch, part.layer, window=shape.window))
        return joined(attended)

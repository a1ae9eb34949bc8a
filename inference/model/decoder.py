"""The decoder of all families that DecoderConfig describes, over a flat batch of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from inference.device.memory import finish
from inference.device.weights import DeviceWeights
from inference.errors import StatesBroken, StoreError
from inference.kernels.base import (
    Between,
    Kernels,
    KeyValueCache,
    Likeliest,
    PagesInMemory,
    Part,
    PickingLinear,
    Rows,
    StepPages,
    joined,
)
from inference.memory.placement import Placement
from inference.memory.ring import StreamStats
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig
from inference.model.embedding import NAME as EMBEDDING
from inference.model.embedding import Embedding, StreamedEmbedding, TokenEmbedding
from inference.model.feed_forward import Wrap
from inference.model.layers import AllLayers, DecoderLayer, KernelsForAllLayers, LayerReader
from inference.model.residency import StreamedWeights, Weights, WeightsInMemory, layer_image
from inference.weights.store import StoreReader


class Decoder:
    """A model ready to run steps. The residual stream is float32 whatever the products compute in."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: TokenEmbedding,
        weights: Weights,
        final_norm: torch.Tensor,
        kernels: Kernels,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self._embedding = embedding
        self._weights = weights
        self._final_norm = final_norm
        self._together = self._find_together()

    @classmethod
    def load(
        cls, store: Path, kernels: Kernels, placement: Placement | None = None, images: Path | None = None
    ) -> Decoder:
        """Read a store's weights and prepare them for the kernels' arithmetic.

        placement: what stays in memory; None: all. What does not is read from the store's layer image, which is made
        first where there is none; images: the folder of images, by default as `images_folder` says.
        Raises StoreError, QuantizationError, MemoryError; ValueError for a placement that cannot work.
        """
        reader = StoreReader(store)
        parts = LayerReader(reader, kernels)
        weights: Weights
        if placement is None or not placement.streams(parts.config.layers, head=parts.config.has_head):
            weights = WeightsInMemory.read(parts)
        elif placement.device is not None:
            weights = DeviceWeights(parts, layer_image(parts, images), placement)
        else:
            weights = StreamedWeights(parts, layer_image(parts, images), placement)
        embedding: TokenEmbedding
        if placement is None or placement.embedding_pinned:
            embedding = Embedding(reader.tensor(EMBEDDING), kernels.device)
        else:
            embedding = StreamedEmbedding(reader)
        return cls(parts.config, embedding, weights, parts.small("final_norm"), kernels)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weights hold, and the buffers that they are streamed through."""
        return self._weights.nbytes + self._embedding.nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of all layers' matrices, which every step reads (of a mixture's, those of the experts chosen)."""
        return sum(layer.nbytes for layer in self._weights.layers)

    @property
    def head_nbytes(self) -> int:
        """Bytes of the head, which a step reads where logits are wanted."""
        return 0 if self._weights.head is None else self._weights.head.nbytes

    @property
    def nests(self) -> bool:
        """Whether a step may be computed within another."""
        return not self._weights.streams

    def stream_stats(self) -> StreamStats | None:
        """What has been read from disk while computing; None where nothing is."""
        return self._weights.stream_stats()

    def close(self) -> None:
        """Read no more from disk. Only for a model whose steps have ended; it is of no use after."""
        self._weights.close()

    def wrap_products(self, wrap: Wrap) -> None:
        """Put `wrap(name, product)` in the place of each product of the layers, in order: to observe its input.

        StoreError where layers are streamed.
        """
        if self._weights.streams:
            raise StoreError(self.config.architecture, "has layers on disk, which none can observe; allow more memory")
        layers = self._weights.layers
        layers[:] = [layer.wrapped(f"layers.{index}.", wrap) for index, layer in enumerate(layers)]
        self._together = self._find_together()

    def _find_together(self) -> AllLayers | None:
        kernels = self.kernels
        if self._weights.streams or not isinstance(kernels, KernelsForAllLayers):
            return None
        return kernels.together(self._weights.layers)

    def forward(self, batch: StepBatch, cache: KeyValueCache, between: Between | None = None) -> Rows:
        """Compute a step: keys and values of its rows go into the cache; returns logits of `batch.logit_rows`.

        between: called before layers, and may itself run a step of other sequences where `nests`.
        Logits: float32 [L, vocab], to be multiplied by the scales [L] where those are not None. StoreError where the
        model has no head, or a part of it cannot be read. StatesBroken where segments that want no logits have come to
        NaN or infinity.
        """
        if self._weights.head is None:
            raise StoreError(self.config.architecture, "has no head: it gives embeddings, and generates no tokens")
        wanted = len(batch.logit_rows) > 0
        batch = batch.on(self.kernels.device)
        with self._weights.step(head=wanted):
            x = self._sane(batch, self._run(batch, cache, between))
            if not wanted:
                finish(self.kernels.device)
                return Rows(torch.empty((0, self.config.vocab_size)), None)
            rows = self.kernels.norm(x[batch.logit_rows], self._final_norm)
            with self._weights.for_head() as head:
                logits = head(rows)
        if self.config.logit_softcap:
            return Rows(self.kernels.soft_cap(logits, rows.scales, self.config.logit_softcap).cpu(), None)
        return Rows(logits.cpu(), None if rows.scales is None else rows.scales.cpu())

    @property
    def picks(self) -> bool:
        """Whether `likeliest` can be had."""
        picks = isinstance(self._weights.head, PickingLinear) or self.kernels.device.type != "cpu"
        return picks and not self.config.logit_softcap

    def likeliest(self, batch: StepBatch, cache: KeyValueCache, between: Between | None = None) -> Likeliest:
        """`forward`, but only the highest logit of each row: the logits themselves are never written to memory."""
        batch = batch.on(self.kernels.device)
        with self._weights.step(head=True):
            x = self._sane(batch, self._run(batch, cache, between))
            with self._weights.for_head() as head:
                rows = self.kernels.norm(x[batch.logit_rows], self._final_norm)
                if isinstance(head, PickingLinear):
                    return head.highest(rows)
                # Where the logits lie on a device, they are too many to be brought from there.
                tops, tokens = head(rows).max(dim=1)
                return Likeliest(tokens.cpu(), tops.cpu(), None if rows.scales is None else rows.scales.cpu())

    def states(self, batch: StepBatch, cache: KeyValueCache) -> torch.Tensor:
        """Compute a step; returns the last layer's states of all rows, normed: float32 [M, H]. For embeddings."""
        batch = batch.on(self.kernels.device)
        with self._weights.step(head=False):
            return self.kernels.norm_exact(self._run(batch, cache), self._final_norm).cpu()

    def _run(self, batch: StepBatch, cache: KeyValueCache, between: Between | None = None) -> torch.Tensor:
        """The residual stream after the last layer, float32 [M, H]."""
        with cache.step(batch) as pages:
            return self._states(batch, pages, between)

    def _sane(self, batch: StepBatch, x: torch.Tensor) -> torch.Tensor:
        """x, float32 [M, H]. A segment's last row has seen all before it; where it yields a token, that will tell."""
        if len(batch.logit_rows) < len(batch.lengths):
            ends = batch.segment_starts[1:].long() - 1
            unfinished = torch.nonzero(torch.isin(ends, batch.logit_rows, invert=True))[:, 0]
            broken = unfinished[~torch.isfinite(x[ends[unfinished]]).all(dim=1)]
            if len(broken):
                raise StatesBroken(broken.tolist())
        return x

    def _states(self, batch: StepBatch, pages: StepPages, between: Between | None = None) -> torch.Tensor:
        kernels, layers = self.kernels, self._weights.layers
        x = self._embedding(batch.token_ids)  # float32 [M, H]
        if self.config.embedding_scale != 1.0:
            x.mul_(self.config.embedding_scale)
        if self._together is not None and isinstance(pages, PagesInMemory):
            self._together(x, batch, pages.layers, between)
            return x
        rows = kernels.norm(x, layers[0].attention_norm)
        for index, layer in enumerate(self._weights.in_order()):
            if between is not None:
                between.call()
            y, scales = layer.qkv(rows)
            y, scales = layer.o(self._attended(layer, y, scales, pages.parts(index)))
            rows = kernels.add_norm(x, y, scales, layer.mlp_norm, post=layer.attention_post_norm)
            y, scales = layer.feed_forward(rows, x, layer.mlp_norm, kernels)
            if index + 1 < len(layers):
                following = layers[index + 1].attention_norm
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

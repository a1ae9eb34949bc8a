"""The Llama family's decoder, over a flat batch of rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from inference.kernels.base import Compute, Kernels, KeyValueCache, Rows
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig
from inference.model.embedding import Embedding
from inference.model.linear import Linear, make_linear
from inference.weights.store import StoreReader


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; q, k and v are one matrix, gate and up another."""

    attention_norm: torch.Tensor  # [H]
    qkv: Linear  # H -> (heads + 2 kv_heads) * D
    o: Linear  # heads * D -> H
    mlp_norm: torch.Tensor  # [H]
    gate_up: Linear  # H -> 2 I
    down: Linear  # I -> H


class Decoder:
    """A model in memory, ready to run steps. The residual stream is float32 whatever the products compute in."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Embedding,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        head: Linear,
        kernels: Kernels,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head

    @classmethod
    def load(cls, store: Path, compute: Compute, kernels: Kernels) -> Decoder:
        """Read a store's weights and prepare them for that arithmetic. Raises StoreError, QuantizationError."""
        reader = StoreReader(store)
        config = reader.manifest.config

        def matrix(*names: str) -> Linear:
            parts = [torch.from_numpy(reader.float32(name)) for name in names]
            return make_linear(names[0], parts[0] if len(parts) == 1 else torch.cat(parts), compute)

        def vector(name: str) -> torch.Tensor:
            return torch.from_numpy(reader.float32(name))

        layers = [
            DecoderLayer(
                attention_norm=vector(f"layers.{n}.attention_norm"),
                qkv=matrix(f"layers.{n}.q", f"layers.{n}.k", f"layers.{n}.v"),
                o=matrix(f"layers.{n}.o"),
                mlp_norm=vector(f"layers.{n}.mlp_norm"),
                gate_up=matrix(f"layers.{n}.gate", f"layers.{n}.up"),
                down=matrix(f"layers.{n}.down"),
            )
            for n in range(config.layers)
        ]
        head = matrix("embedding" if config.tied_embeddings else "head")
        return cls(config, Embedding(reader), layers, vector("final_norm"), head, kernels)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights hold in memory."""
        matrices = sum(
            part.nbytes for layer in self._layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        return matrices + self._head.nbytes + self._embedding.nbytes

    def forward(self, batch: StepBatch, cache: KeyValueCache) -> Rows:
        """Compute a step: keys and values of its rows go into the cache; returns logits of `batch.logit_rows`.

        Logits: float32 [L, vocab], to be multiplied by the scales [L] where those are not None.
        """
        kernels = self.kernels
        x = self._embedding(batch.token_ids)  # float32 [M, H]
        rows = kernels.norm(x, self._layers[0].attention_norm)
        for index, layer in enumerate(self._layers):
            pages = cache.layers[index]
            q = kernels.rotate_and_store(layer.qkv(rows), rows.scales, batch, pages)
            rows = kernels.attend(q, batch, pages)
            rows = kernels.add_norm(x, layer.o(rows), rows.scales, layer.mlp_norm)
            rows = kernels.silu_mul(layer.gate_up(rows), rows.scales)
            y = layer.down(rows)
            if index + 1 < len(self._layers):
                rows = kernels.add_norm(x, y, rows.scales, self._layers[index + 1].attention_norm)
            else:
                kernels.add(x, y, rows.scales)
        rows = kernels.norm(x[batch.logit_rows], self._final_norm)
        return Rows(self._head(rows), rows.scales)

"""A decoder's layers, and how they are made of a store's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from inference.kernels.base import Between, Kernels, LayerCache, Linear
from inference.memory.allocation import give_back_freed_memory
from inference.model.batch import StepBatch
from inference.model.config import LayerShape
from inference.model.feed_forward import Affine, ExpertMixture, FeedForward, GatedNetwork, Wrap
from inference.quant.groupwise import GroupwiseTensor, stacked_groups
from inference.quant.rotated import ENCODING as ROTATED
from inference.quant.rotated import RotatedTensor, stacked
from inference.weights.store import StoreReader

HEAD = "head"
"""The head's name among a model's units, and that of its one matrix."""
# Larger matrices are unpacked and laid out some rows at a time, so that little memory is needed for it.
PIECE_WEIGHTS = 4 * 1024 * 1024
# Of panels, tiles and blocks of whichever kernels: pieces of so many rows lie behind one another as the whole would.
PIECE_ROWS = 64


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


class AllLayers(Protocol):
    """Layers that are computed in one go."""

    def __call__(
        self, x: torch.Tensor, batch: StepBatch, caches: Sequence[LayerCache], between: Between | None = None
    ) -> None:
        """The residual stream x, float32 [M, H], becomes that after the last layer, in place."""
        ...


@runtime_checkable
class KernelsForAllLayers(Protocol):
    """Kernels that compute many layers without coming back to Python."""

    def together(self, layers: Sequence[DecoderLayer]) -> AllLayers | None:
        """For layers whose weights stay where they are; None where it has to be layer by layer."""
        ...


def unit_name(index: int) -> str:
    """A layer's name among a model's units."""
    return f"layers.{index}"


class LayerReader:
    """Makes layers of a store's tensors."""

    def __init__(self, reader: StoreReader, kernels: Kernels) -> None:
        self.reader = reader
        self.config = reader.manifest.config
        self.kernels = kernels

    def vector(self, name: str) -> torch.Tensor | None:
        return self.small(name) if name in self.reader else None

    def small(self, name: str) -> torch.Tensor:
        """A tensor that is never streamed, float32, where the kernels compute."""
        return torch.from_numpy(self.reader.float32(name)).to(self.kernels.device)

    def pieces(self, *names: str, factor: float = 1.0) -> list[Linear]:
        """Matrices stacked by rows and multiplied by the factor, some rows at a time: one product or more."""
        stored = [self.reader.tensor(name) for name in names]
        rotated = [tensor for tensor in stored if isinstance(tensor, RotatedTensor)]
        if len(rotated) == len(stored) and (whole := stacked(rotated, factor)) is not None:
            return [self.kernels.linear(names[0], whole)]
        grouped = [tensor for tensor in stored if isinstance(tensor, GroupwiseTensor)]
        if len(grouped) == len(stored) and all(map(self.kernels.takes, grouped)):
            one = stacked_groups(grouped, factor)
            if one is not None and self.kernels.takes(one):
                return [self.kernels.linear(names[0], one)]
        made: list[Linear] = []
        waiting: list[torch.Tensor] = []
        columns = self.reader.entry(names[0]).shape[1]
        at_once = max(1, PIECE_WEIGHTS // columns // PIECE_ROWS) * PIECE_ROWS
        total = sum(self.reader.entry(name).shape[0] for name in names)
        for name in names:
            rows = self.reader.entry(name).shape[0]
            start = 0
            while start < rows:
                count = min(at_once - sum(map(len, waiting)), rows - start)
                part = torch.from_numpy(self.reader.float32(name, slice(start, start + count)))
                waiting.append(part if factor == 1.0 else part * factor)
                start, total = start + count, total - count
                if not total or sum(map(len, waiting)) == at_once:
                    made.append(self.kernels.linear(names[0], waiting[0] if len(waiting) == 1 else torch.cat(waiting)))
                    waiting.clear()
                    if total:
                        del part
                        give_back_freed_memory()  # gaps between what stays grow with every piece otherwise
        return made

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes that `linear` of these will hold, told from the manifest."""
        entries = [self.reader.entry(name) for name in names]
        outputs, inputs = sum(entry.shape[0] for entry in entries), entries[0].shape[1]
        kinds = {(entry.encoding, entry.group_size) for entry in entries}
        encoding, group = kinds.pop() if len(kinds) == 1 else ("", 0)
        return self.kernels.linear_nbytes(
            outputs,
            inputs,
            rotated_group=group if encoding == ROTATED else 0,
            int4_group=group if encoding == "int4" else 0,
        )

    def linear(self, *names: str, factor: float = 1.0) -> Linear:
        """`pieces` as one product."""
        first, *others = self.pieces(*names, factor=factor)
        if not others:
            return first
        parts = [first.arrays(), *(other.arrays() for other in others)]
        return first.over({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def products(self, index: int) -> dict[str, tuple[tuple[str, ...], float]]:
        """Of which tensors, and times what, a layer's matrices are, by the names of `DecoderLayer.linears`."""
        prefix, experts = f"layers.{index}.", self.config.layer(index).experts
        # What multiplies a half's result goes into its last matrix.
        factor = self.config.residual_scale
        made: dict[str, tuple[tuple[str, ...], float]] = {
            "qkv": ((prefix + "q", prefix + "k", prefix + "v"), 1.0),
            "o": ((prefix + "o",), factor),
        }
        networks = [""] if experts is None else [f"experts.{expert}." for expert in range(experts.count)]
        for network in networks:
            made[network + "gate_up"] = (prefix + network + "gate", prefix + network + "up"), 1.0
            made[network + "down"] = (prefix + network + "down",), factor
        return made

    def head_product(self) -> tuple[tuple[str, ...], float]:
        """The same of the head."""
        return ("embedding" if self.config.tied_embeddings else "head",), self.config.logit_scale

    def layer(self, index: int, linears: Mapping[str, Linear] | None = None) -> DecoderLayer:
        """A layer with these products, or (None) with products of its own that are made now."""
        prefix, shape = f"layers.{index}.", self.config.layer(index)
        products = self.products(index)

        def affine(key: str) -> Affine:
            names, factor = products[key]
            biases = [bias for name in names if (bias := self.vector(name + "_bias")) is not None]
            linear = self.linear(*names, factor=factor) if linears is None else linears[key]
            return Affine(linear, torch.cat(biases) * factor if biases else None)

        def network(prefix: str) -> GatedNetwork:
            return GatedNetwork(affine(prefix + "gate_up"), affine(prefix + "down"))

        feed_forward: FeedForward
        if shape.experts is None:
            feed_forward = network("")
        else:
            router = self.small(prefix + "router")
            experts = tuple(network(f"experts.{expert}.") for expert in range(shape.experts.count))
            feed_forward = ExpertMixture(router, experts, shape.experts)
        return DecoderLayer(
            shape=shape,
            attention_norm=self.vector(prefix + "attention_norm"),
            qkv=affine("qkv"),
            q_norm=self.vector(prefix + "q_norm"),
            k_norm=self.vector(prefix + "k_norm"),
            o=affine("o"),
            attention_post_norm=self.vector(prefix + "attention_post_norm"),
            mlp_norm=self.vector(prefix + "mlp_norm"),
            feed_forward=feed_forward,
            mlp_post_norm=self.vector(prefix + "mlp_post_norm"),
        )

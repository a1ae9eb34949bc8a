"""The second half of a layer: one gated network, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from inference.kernels.base import Kernels, Linear, Rows
from inference.model.config import Experts

Wrap = Callable[[str, Linear], Linear]


# Weights up to this size are read again from a cache rather than from memory.
CACHED_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Affine:
    """A linear layer and what it adds. bias: float32 [N] or None."""

    linear: Linear
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def wrapped(self, name: str, wrap: Wrap) -> Affine:
        return replace(self, linear=wrap(name, self.linear))

    def over(self, linear: Linear) -> Affine:
        """The same with another product."""
        return Affine(linear, self.bias)

    def __call__(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [M, K] -> float32 [M, N], and the scales [M] that it is still to be multiplied by, or None."""
        y = self.linear(rows)
        if self.bias is None:
            return y, rows.scales
        if rows.scales is not None:
            y.mul_(rows.scales[:, None])
        # Apart from the product: fused into one rounding or not would depend on where the row lies.
        return y.add_(self.bias), None


class FeedForward(Protocol):
    @property
    def nbytes(self) -> int: ...

    def wrapped(self, prefix: str, wrap: Wrap) -> FeedForward: ...

    def linears(self) -> dict[str, Linear]:
        """Its products by names of their own."""
        ...

    def with_linears(self, linears: Mapping[str, Linear]) -> FeedForward:
        """The same with other products of those names."""
        ...

    def __call__(
        self, rows: Rows, x: torch.Tensor, norm: torch.Tensor | None, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """rows: the normed input of the products. x: float32 [M, H] before the norm, whose weight is `norm`."""
        ...


@dataclass(frozen=True, slots=True)
class GatedNetwork:
    """down(activation(gate) * up); gate and up are one matrix, H -> 2 I, and down is I -> H."""

    gate_up: Affine
    down: Affine

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def wrapped(self, prefix: str, wrap: Wrap) -> GatedNetwork:
        return GatedNetwork(self.gate_up.wrapped(prefix + "gate", wrap), self.down.wrapped(prefix + "down", wrap))

    def linears(self) -> dict[str, Linear]:
        return {"gate_up": self.gate_up.linear, "down": self.down.linear}

    def with_linears(self, linears: Mapping[str, Linear]) -> GatedNetwork:
        return GatedNetwork(self.gate_up.over(linears["gate_up"]), self.down.over(linears["down"]))

    def __call__(
        self, rows: Rows, x: torch.Tensor, norm: torch.Tensor | None, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        at_once, count = kernels.rows_at_once, len(rows.values)
        if at_once is None or count < 2 * at_once or self.nbytes > CACHED_BYTES:
            return self._some(rows, kernels)
        # A few rows at a time: the wide activations then stay in the caches between the two products, and so do the
        # weights from one part to the next.
        done = [self._some(part, kernels) for part in _parts(rows, at_once)]
        y = torch.cat([part for part, _ in done])
        if done[0][1] is None:
            return y, None
        return y, torch.cat([scales for _, scales in done if scales is not None])

    def _some(self, rows: Rows, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, scales = self.gate_up(rows)
        return self.down(kernels.silu_mul(y, scales))


def _parts(rows: Rows, size: int) -> Iterator[Rows]:
    """The rows, cut into parts of that size and a rest."""
    for start in range(0, len(rows.values), size):
        scales = None if rows.scales is None else rows.scales[start : start + size]
        yield Rows(rows.values[start : start + size], scales)


@dataclass(frozen=True, slots=True)
class ExpertMixture:
    """Each row goes through the experts its router picks; their outputs are added in the order of the experts.

    That order, and products whose rows do not depend on one another, give a row the same bits whatever rows it shares
    its experts with. The router computes in float32: a pick is all or nothing, and rounding must not turn it.
    """

    router: torch.Tensor  # float32 [E, H]
    experts: tuple[GatedNetwork, ...]
    shape: Experts

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts)

    def wrapped(self, prefix: str, wrap: Wrap) -> ExpertMixture:
        experts = (expert.wrapped(f"{prefix}experts.{index}.", wrap) for index, expert in enumerate(self.experts))
        return replace(self, experts=tuple(experts))

    def linears(self) -> dict[str, Linear]:
        parts = ((f"experts.{index}.", expert.linears()) for index, expert in enumerate(self.experts))
        return {prefix + name: linear for prefix, part in parts for name, linear in part.items()}

    def with_linears(self, linears: Mapping[str, Linear]) -> ExpertMixture:
        experts = (
            GatedNetwork(
                expert.gate_up.over(linears[f"experts.{index}.gate_up"]),
                expert.down.over(linears[f"experts.{index}.down"]),
            )
            for index, expert in enumerate(self.experts)
        )
        return ExpertMixture(self.router, tuple(experts), self.shape)

    def __call__(
        self, rows: Rows, x: torch.Tensor, norm: torch.Tensor | None, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = x if norm is None else kernels.norm_exact(x, norm)
        shares, picked = self._route(kernels.route(normed, self.router))
        used, flat = self.shape.used, picked.reshape(-1)
        order = torch.argsort(flat, stable=True)  # by expert, then by row
        sources = order // used
        values, scales = rows.values[sources], None if rows.scales is None else rows.scales[sources]
        outputs = torch.empty((len(flat), x.shape[1]), dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in zip(self.experts, torch.bincount(flat, minlength=len(self.experts)).tolist(), strict=True):
            if count:
                end = start + count
                part = Rows(values[start:end], None if scales is None else scales[start:end])
                y, factors = expert(part, x, norm, kernels)
                outputs[start:end] = y if factors is None else y.mul_(factors[:, None])
                start = end
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device)
        weighted = outputs[place].reshape(-1, used, x.shape[1]) * shares[:, :, None]
        out = weighted[:, 0].contiguous()
        for index in range(1, used):
            out += weighted[:, index]
        return out, None

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [M, E] -> shares float32 [M, used] and experts int64 [M, used], in the experts' order."""
        shares, picked = torch.topk(torch.softmax(logits, dim=1), self.shape.used, dim=1)
        if self.shape.normalized:
            total = shares[:, 0].clone()
            for place in range(1, self.shape.used):
                total += shares[:, place]
            shares = shares / total[:, None]
        picked, places = picked.sort(dim=1)
        return shares.gather(1, places), picked

"""int8 layers in the place of the linear ones of transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inference.kernels.reference import quantize_rows
from inference.model.linear import Int8Linear


class QuantizedLinear(nn.Module):
    """A linear layer of theirs in int8."""

    def __init__(self, linear: Int8Linear, bias: torch.Tensor | None) -> None:
        """bias: float32 [N] or None."""
        super().__init__()
        self.linear = linear
        self._bias = bias
        # Some code asks it for its type. Whoever multiplied by it would be told.
        self.weight = torch.empty(0)
        self.nbytes = linear.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = quantize_rows(x.reshape(-1, x.shape[-1]).float())
        y = self.linear(rows)
        if rows.scales is not None:
            y.mul_(rows.scales[:, None])
        if self._bias is not None:
            y.add_(self._bias)
        return y.reshape(*x.shape[:-1], -1)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """nn.Linear, and GPT-2's, whose weight lies transposed."""
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def called_among(modules: dict[str, nn.Module], run: Callable[[], object]) -> list[str]:
    """Those that `run` calls, in the order of their names: some code takes a layer's weight and multiplies itself."""
    called: set[str] = set()
    hooks = [module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in modules.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(called)


def int8_of(name: str, module: Any) -> Int8Linear:
    """A linear module's weight in int8. Raises QuantizationError."""
    from transformers.pytorch_utils import Conv1D

    weight = module.weight.detach().float()
    return Int8Linear.of(name, weight.t().contiguous() if isinstance(module, Conv1D) else weight)


def put_int8(model: nn.Module, name: str, linear: Int8Linear) -> QuantizedLinear:
    """Put an int8 layer in the place of the model's linear module of that name."""
    module: Any = model.get_submodule(name)
    bias = None if module.bias is None else module.bias.detach().float()
    owner, _, attribute = name.rpartition(".")
    made = QuantizedLinear(linear, bias)
    setattr(model.get_submodule(owner), attribute, made)
    return made

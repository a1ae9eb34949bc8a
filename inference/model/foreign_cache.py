"""Keys and values of transformers' models in the engine's pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from inference.cache.pages import PAGE_TOKENS
from inference.kernels.base import KeyValueCache, LayerCache


class ForeignCache(KeyValueCache):
    """Pages in the shapes that a foreign model's layers have: for each layer float32 [pages, elements of a page]."""

    def __init__(self, shapes: list[tuple[torch.Size, torch.Size]], pages: int) -> None:
        """shapes: of one token's keys and values, [heads, D] each, by layer; none where tokens are kept instead."""
        self.shapes = shapes
        widths = [(keys.numel() + values.numel()) * PAGE_TOKENS for keys, values in shapes] or [PAGE_TOKENS]
        self.stored = [torch.from_numpy(np.zeros((pages, width), dtype=np.float32)) for width in widths]
        self.kind = "fp32"
        self.page_bytes = sum(widths) * 4
        self.layers = [LayerCache(layer, self.kind) for layer in self.stored]

    def clear(self, pages: list[int]) -> None:
        for layer in self.stored:
            layer[pages] = 0

    def parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, [pages, PAGE_TOKENS, heads, D]."""
        keys, values = self.shapes[layer]
        stored, cut = self.stored[layer], keys.numel() * PAGE_TOKENS
        return (
            stored[:, :cut].view(-1, PAGE_TOKENS, *keys),
            stored[:, cut:].view(-1, PAGE_TOKENS, *values),
        )


class _PagedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's keys and values of one sequence: gathered from its pages while the layer is computed, and not kept."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, before: int) -> None:
        """keys, values: float32 [pages, PAGE_TOKENS, heads, D]; pages: int64, a sequence's; before: tokens there."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._stored = (keys, values)
        self._pages = pages
        self._length = before
        self.is_initialized = before > 0

    def get_seq_length(self) -> int:
        return self._length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, [1, heads, T, D] each; the new ones go into the pages."""
        whole: Any = DynamicLayer()  # type: ignore[no-untyped-call]
        before = self._length
        if before:
            keys, values = (
                part[self._pages].flatten(0, 1)[:before].transpose(0, 1)[None].to(key_states.dtype)
                for part in self._stored
            )
            whole.update(keys, values)
        places = torch.arange(before, before + key_states.shape[-2])
        page, offset = self._pages[places // PAGE_TOKENS], places % PAGE_TOKENS
        for part, states in zip(self._stored, (key_states, value_states), strict=True):
            part[page, offset] = states[0].transpose(0, 1).float()
        self._length += len(places)
        self.is_initialized = True
        found: tuple[torch.Tensor, torch.Tensor] = whole.update(key_states, value_states)
        return found


def paged(cache: ForeignCache, pages: torch.Tensor, before: int) -> Any:
    """transformers' cache of a sequence of which `before` tokens lie in its pages, int64."""
    theirs: Any = DynamicCache()
    theirs.layers = [_PagedLayer(*cache.parts(layer), pages, before) for layer in range(len(cache.shapes))]
    return theirs

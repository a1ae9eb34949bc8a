"""Models of families that DecoderConfig does not describe, run by transformers' own modelling code.

Their linear layers compute in int8 where the engine does; everything else is theirs. Each sequence is computed on its
own, so that its bits do not depend on its neighbours, and its keys and values lie in the engine's pages like any other
model's: they are gathered before a step and scattered after it. A model whose state is something else than keys and
values (a recurrent one) keeps the tokens in its pages instead and computes a sequence from its start at every step.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from inference.cache.pages import PAGE_TOKENS, pages_for
from inference.errors import StoreError
from inference.kernels.base import Compute, KeyValueCache, LayerCache, Rows
from inference.kernels.reference import ReferenceKernels, quantize_rows
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig
from inference.model.decoder import Decoder
from inference.model.linear import Int8Linear
from inference.model.residency import WeightsInMemory
from inference.weights.store import StoreReader

PROBE = (1, 2, 3, 4)
SETTINGS_NAME = "config.json"


class _QuantizedLinear(nn.Module):
    """A linear layer of theirs in int8."""

    def __init__(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: float32 [N, K]; bias: [N] or None."""
        super().__init__()
        self._linear = Int8Linear.of(name, weight)
        self._bias = bias
        # Some code asks it for its type. Whoever multiplied by it would be told.
        self.weight = torch.empty(0)
        self.nbytes = self._linear.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = quantize_rows(x.reshape(-1, x.shape[-1]).float())
        y = self._linear(rows)
        if rows.scales is not None:
            y.mul_(rows.scales[:, None])
        if self._bias is not None:
            y.add_(self._bias)
        return y.reshape(*x.shape[:-1], -1)


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


class _TheirKernels(ReferenceKernels):
    """What measures the host's peaks; the model itself asks these kernels for nothing."""

    name = "transformers"


class ForeignDecoder(Decoder):
    """A causal model of transformers behind the decoder's interface."""

    def __init__(self, config: DecoderConfig, model: Any, compute: Compute, nbytes: int) -> None:
        """Tries the model on a few tokens, which tells the shapes of its cache: `shapes`. Raises StoreError."""
        self.config = config
        self.kernels = _TheirKernels(replace(config, max_context=1), compute)
        self._weights = WeightsInMemory([], None)  # theirs are within the model
        self._model = model
        self._nbytes = nbytes
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        with torch.inference_mode():
            self.shapes = self._probe()

    @classmethod
    def open(cls, store: Path, config: DecoderConfig, compute: Compute) -> ForeignDecoder:
        """Read a store's weights into transformers' model. Raises StoreError, QuantizationError."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.utils import logging

        quiet: Any = logging
        quiet.disable_progress_bar()
        reader = StoreReader(store)
        weights = {t.name: torch.from_numpy(reader.float32(t.name).copy()) for t in reader.manifest.tensors}
        values = json.loads((store / SETTINGS_NAME).read_text("utf-8"))
        settings = AutoConfig.for_model(values.pop("model_type"), **values)
        dtype = torch.bfloat16 if compute == "bf16" else torch.float32
        makers: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
        maker = makers[0] if isinstance(makers, tuple) else makers
        try:
            model, loaded = maker.from_pretrained(
                None, config=settings, state_dict=weights, dtype=dtype, output_loading_info=True
            )
        except (ValueError, RuntimeError, KeyError) as error:
            raise StoreError(store, f"transformers cannot load it: {error}") from None
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise StoreError(store, f"lacks {len(missing)} of its model's tensors, {missing[0]!r} among them")
        model.eval()
        if compute == "int8":
            _quantize(model, config.vocab_size)
        nbytes = sum(one.nbytes for one in model.parameters())
        nbytes += sum(one.nbytes for one in model.modules() if isinstance(one, _QuantizedLinear))
        return cls(config, model, compute, nbytes)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def picks(self) -> bool:
        return False

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return 4 * PAGE_TOKENS * (sum(keys.numel() + values.numel() for keys, values in self.shapes) or 1)

    @property
    def layer_nbytes(self) -> int:
        """Bytes of weights that a step reads, at most; the head's among them."""
        return self._nbytes

    @property
    def head_nbytes(self) -> int:
        return 0

    def _probe(self) -> list[tuple[torch.Size, torch.Size]]:
        """Shapes of a token's keys and values in each layer, found by computing a few tokens.

        [] where the model has no such cache, or does not go on from one as if it had seen all tokens at once.
        StoreError where it is not causal.
        """
        from transformers.cache_utils import DynamicCache, DynamicLayer

        ids = torch.tensor([PROBE]) % self.config.vocab_size
        whole = self._model(ids, use_cache=False).logits[0].float()
        if not bool(torch.isfinite(whole).all()):
            raise StoreError(self.config.architecture, "gives NaN or infinity; its weights may be damaged")
        part = self._model(ids[:, :3], use_cache=False).logits[0].float()
        if not _alike(part, whole[:3]):
            raise StoreError(self.config.architecture, "is not causal: what comes later changes what came before")
        if self._cache_name is None:
            return []
        cache: Any = DynamicCache()
        try:
            self._model(ids[:, :3], use_cache=True, **{self._cache_name: cache})
            plain = bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)
            if not plain or any(layer.get_seq_length() != 3 for layer in cache.layers):
                return []
            last = self._model(ids[:, 3:], use_cache=True, **{self._cache_name: cache}).logits[0, -1].float()
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
            return []
        if not _alike(last, whole[-1]):
            return []
        return [(_token_shape(layer.keys), _token_shape(layer.values)) for layer in cache.layers]

    def forward(self, batch: StepBatch, cache: KeyValueCache, between_layers: Callable[[], None] | None = None) -> Rows:
        """Compute a step, one sequence after the other; logits float32 [L, vocab] of `batch.logit_rows`."""
        assert isinstance(cache, ForeignCache)
        wanted, found = batch.logit_rows.tolist(), []
        starts = batch.segment_starts.tolist()
        for segment, (count, context) in enumerate(batch.lengths):
            first = starts[segment]
            pages = batch.page_table[segment, : pages_for(context)].long()
            logits = self._sequence(batch.token_ids[first : first + count], context, pages, cache)  # [count, vocab]
            mine = [row - first for row in wanted if first <= row < first + count]
            found.append(logits[mine])
        return Rows(torch.cat(found), None)

    def states(self, batch: StepBatch, cache: KeyValueCache) -> torch.Tensor:
        raise StoreError(self.config.architecture, "runs in transformers' own code, which gives no embeddings here")

    def _sequence(self, ids: torch.Tensor, context: int, pages: torch.Tensor, cache: ForeignCache) -> torch.Tensor:
        """Logits, float32 [count, vocab], of a sequence's last tokens; those before them are in its pages."""
        count = len(ids)
        before = context - count
        places = torch.arange(before, context)
        page, offset = pages[places // PAGE_TOKENS], places % PAGE_TOKENS
        if not self.shapes:
            tokens = cache.stored[0]
            tokens[page, offset] = ids.float()
            whole = tokens[pages].reshape(-1)[:context].long()
            logits: torch.Tensor = self._model(whole[None], use_cache=False).logits[0, before:]
            return logits.float()
        from transformers.cache_utils import DynamicCache

        theirs: Any = DynamicCache()
        dtype = next(self._model.parameters()).dtype
        if before:
            for layer in range(len(self.shapes)):
                keys, values = (
                    part[pages].flatten(0, 1)[:before].transpose(0, 1)[None].to(dtype) for part in cache.parts(layer)
                )
                theirs.update(keys, values, layer)
        logits = self._model(ids[None], use_cache=True, **{str(self._cache_name): theirs}).logits[0]
        for layer, made in enumerate(theirs.layers):
            for part, all_tokens in zip(cache.parts(layer), (made.keys, made.values), strict=True):
                part[page, offset] = all_tokens[0, :, before:].transpose(0, 1).float()
        return logits.float()


def _alike(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Equal but for rounding, in whichever arithmetic."""
    return torch.allclose(some, others, rtol=0.05, atol=0.05 * float(others.abs().max()))


def _token_shape(states: torch.Tensor) -> torch.Size:
    """[1, heads, T, D] -> [heads, D]."""
    return torch.Size((states.shape[1], states.shape[3]))


def _quantize(model: Any, vocabulary: int) -> None:
    """Put int8 layers in the place of linear ones: nn.Linear, and GPT-2's, whose weight lies transposed.

    Only of those that are called: some code takes a layer's weight and multiplies by itself.
    """
    from transformers.pytorch_utils import Conv1D

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    called: set[str] = set()
    hooks = [module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in linear.items()]
    with torch.inference_mode():
        model(torch.tensor([PROBE]) % vocabulary, use_cache=False)
    for hook in hooks:
        hook.remove()
    for name in sorted(called):
        module = linear[name]
        weight = module.weight.detach().float()
        if isinstance(module, Conv1D):
            weight = weight.t().contiguous()
        bias = None if module.bias is None else module.bias.detach().float()
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, _QuantizedLinear(name, weight, bias))

"""Models of families that DecoderConfig does not describe, run by transformers' own modelling code.

Their linear layers compute in int8 where the engine does; everything else is theirs. Each sequence is computed on its
own, so that its bits do not depend on its neighbours, and its keys and values lie in the engine's pages like any other
model's: they are gathered before a step and scattered after it. A model whose state is something else than keys and
values (a recurrent one) keeps the tokens in its pages instead and computes a sequence from its start at every step.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference.cache.pages import PAGE_TOKENS, pages_for
from inference.errors import StatesBroken, StoreError
from inference.kernels.base import Between, Compute, KeyValueCache, Rows
from inference.kernels.reference import ReferenceKernels
from inference.memory.placement import Placement
from inference.memory.ring import StreamStats
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig
from inference.model.decoder import Decoder
from inference.model.foreign_blocks import Blocks, BlocksInMemory, StreamedBlocks, blocks_image
from inference.model.foreign_cache import ForeignCache, paged
from inference.model.foreign_linear import QuantizedLinear, called_among, int8_of, linear_modules, put_int8
from inference.model.foreign_shell import PROBE, Shell, dtype_of, maker_and_settings
from inference.model.residency import WeightsInMemory
from inference.weights.store import StoreReader


class _TheirKernels(ReferenceKernels):
    """What measures the host's peaks; the model itself asks these kernels for nothing."""

    name = "transformers"


class ForeignDecoder(Decoder):
    """A causal model of transformers behind the decoder's interface."""

    def __init__(self, config: DecoderConfig, model: Any, compute: Compute, blocks: Blocks | None = None) -> None:
        """Tries the model on a few tokens, which tells the shapes of its cache: `shapes`. Raises StoreError.

        model: in float, but for what of its blocks is in int8 already. blocks: where those lie; in memory by default.
        """
        self.config = config
        self.kernels = _TheirKernels(replace(config, max_context=1), compute)
        self._weights = WeightsInMemory([], None)  # theirs are within the model
        self._model = model
        self._blocks: Blocks = blocks or BlocksInMemory()
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        with torch.inference_mode():
            if compute == "int8":
                self._quantize()
            self.shapes = self._probe()
        whole = sum(int(one.nbytes) for one in model.parameters())
        whole += sum(one.nbytes for one in model.modules() if isinstance(one, QuantizedLinear))
        self._step_nbytes = whole
        self._nbytes = whole - self._blocks.bound_nbytes + self._blocks.nbytes

    @classmethod
    def open(
        cls,
        store: Path,
        config: DecoderConfig,
        compute: Compute,
        placement: Placement | None = None,
        images: Path | None = None,
    ) -> ForeignDecoder:
        """Read a store's weights into transformers' model.

        placement: which of its repeated blocks stay in memory; None: all. The others are read from an image of them,
        which is made first where there is none; images: the folder of images, by default as `images_folder` says.
        Raises StoreError, QuantizationError, MemoryError.
        """
        reader = StoreReader(store)
        if placement is not None and placement.ring:
            shell = Shell(reader, compute)
            if not placement.pinned.issuperset(range(len(shell.blocks))):
                image = blocks_image(shell, reader, compute, images)
                return cls(config, shell.model, compute, StreamedBlocks(shell, image, placement))
        maker, settings = maker_and_settings(store)
        weights = {t.name: torch.from_numpy(reader.float32(t.name).copy()) for t in reader.manifest.tensors}
        try:
            model, loaded = maker.from_pretrained(
                None, config=settings, state_dict=weights, dtype=dtype_of(compute), output_loading_info=True
            )
        except MemoryError:
            raise
        except Exception as error:  # its code meets a configuration that nobody has checked
            raise StoreError(store, f"transformers cannot load it: {error}") from None
        missing = sorted(loaded["missing_keys"])
        if missing:
            raise StoreError(store, f"lacks {len(missing)} of its model's tensors, {missing[0]!r} among them")
        # PyTorch multiplies by another route, of other bits, where a gradient may be wanted; streamed blocks want none.
        return cls(config, model.eval().requires_grad_(False), compute)

    def _call(self, **inputs: Any) -> Any:
        """What the model returns for one sequence."""
        (found,) = self._blocks.run([lambda: self._model(**inputs)])
        return found

    def _quantize(self) -> None:
        """Put int8 layers in the place of the linear ones that are called, and are not streamed."""
        modules = linear_modules(self._model)
        ids = torch.tensor([PROBE]) % self.config.vocab_size
        for name in called_among(modules, lambda: self._call(input_ids=ids, use_cache=False)):
            put_int8(self._model, name, int8_of(name, modules[name]))

    @property
    def nests(self) -> bool:
        return self.stream_stats() is None

    def stream_stats(self) -> StreamStats | None:
        return self._blocks.stream_stats()

    def close(self) -> None:
        self._blocks.close()

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
        return self._step_nbytes

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
        whole = self._call(input_ids=ids, use_cache=False).logits[0].float()
        if not bool(torch.isfinite(whole).all()):
            raise StoreError(self.config.architecture, "gives NaN or infinity; its weights may be damaged")
        part = self._call(input_ids=ids[:, :3], use_cache=False).logits[0].float()
        if not _alike(part, whole[:3]):
            raise StoreError(self.config.architecture, "is not causal: what comes later changes what came before")
        if self._cache_name is None:
            return []
        cache: Any = DynamicCache()
        try:
            self._call(input_ids=ids[:, :3], use_cache=True, **{self._cache_name: cache})
            plain = bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)
            if not plain or any(layer.get_seq_length() != 3 for layer in cache.layers):
                return []
            shapes = [(_token_shape(layer.keys), _token_shape(layer.values)) for layer in cache.layers]
            pages = ForeignCache(shapes, 1)
            for count, some in ((0, ids[:, :3]), (3, ids[:, 3:])):
                mine = paged(pages, torch.tensor([0]), count)
                last = self._call(input_ids=some, use_cache=True, **{self._cache_name: mine}).logits[0, -1].float()
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
            return []
        if not _alike(last, whole[-1]):
            return []
        return shapes

    def forward(self, batch: StepBatch, cache: KeyValueCache, between: Between | None = None) -> Rows:
        """Compute a step, one sequence after the other; logits float32 [L, vocab] of `batch.logit_rows`.

        StatesBroken as from any decoder.
        """
        assert isinstance(cache, ForeignCache)
        wanted, tasks = batch.logit_rows.tolist(), []
        starts = batch.segment_starts.tolist()
        for segment, (count, context) in enumerate(batch.lengths):
            first = starts[segment]
            pages = batch.page_table[segment, : pages_for(context)].long()
            ids = batch.token_ids[first : first + count]
            mine = [row - first for row in wanted if first <= row < first + count]
            tasks.append(partial(self._sequence, ids, context, pages, cache, mine))
        done = self._blocks.run(tasks)
        broken = [segment for segment, logits in enumerate(done) if logits is None]
        if broken:
            raise StatesBroken(broken)
        return Rows(torch.cat([logits for logits in done if logits is not None]), None)

    def states(self, batch: StepBatch, cache: KeyValueCache) -> torch.Tensor:
        raise StoreError(self.config.architecture, "runs in transformers' own code, which gives no embeddings here")

    def _sequence(
        self, ids: torch.Tensor, context: int, pages: torch.Tensor, cache: ForeignCache, wanted: list[int]
    ) -> torch.Tensor | None:
        """Logits, float32 [wanted, vocab], of some of a sequence's last tokens; those before them are in its pages.

        None where it has come to NaN or infinity and no logits are wanted that would tell.
        """
        before = context - len(ids)
        if self.shapes:
            theirs = {str(self._cache_name): paged(cache, pages, before)}
            logits: torch.Tensor = self._model(ids[None], use_cache=True, **theirs).logits[0]
            return _wanted(logits, wanted)
        places = torch.arange(before, context)
        tokens = cache.stored[0]
        tokens[pages[places // PAGE_TOKENS], places % PAGE_TOKENS] = ids.float()
        whole = tokens[pages].reshape(-1)[:context].long()
        return _wanted(self._model(whole[None], use_cache=False).logits[0, before:], wanted)


def _wanted(logits: torch.Tensor, rows: list[int]) -> torch.Tensor | None:
    """Some of [T, vocab], float32; None where none are wanted and the last are not finite."""
    if not rows and not bool(torch.isfinite(logits[-1]).all()):
        return None
    return logits[rows].float()


def _alike(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Equal but for rounding, in whichever arithmetic."""
    return torch.allclose(some, others, rtol=0.05, atol=0.05 * float(others.abs().max()))


def _token_shape(states: torch.Tensor) -> torch.Size:
    """[1, heads, T, D] -> [heads, D]."""
    return torch.Size((states.shape[1], states.shape[3]))

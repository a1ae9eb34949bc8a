"""How fast a device computes a model's layers, and copies them from the host: measured, and kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from inference.cache.pages import pages_for
from inference.device.streams import lock_pages
from inference.group import lone_sequence
from inference.kernels.base import CacheKind, KeyValueCache
from inference.memory.direct import Buffer
from inference.model.batch import StepBatch, build_batch
from inference.model.decoder import Decoder
from inference.model.layers import LayerReader
from inference.model.residency import WeightsInMemory
from inference.planner.measured import keep, kept, measured_place
from inference.planner.peaks import best_seconds
from inference.scheduler import Slice

FORMAT = 1
ROWS = (1, 8, 64, 256, 512)
CONTEXT, CONTEXT_ROWS = 256, 16
# A layer computed so many times over: what a step costs only once shrinks to little.
REPEATS = 8


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Seconds, on one device, of a model's layer and head, by `rows`, and of one token of a row's context in a layer.

    to_device_bytes_per_s: of copies of a layer's size from page-locked memory.
    """

    rows: tuple[int, ...]
    layer: tuple[float, ...]
    head: tuple[float, ...]
    context_token: float
    to_device_bytes_per_s: float

    def step_seconds(self, layers: int, rows: float, logit_rows: float, context_tokens: float) -> float:
        """Of computing alone. context_tokens: of all rows together."""
        layer = float(np.interp(rows, self.rows, self.layer)) * max(1.0, rows / self.rows[-1])
        head = float(np.interp(logit_rows, self.rows, self.head)) if logit_rows else 0.0
        return layers * (layer + context_tokens * self.context_token) + head


def device_rates(parts: LayerReader, kind: CacheKind, *, again: bool = False) -> DeviceRates:
    """From the cache, else measured now, in some seconds, with one layer and the head on the device.

    Kept by device, shapes, encodings and arithmetic. Raises StoreError, QuantizationError, torch.OutOfMemoryError.
    """
    kernels, config = parts.kernels, parts.config
    index = config.layers // 2
    prefix = f"layers.{index}."
    tensors = [t for t in parts.reader.manifest.tensors if t.name.startswith(prefix) or t.name == "embedding"]
    device = kernels.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    marks: list[object] = [FORMAT, name, torch.__version__, kernels.name, kernels.compute, kind, config]
    marks += [(t.name, t.shape, t.encoding, t.group_size) for t in tensors]
    place = measured_place("devices", marks)
    found = None if again else kept(place)
    if found is None:
        with torch.inference_mode():
            found = asdict(_measured(parts, index, kind))
        keep(place, found)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return DeviceRates(**values)


class _Noise:
    """Stands for the embedding: rows of the right size."""

    nbytes = 0

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn((ROWS[-1], hidden_size), generator=generator).to(device)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.rows[: len(token_ids)].clone()


def _measured(parts: LayerReader, index: int, kind: CacheKind) -> DeviceRates:
    kernels, device = parts.kernels, parts.kernels.device
    layer = parts.layer(index)
    config = replace(
        parts.config,
        layers=REPEATS,
        windows=parts.config.windows[index : index + 1] * REPEATS,
        ropes=parts.config.ropes[index : index + 1] * REPEATS,
        expert_layers=parts.config.expert_layers[index : index + 1] * REPEATS,
    )
    noise, norm = _Noise(config.hidden_size, device), torch.ones(config.hidden_size, device=device)
    decoder = Decoder(config, noise, WeightsInMemory([layer] * REPEATS, None), norm, kernels)
    cache = KeyValueCache(config, max(ROWS[-1], CONTEXT_ROWS * pages_for(CONTEXT)), kind, device)

    def seconds(rows: int, context: int) -> float:
        return best_seconds(partial(decoder.states, _decoding(rows, context), cache)) / REPEATS

    layers = [seconds(rows, 1) for rows in ROWS]
    far = max(0.0, seconds(CONTEXT_ROWS, CONTEXT) - float(np.interp(CONTEXT_ROWS, ROWS, layers)))
    heads = [0.0] * len(ROWS)
    if parts.config.has_head:
        names, factor = parts.head_product()
        head = parts.linear(*names, factor=factor)

        def logits(rows: int) -> float:
            return float(head(kernels.norm(noise.rows[:rows], norm)).sum())  # waits for the device

        heads = [best_seconds(partial(logits, rows)) for rows in ROWS]
    return DeviceRates(
        rows=ROWS,
        layer=tuple(np.maximum.accumulate(layers).tolist()),
        head=tuple(np.maximum.accumulate(heads).tolist()),
        context_token=far / (CONTEXT_ROWS * CONTEXT),
        to_device_bytes_per_s=_copy_rate(layer.nbytes, device),
    )


def _copy_rate(nbytes: int, device: torch.device) -> float:
    source = Buffer(nbytes).tensor
    source.zero_()  # written, and so really there
    target = torch.empty(len(source), dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    lock_pages(source, device, copy)  # for as long as there is something to copy by
    return len(source) / best_seconds(copy)


def _decoding(rows: int, context: int) -> StepBatch:
    """The last token of that many sequences of so many tokens, in pages of their own."""
    pages, slices = pages_for(context), []
    for index in range(rows):
        sequence = lone_sequence([0] * context)
        sequence.pages = list(range(index * pages, (index + 1) * pages))
        slices.append(Slice(sequence, context - 1, 1))
    return build_batch(slices)

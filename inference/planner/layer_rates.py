"""How long a layer takes, measured on one of the model's own: by rows, by what they attend to, and while it streams."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference.kernels.base import CacheKind
from inference.kernels.native.build import HEADERS, SOURCES, processor_marks
from inference.memory.allocation import give_back_freed_memory, keep_freed_memory
from inference.model.layers import LayerReader
from inference.parallelism import CONTENDED_SHARE
from inference.planner.layer_trial import LayerTrial
from inference.planner.measured import measured_place, sampled

logger = logging.getLogger(__name__)

FORMAT = 10


@dataclass(frozen=True, slots=True)
class AttentionSeconds:
    """What looking back adds to a layer, with one kind of cache.

    decode_row: for each decoding row, which has a page to itself. decode_token: for each row and token of context that
    a decoding row looks back to. prompt_pair: for each pair of a prompt's row and a token before it.
    """

    decode_row: float
    decode_token: float
    prompt_pair: float


@dataclass(frozen=True, slots=True)
class LayerRates:
    """Seconds of one layer on this host, all its matrices in memory.

    layer: by `rows`, of short prompts; apart: how many times longer where layers are computed by calls of their own, as
    they are where anything is streamed or spilled. head: by `rows`, of the head and the
    choice of tokens; batch: of making ready a step, by its pieces of sequences. stream_bytes_per_s: at which layers
    stream where steps wait for them, None where none did; read_cost: seconds by which reading a byte lengthens the
    arithmetic beside it. attention: by kind of cache.
    """

    rows: tuple[int, ...]
    layer: tuple[float, ...]
    apart: float
    head: tuple[float, ...]
    batch: tuple[float, ...]
    stream_bytes_per_s: float | None
    read_cost: float
    attention: dict[CacheKind, AttentionSeconds]

    def layer_seconds(
        self, kind: CacheKind, rows: float, decode_rows: float, decode_tokens: float, prompt_pairs: float
    ) -> float:
        """decode_rows: of the rows; decode_tokens: context of all of these; prompt_pairs: of all prompts' rows."""
        attention = self.attention[kind]
        looking_back = decode_rows * attention.decode_row + decode_tokens * attention.decode_token
        return _between(self.rows, self.layer, rows) + looking_back + prompt_pairs * attention.prompt_pair

    def head_seconds(self, rows: float) -> float:
        return _between(self.rows, self.head, rows) if rows else 0.0

    def batch_seconds(self, pieces: float) -> float:
        return _between(self.rows, self.batch, pieces)


def layer_rates(
    parts: LayerReader,
    kinds: Sequence[CacheKind],
    *,
    compute: str,
    threads: int,
    folder: Path | None,
    room_bytes: int | None = None,
    again: bool = False,
    once: bool = False,
) -> LayerRates:
    """The rates of a store's layers, from the cache, else measured now (some seconds, a few hundred MB of memory).

    room_bytes: of memory for it, as far as a layer, the head and what streams fit into that; None: no limit.
    folder: on the disk that would be read from; None: nothing will be, and of reading nothing is told. Kept by host,
    kernels' sources, threads, shapes and encodings, as `measured.sampled` does, which `once` is for.
    Raises StoreError, QuantizationError.
    """
    index = parts.config.layers // 2
    prefix = f"layers.{index}."
    tensors = [t for t in parts.reader.manifest.tensors if t.name.startswith(prefix)]
    marks: list[object] = [FORMAT, processor_marks(), threads, compute, parts.kernels.name, torch.__version__]
    marks += [(t.name.removeprefix(prefix), t.shape, t.encoding, t.group_size) for t in tensors]
    marks += [parts.config.head_dim, parts.config.heads, parts.config.vocab_size]
    marks += [file.read_bytes() for file in (*SOURCES, *HEADERS)]
    trial: list[LayerTrial] = []  # made once, where it is needed

    def measured(kind: str, further: list[object], measure: Callable[[LayerTrial], dict[str, Any]]) -> dict[str, Any]:
        place = measured_place(kind, [*marks, *further])

        def now() -> tuple[dict[str, Any], bool]:
            if not trial:
                trial.append(LayerTrial(parts, index, room_bytes))
            found = measure(trial[0])
            if not (sound := trial[0].share_of_processor() >= CONTENDED_SHARE):
                logger.warning("others take the processor: a plan made now promises too little")
            return found, sound

        return sampled(place, now, again=again, once=once)

    keep_freed_memory()  # as the engine does
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            disk = None if folder is None else os.stat(folder).st_dev
            of_layer = measured("layers", [disk], lambda one: one.layer(folder))
            attention = {
                kind: AttentionSeconds(**measured("attention", [kind], partial(LayerTrial.attention, kind=kind)))
                for kind in kinds
            }
    finally:
        torch.set_num_threads(before)
        if trial:
            trial.clear()
            give_back_freed_memory()  # the model is still to be loaded, within the memory allowed
    numbers: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in of_layer.items()}
    return LayerRates(**numbers, attention=attention)


def _between(at: Sequence[int], values: Sequence[float], wanted: float) -> float:
    """On the lines through the measured points; beyond the last, where arithmetic is all, in proportion to it."""
    if wanted <= at[0]:
        return values[0]
    if wanted >= at[-1]:
        return values[-1] * wanted / at[-1]
    upper = next(i for i, x in enumerate(at) if x >= wanted)
    x0, x1, y0, y1 = at[upper - 1], at[upper], values[upper - 1], values[upper]
    return y0 + (y1 - y0) * (wanted - x0) / (x1 - x0)

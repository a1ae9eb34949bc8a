"""How long a layer takes, measured on one of the model's own: by rows, by what they attend to, and beside reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from inference.cache.pages import pages_for
from inference.group import lone_sequence
from inference.kernels.base import CacheKind, Kernels, KeyValueCache
from inference.kernels.native.build import HEADERS, SOURCES, processor_marks
from inference.model.batch import StepBatch, build_batch
from inference.model.decoder import Decoder
from inference.model.layers import LayerReader
from inference.model.residency import WeightsInMemory
from inference.planner.disk import READERS, TrialFile
from inference.planner.measured import keep, kept, measured_place
from inference.scheduler import Slice

FORMAT = 1
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Weights come from memory in a step, not from a cache that the layer before has filled.
WORKING_BYTES = 192 * 2**20
MOST_COPIES = 16
CONTEXT = 512
CONTEXT_ROWS = 64
PROMPT = 256
TRIES = 3


@dataclass(frozen=True, slots=True)
class LayerRates:
    """Seconds of one layer on this host, all its matrices in memory.

    layer: by `rows`, each a sequence of its own with nothing to look back to. decode_token: more, for each row and
    token of context that a decoding row looks back to. prompt_pair: more, for each pair of a prompt's row and a token
    before it. head: by `rows`, of the head and the choice of tokens; batch: by `rows`, of making ready a step.
    beside_reads: how many times longer a layer takes while the disk is read at its full rate.
    """

    rows: tuple[int, ...]
    layer: tuple[float, ...]
    decode_token: float
    prompt_pair: float
    head: tuple[float, ...]
    batch: tuple[float, ...]
    beside_reads: float

    def layer_seconds(self, rows: int, decode_tokens: float, prompt_pairs: float, *, reading: bool) -> float:
        """decode_tokens: context of all decoding rows; prompt_pairs: of all prompts' rows."""
        seconds = _between(self.rows, self.layer, rows)
        seconds += decode_tokens * self.decode_token + prompt_pairs * self.prompt_pair
        return seconds * (self.beside_reads if reading else 1.0)

    def head_seconds(self, rows: int) -> float:
        return _between(self.rows, self.head, rows) if rows else 0.0

    def batch_seconds(self, rows: int) -> float:
        return _between(self.rows, self.batch, rows)


def layer_rates(
    parts: LayerReader, kind: CacheKind, *, compute: str, threads: int, folder: Path, again: bool = False
) -> LayerRates:
    """The rates of a store's layers, from the cache, else measured now (some seconds, a few hundred MB of memory).

    folder: on the disk that would be read from. Kept by host, kernels' sources, threads, shapes and encodings.
    Raises StoreError, QuantizationError.
    """
    index = parts.config.layers // 2
    prefix = f"layers.{index}."
    tensors = [t for t in parts.reader.manifest.tensors if t.name.startswith(prefix)]
    marks: list[object] = [FORMAT, processor_marks(), threads, compute, parts.kernels.name, kind, torch.__version__]
    marks += [(t.name.removeprefix(prefix), t.shape, t.encoding, t.group_size) for t in tensors]
    marks += [parts.config.head_dim, parts.config.heads, parts.config.vocab_size]
    marks += [file.read_bytes() for file in (*SOURCES, *HEADERS)]
    place = measured_place("layers", marks)
    found = None if again else kept(place)
    if found is not None:
        lists: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
        }
        return LayerRates(**lists)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            rates = _measure(parts, index, kind, folder)
    finally:
        torch.set_num_threads(before)
    keep(place, asdict(rates))
    return rates


class _Noise:
    """Stands for the embedding: rows of the right size."""

    nbytes = 0

    def __init__(self, hidden_size: int) -> None:
        self._rows = torch.randn((max(ROWS), hidden_size), generator=torch.Generator().manual_seed(0))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows[: len(token_ids)].clone()


def _measure(parts: LayerReader, index: int, kind: CacheKind, folder: Path) -> LayerRates:
    kernels = parts.kernels
    layer = parts.layer(index)
    copies = max(1, min(MOST_COPIES, -(-WORKING_BYTES // max(1, layer.nbytes))))
    layers = [layer]
    for _ in range(copies - 1):
        linears = layer.linears()
        layers.append(
            layer.with_linears(
                {
                    name: one.over({part: array.clone() for part, array in one.arrays().items()})
                    for name, one in linears.items()
                }
            )
        )
    config = replace(
        parts.config,
        layers=copies,
        windows=parts.config.windows[index : index + 1] * copies,
        ropes=parts.config.ropes[index : index + 1] * copies,
        expert_layers=parts.config.expert_layers[index : index + 1] * copies,
    )
    norm = torch.ones(config.hidden_size)
    decoder = Decoder(config, _Noise(config.hidden_size), WeightsInMemory(layers, None), norm, kernels)
    cache = KeyValueCache(config, max(max(ROWS), CONTEXT_ROWS * pages_for(CONTEXT)), kind)

    def seconds(batch: StepBatch) -> float:
        return _typical(lambda: decoder.states(batch, cache)) / copies

    alone = [_decoding(rows, 1) for rows in ROWS]
    layer_seconds = [seconds(batch) for batch in alone]
    base = dict(zip(ROWS, layer_seconds, strict=True))
    decode = seconds(_decoding(CONTEXT_ROWS, CONTEXT)) - base[CONTEXT_ROWS]
    pairs = PROMPT * (PROMPT + 1) // 2
    prompt = seconds(_prompt(PROMPT)) - base[PROMPT]
    slower: list[float] = []

    def beside_reads() -> None:
        slower.extend(
            seconds(batch) / base[len(batch.token_ids)] for batch in (alone[ROWS.index(64)], alone[ROWS.index(256)])
        )

    with TrialFile(folder) as trial:
        trial.read_for(0.0, READERS, meanwhile=beside_reads)
    head = _head_seconds(parts, kernels, norm) if config.has_head else [0.0] * len(ROWS)
    return LayerRates(
        rows=ROWS,
        layer=tuple(layer_seconds),
        decode_token=max(0.0, decode) / (CONTEXT_ROWS * CONTEXT),
        prompt_pair=max(0.0, prompt) / pairs,
        head=tuple(head),
        batch=tuple(_typical(partial(_decoding, rows, 1)) for rows in ROWS),
        beside_reads=max(1.0, statistics.mean(slower)),
    )


def _head_seconds(parts: LayerReader, kernels: Kernels, norm: torch.Tensor) -> list[float]:
    names, factor = parts.head_product()
    head = parts.linear(*names, factor=factor)
    highest: Callable[..., object] = getattr(head, "highest", head)
    noise = _Noise(parts.config.hidden_size)

    def pick(rows: int) -> object:
        return highest(kernels.norm(noise(torch.zeros(rows, dtype=torch.int64)), norm))

    return [_typical(partial(pick, rows)) for rows in ROWS]


def _decoding(rows: int, context: int) -> StepBatch:
    pages = pages_for(context)
    slices = []
    for number in range(rows):
        sequence = lone_sequence([0] * context)
        sequence.pages = list(range(number * pages, (number + 1) * pages))
        slices.append(Slice(sequence, context - 1, 1))
    return build_batch(slices)


def _prompt(tokens: int) -> StepBatch:
    sequence = lone_sequence([0] * tokens)
    sequence.pages = list(range(pages_for(tokens)))
    return build_batch([Slice(sequence, 0, tokens)])


def _typical(act: Callable[[], object]) -> float:
    act()
    times = []
    for _ in range(TRIES):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _between(at: Sequence[int], values: Sequence[float], wanted: float) -> float:
    """On the lines through the measured points; beyond the last, on the line through the last two."""
    if wanted <= at[0]:
        return values[0]
    upper = next((i for i, x in enumerate(at) if x >= wanted), len(at) - 1)
    x0, x1, y0, y1 = at[upper - 1], at[upper], values[upper - 1], values[upper]
    return max(0.0, y0 + (y1 - y0) * (wanted - x0) / (x1 - x0))

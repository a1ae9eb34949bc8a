"""What this host can do at most, measured: memory read, matrix products and attention. Once a host, kept in a cache.

A peak is the best of several tries: whatever else runs can only make a try slower. A peak that was measured on a busy
host is too low; measure again when the host is quiet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference.cache.pages import pages_for
from inference.group import lone_sequence
from inference.kernels.base import CacheKind, Compute, Kernels, KeyValueCache, Rows
from inference.kernels.native.build import HEADERS, SOURCES, processor_marks
from inference.memory.allocation import give_back_freed_memory
from inference.model import linear
from inference.model.batch import StepBatch, build_batch
from inference.model.config import DecoderConfig
from inference.planner.measured import keep, kept, measured_place
from inference.planner.work import Matrix, model_matrices
from inference.quant.rotated import RotatedTensor
from inference.scheduler import Slice

logger = logging.getLogger(__name__)

FORMAT = 2
WORKING_SETS = (4 * 2**20, 32 * 2**20, 128 * 2**20, 512 * 2**20)
ROWS = (1, 64, 256)
LARGE = 4096
LIBRARY_ROWS = 512
ATTENTION_SEQUENCES = 64
ATTENTION_CONTEXT = 256
SECONDS_A_RATE = 0.15
TRIES = 12


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Bytes a second read from a buffer of that size: a small one lies in the processor's caches."""

    working_set_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class MatrixRate:
    """Operations a second of one linear layer [rows, inputs] x [inputs, outputs] of the engine's own."""

    rows: int
    inputs: int
    outputs: int
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """One layer of the engine's attention over its cache: decoding rows of many sequences, and one prompt's piece."""

    decode_bytes_per_s: float
    decode_operations_per_s: float
    prefill_operations_per_s: float


@dataclass(frozen=True, slots=True)
class HostPeaks:
    """What was measured, and on what. `read` ascends by working set; `matrix`: the model's shapes and large ones.

    library_operations_per_s: of PyTorch's own product in the same arithmetic, large, as a judge from outside.
    attention: None for a model that brings its own.
    """

    processor: str
    threads: int
    compute: str
    kernels: str
    measured_at: str
    read: tuple[ReadRate, ...]
    matrix: tuple[MatrixRate, ...]
    library_operations_per_s: float
    attention: AttentionRate | None

    @property
    def bytes_per_s(self) -> float:
        """From memory: the largest working set's rate."""
        return self.read[-1].bytes_per_s

    @property
    def operations_per_s(self) -> float:
        """The best of any shape, by the engine's own product or PyTorch's."""
        return max(self.library_operations_per_s, *(rate.operations_per_s for rate in self.matrix))

    def bytes_per_s_of(self, working_set_bytes: float) -> float:
        """The rate of the smallest measured working set that holds that many bytes, else that of the largest."""
        for rate in self.read:
            if rate.working_set_bytes >= working_set_bytes:
                return rate.bytes_per_s
        return self.read[-1].bytes_per_s

    def matrix_operations_per_s(self, rows: int, matrices: Iterable[Matrix]) -> float:
        """Of the model's own matrices together: seconds between those of the measured numbers of rows next to it."""
        counts = sorted({rate.rows for rate in self.matrix})
        rates = {(r.inputs, r.outputs, r.rows): r.operations_per_s for r in self.matrix}
        operations = 0.0
        seconds = [0.0] * len(counts)
        for matrix in matrices:
            one_row = 2.0 * matrix.inputs * matrix.outputs * matrix.times
            operations += rows * one_row
            for index, count in enumerate(counts):
                seconds[index] += count * one_row / rates[matrix.inputs, matrix.outputs, count]
        if rows >= counts[-1]:
            return operations / (seconds[-1] * rows / counts[-1])
        return operations / float(np.interp(rows, counts, seconds))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HostPeaks:
        return cls(
            **data
            | {
                "read": tuple(ReadRate(**rate) for rate in data["read"]),
                "matrix": tuple(MatrixRate(**rate) for rate in data["matrix"]),
                "attention": AttentionRate(**data["attention"]) if data["attention"] else None,
            }
        )


def host_peaks(
    config: DecoderConfig,
    compute: Compute,
    kernels: Kernels,
    cache: CacheKind | None,
    *,
    threads: int,
    measure: bool = True,
    again: bool = False,
) -> HostPeaks | None:
    """This host's peaks for a model's shapes, from the cache, else measured now (some seconds) and kept.

    cache: the kind of the key-value cache that attention reads; None leaves attention out.
    measure=False: None instead of measuring. again: measure whatever the cache holds. The cache is keyed by the
    processor, the threads, the arithmetic, the kernels' source and the shapes.
    """
    place = _place(config, compute, kernels, cache, threads)
    found = None if again else kept(place)
    if found is not None:
        try:
            return HostPeaks.from_dict(found)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be used (%s); measuring again", place, error)
    if not (measure or again):
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        peaks = _measure(config, compute, kernels, cache, threads)
    finally:
        torch.set_num_threads(before)
        give_back_freed_memory()
    keep(place, peaks.as_dict())
    return peaks


def _place(config: DecoderConfig, compute: Compute, kernels: Kernels, cache: CacheKind | None, threads: int) -> Path:
    code = [file.read_bytes() for file in (*SOURCES, *HEADERS, Path(linear.__file__))]
    marks = [FORMAT, processor_marks(), threads, compute, kernels.name, cache, torch.__version__]
    marks += [model_matrices(config), config.heads, config.kv_heads, config.head_dim]
    return measured_place("peaks", [*marks, *code])


def _measure(
    config: DecoderConfig, compute: Compute, kernels: Kernels, cache: CacheKind | None, threads: int
) -> HostPeaks:
    with torch.inference_mode():
        shapes = dict.fromkeys([*((m.inputs, m.outputs) for m in model_matrices(config)), (LARGE, LARGE)])
        matrix = [rate for inputs, outputs in shapes for rate in matrix_rates(inputs, outputs, kernels)]
        read = tuple(ReadRate(size, read_rate(size)) for size in WORKING_SETS)
        library = _library_rate(compute)
        attention = None if cache is None else _attention_rate(config, kernels, cache)
    return HostPeaks(
        processor=processor_marks().split("\n")[0].partition(":")[2].strip(),
        threads=threads,
        compute=compute,
        kernels=kernels.name,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        read=read,
        matrix=tuple(matrix),
        library_operations_per_s=library,
        attention=attention,
    )


def matrix_rates(
    inputs: int,
    outputs: int,
    kernels: Kernels,
    *,
    row_counts: Iterable[int] = ROWS,
    weight: RotatedTensor | None = None,
) -> list[MatrixRate]:
    """The kernels' own product, at each number of rows. weight: [outputs, inputs], random in float32 unless given."""
    generator = torch.Generator().manual_seed(0)
    layer = kernels.linear("peaks", torch.randn((outputs, inputs), generator=generator) if weight is None else weight)
    rates = []
    for count in row_counts:
        # The norm kernel makes rows of just the form that the layer takes, whatever the arithmetic.
        rows = kernels.norm(torch.randn((count, inputs), generator=generator), torch.ones(inputs))
        seconds = best_seconds(partial(layer, rows))
        rates.append(MatrixRate(count, inputs, outputs, 2 * count * inputs * outputs / seconds))
    return rates


def _library_rate(compute: Compute) -> float:
    """Operations a second of PyTorch's own product, [LIBRARY_ROWS, LARGE] x [LARGE, LARGE]."""
    layer = linear.make_linear("peaks", torch.randn((LARGE, LARGE)), compute)
    values = torch.randn((LIBRARY_ROWS, LARGE))
    if compute == "int8":
        rows = Rows((values * 30).clamp(-127, 127).to(torch.int8), torch.ones(LIBRARY_ROWS))
    else:
        rows = Rows(values.to(torch.bfloat16) if compute == "bf16" else values, None)
    return 2 * LIBRARY_ROWS * LARGE * LARGE / best_seconds(partial(layer, rows))


def _attention_rate(config: DecoderConfig, kernels: Kernels, cache: CacheKind) -> AttentionRate:
    pages = pages_for(ATTENTION_CONTEXT)
    layer = KeyValueCache(config, ATTENTION_SEQUENCES * pages, cache).layers[0]
    layer.pages.zero_()  # written, and so really there
    slices = []
    for index in range(ATTENTION_SEQUENCES):
        sequence = lone_sequence([0] * ATTENTION_CONTEXT)
        sequence.pages = list(range(index * pages, (index + 1) * pages))
        slices.append(Slice(sequence, ATTENTION_CONTEXT - 1, 1))
    one = slices[0].sequence
    decoding, prefilling = build_batch(slices), build_batch([Slice(one, 0, ATTENTION_CONTEXT)])

    def seconds(batch: StepBatch) -> float:
        queries = torch.randn((len(batch.token_ids), config.query_size))
        return best_seconds(partial(kernels.attend, queries, batch, layer))

    decode, prefill = seconds(decoding), seconds(prefilling)
    pairs = ATTENTION_SEQUENCES * ATTENTION_CONTEXT
    return AttentionRate(
        decode_bytes_per_s=layer.pages.nbytes / decode,
        decode_operations_per_s=4 * config.query_size * pairs / decode,
        prefill_operations_per_s=2 * config.query_size * ATTENTION_CONTEXT * (ATTENTION_CONTEXT + 1) / prefill,
    )


def read_rate(size: int) -> float:
    """Bytes a second of the faster of two plain passes over a buffer: a sum, and a product with a short vector."""
    width = 4096
    buffer = torch.zeros((size // 4 // width, width))
    vector = torch.ones(width)
    return size / min(best_seconds(buffer.sum), best_seconds(lambda: torch.mv(buffer, vector)))


def best_seconds(act: Callable[[], object]) -> float:
    """The least seconds that it took in several tries."""
    act()
    best = float("inf")
    started = time.perf_counter()
    enough, at_most = started + SECONDS_A_RATE, started + 5 * SECONDS_A_RATE
    tries = 0
    # A long try is a slow act, or one that was held up by others: then some more may still show the peak.
    while not tries or started < enough or (tries < TRIES and started < at_most):
        act()
        finished = time.perf_counter()
        best, started = min(best, finished - started), finished
        tries += 1
    return best

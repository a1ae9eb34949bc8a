"""What this host is and gives: capacities within its limits, and measured rates of disk, memory, copies, arithmetic.

The planner itself measures a layer of the model at hand (`layer_rates`); this is the host without any model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from inference.kernels.base import Compute, Kernels
from inference.kernels.native import KernelsUnavailable, NativeKernels
from inference.kernels.native.build import HEADERS, SOURCES, processor_marks
from inference.kernels.reference import ReferenceKernels
from inference.memory.budget import available_memory_bytes, group_left_bytes, group_limit_bytes
from inference.model.config import DecoderConfig
from inference.planner.disk import DiskRate, disk_rate
from inference.planner.measured import keep, kept, measured_place
from inference.planner.peaks import best_seconds, matrix_rates, read_rate
from inference.quant.rotated import RotatedTensor, quantize_rotated

FORMAT = 1
ROWS = (1, 16, 64, 256, 512, 1024)
WIDTH = 4096
READ_BYTES = 512 * 2**20
COPY_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ArithmeticRate:
    """Operations a second of [rows, WIDTH] x [WIDTH, WIDTH]. kernel: the arithmetic, and how the weights lie in it."""

    kernel: str
    rows: int
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceRate:
    """A CUDA device: its memory, and copies of COPY_BYTES from and to pinned memory of the host."""

    name: str
    total_bytes: int
    free_bytes: int
    to_device_bytes_per_s: float
    from_device_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured. copy_bytes_per_s: of bytes copied within the host's memory, each counted once."""

    measured_at: str
    read_bytes_per_s: float
    copy_bytes_per_s: float
    arithmetic: tuple[ArithmeticRate, ...]
    devices: tuple[DeviceRate, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rates:
        return cls(
            **data
            | {
                "arithmetic": tuple(ArithmeticRate(**rate) for rate in data["arithmetic"]),
                "devices": tuple(DeviceRate(**rate) for rate in data["devices"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """memory_bytes: the machine's; group_limit_bytes: what control groups allow of it, group_left_bytes: what they
    leave now, None where none limits; available_bytes: what can be had now within both. folder: whose disk this is.
    """

    processor: str
    threads: int
    memory_bytes: int
    group_limit_bytes: int | None
    group_left_bytes: int | None
    available_bytes: int
    folder: str
    disk_free_bytes: int
    disk: DiskRate
    rates: Rates

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def hardware(folder: Path, *, threads: int, again: bool = False) -> Hardware:
    """The host as it is now. Rates are kept from before, and measured anew (some ten seconds) where the processor, the
    kernels' sources, the devices or, for the disk, the filesystem are others.

    folder: where layer images lie. again: measure whatever was kept. Raises StoreError where the disk is full.
    """
    disk = disk_rate(folder, again=again)
    return Hardware(
        processor=processor_marks().split("\n")[0].partition(":")[2].strip(),
        threads=threads,
        memory_bytes=int(psutil.virtual_memory().total),
        group_limit_bytes=group_limit_bytes(),
        group_left_bytes=group_left_bytes(),
        available_bytes=available_memory_bytes(),
        folder=str(folder),
        disk_free_bytes=int(psutil.disk_usage(os.fspath(folder)).free),
        disk=disk,
        rates=_rates(threads, again),
    )


def _rates(threads: int, again: bool) -> Rates:
    code = [file.read_bytes() for file in (*SOURCES, *HEADERS)]
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    marks = [FORMAT, processor_marks(), threads, torch.__version__, WIDTH, ROWS, devices, *code]
    place = measured_place("hosts", marks)
    found = None if again else kept(place)
    if found is not None:
        return Rates.from_dict(found)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            rates = _measure()
    finally:
        torch.set_num_threads(before)
    keep(place, asdict(rates))
    return rates


def _measure() -> Rates:
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    copying = best_seconds(lambda: target.copy_(source))
    return Rates(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        read_bytes_per_s=read_rate(READ_BYTES),
        copy_bytes_per_s=COPY_BYTES / copying,
        arithmetic=tuple(_arithmetic()),
        devices=tuple(_device(index) for index in range(torch.cuda.device_count())),
    )


def _arithmetic() -> Iterator[ArithmeticRate]:
    for name, kernels, weight in _variants():
        for rate in matrix_rates(WIDTH, WIDTH, kernels, row_counts=ROWS, weight=weight):
            yield ArithmeticRate(name, rate.rows, rate.operations_per_s)


def _variants() -> Iterator[tuple[str, Kernels, RotatedTensor | None]]:
    """The kernels for each arithmetic, and int8 once more with 4-bit weights that are expanded as they are used."""
    config = DecoderConfig(
        architecture="llama",
        vocab_size=2,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        layers=1,
        heads=WIDTH // 128,
        kv_heads=WIDTH // 128,
        head_dim=128,
        max_context=1,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
    )
    computes: tuple[Compute, ...] = ("int8", "bf16", "fp32")
    for compute in computes:
        try:
            kernels: Kernels = NativeKernels(config, compute)
        except KernelsUnavailable:
            kernels = ReferenceKernels(config, compute)
        yield compute, kernels, None
        if compute == "int8":
            weights = torch.randn((WIDTH, WIDTH), generator=torch.Generator().manual_seed(0)).numpy()
            yield "int8, 4-bit weights", kernels, quantize_rotated("hardware", weights)


def _device(index: int) -> DeviceRate:
    free, total = torch.cuda.mem_get_info(index)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(index)

    return DeviceRate(
        torch.cuda.get_device_name(index),
        total,
        free,
        COPY_BYTES / best_seconds(lambda: copy(there, here)),
        COPY_BYTES / best_seconds(lambda: copy(here, there)),
    )

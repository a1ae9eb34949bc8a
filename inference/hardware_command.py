"""`python -m inference hardware`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from inference.command_line import positive

if TYPE_CHECKING:
    from inference.planner.hardware import Hardware


def add_hardware(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = command.add_argument
    add("--folder", type=Path, help="whose disk to measure (default: where layer images lie)")
    add("--threads", type=positive, help="processor threads (default: all)")
    add("--measure-again", action="store_true", help="measure what is known from before, too")
    add("--json", action="store_true", help="print one JSON object")


def run_hardware(options: argparse.Namespace) -> int:
    import torch

    from inference.memory.folders import images_folder
    from inference.planner.disk import FILE_BYTES
    from inference.planner.hardware import hardware

    folder = images_folder(options.folder)
    print(
        f"what is not known from before is measured in about half a minute; for the disk, a file of "
        f"{size(FILE_BYTES)} is written in {folder}, read and removed",
        file=sys.stderr,
    )
    found = hardware(folder, threads=options.threads or torch.get_num_threads(), again=options.measure_again)
    if options.json:
        print(json.dumps(found.as_dict(), indent=1))
        return 0
    for line in _lines(found):
        print(line)
    return 0


def _lines(found: Hardware) -> Iterator[str]:
    disk, rates = found.disk, found.rates
    yield f"processor  {found.processor}, {found.threads} threads"
    yield f"memory     {size(found.memory_bytes)}, {size(found.available_bytes)} of it available"
    if found.group_limit_bytes is None or found.group_left_bytes is None:
        yield "           no control group limits this process"
    else:
        yield f"           control group: {size(found.group_limit_bytes)}, {size(found.group_left_bytes)} of it left"
    yield f"           {size(rates.read_bytes_per_s)}/s read, {size(rates.copy_bytes_per_s)}/s copied"
    how = "past the page cache" if disk.direct else "through the page cache: this filesystem reads no other way"
    yield f"disk       {size(found.disk_free_bytes)} free in {found.folder}"
    yield f"           {size(disk.bytes_per_s)}/s by {disk.readers} readers, {size(disk.chunk_bytes)} at a time, {how}"
    counts = sorted({rate.rows for rate in rates.arithmetic})
    table = {(rate.kernel, rate.rows): rate.operations_per_s / 1e9 for rate in rates.arithmetic}
    yield "arithmetic, G operations/s by rows" + "".join(f"{count:>8}" for count in counts)
    for kernel in dict.fromkeys(rate.kernel for rate in rates.arithmetic):
        yield f"  {kernel:32}" + "".join(f"{table[kernel, count]:8.0f}" for count in counts)
    for device in rates.devices:
        yield (
            f"device     {device.name}: {size(device.total_bytes)}, {size(device.free_bytes)} free when measured; "
            f"{size(device.to_device_bytes_per_s)}/s to it, {size(device.from_device_bytes_per_s)}/s from it"
        )
    if not rates.devices:
        yield "device     none that PyTorch sees"


def size(count: float) -> str:
    """Bytes for a person: 3.2 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"

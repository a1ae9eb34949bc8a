"""What the disk under a folder gives: reads as the ring makes them.

Bytes that go into the same small buffer again and again stay in the processor's caches, and come a third faster than
those that go to memory (2.1 against 1.5 GB/s on a virtual disk). The ring's go to memory, so these do.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import xxhash

from inference.errors import StoreError
from inference.kernels.native.build import processor_marks
from inference.memory.direct import CHUNK_BYTES, Buffer, DirectFile
from inference.planner.measured import measured_place, sampled

FORMAT = 5
READERS = 4
RING = 3  # buffers that they fill
FILE_BYTES = 512 * 2**20
BUFFER_BYTES = 32 * 2**20  # of each reader, gone through in a circle
LEAST_FREE = 2 * 2**30
LEAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Bytes a second of direct reads of CHUNK_BYTES by so many readers, checksums compared, over some seconds.

    write_bytes_per_s: of writes of CHUNK_BYTES, one after the other, until they are on the disk.
    direct: False where the filesystem refuses direct reads, and the page cache was read through.
    """

    bytes_per_s: float
    write_bytes_per_s: float
    readers: int
    chunk_bytes: int
    direct: bool
    measured_at: str


def disk_rate(folder: Path, *, again: bool = False, readers: int = READERS) -> DiskRate:
    """The rate of the disk that holds the folder, from the cache, else measured now.

    Measuring writes a file of FILE_BYTES into the folder, reads it for LEAST_SECONDS and removes it. StoreError where
    there is no room for it. Kept by device, processor, readers and chunk size, as `measured.sampled` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = measured_place(
        "disks", [FORMAT, os.stat(folder).st_dev, processor_marks(), psutil.boot_time() // 60, readers, CHUNK_BYTES]
    )

    def measure() -> tuple[dict[str, Any], bool]:
        with TrialFile(folder) as trial:
            rate = trial.read_for(LEAST_SECONDS, readers)
            measured_at = datetime.now(UTC).isoformat(timespec="seconds")
            found = DiskRate(rate, trial.write_bytes_per_s, readers, CHUNK_BYTES, trial.direct, measured_at)
            return asdict(found), True

    return DiskRate(**sampled(place, measure, again=again))


class TrialFile:
    """A file of FILE_BYTES to measure reads with; removed at the end of the block.

    direct: whether it is read past the page cache. write_bytes_per_s: at which it was written.
    """

    def __init__(self, folder: Path) -> None:
        """Raises StoreError where there is not LEAST_FREE of room."""
        folder.mkdir(parents=True, exist_ok=True)
        free = psutil.disk_usage(str(folder)).free
        if free < LEAST_FREE:
            raise StoreError(folder, f"has {free} bytes free; measuring the disk wants {LEAST_FREE}")
        self._path = folder / f".trial-{uuid.uuid4().hex[:8]}"
        self._file = DirectFile(self._path, create=True)
        self.direct = self._file.direct
        try:
            chunk = Buffer(CHUNK_BYTES)
            chunk.view[:] = os.urandom(CHUNK_BYTES)
            started = time.perf_counter()
            for start in range(0, FILE_BYTES, CHUNK_BYTES):
                self._file.write(chunk.view, start)
            self._file.sync()
            self.write_bytes_per_s = FILE_BYTES / (time.perf_counter() - started)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> TrialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def read_for(self, seconds: float, readers: int) -> float:
        """Bytes a second that so many threads read, for so long. Raises StoreError."""
        lock = threading.Lock()
        at, total, stopping = 0, 0, False
        failures: list[StoreError] = []
        buffers = [Buffer(BUFFER_BYTES) for _ in range(readers)]
        for buffer in buffers:
            buffer.tensor.fill_(0)  # memory that is really there

        def read(buffer: Buffer) -> None:
            nonlocal at, total
            for place in itertools.cycle(range(0, BUFFER_BYTES, CHUNK_BYTES)):
                with lock:
                    if stopping or failures:
                        return
                    start, at = at, (at + CHUNK_BYTES) % FILE_BYTES
                chunk = buffer.view[place : place + CHUNK_BYTES]
                try:
                    self._file.read(chunk, start)
                except StoreError as error:
                    failures.append(error)
                    return
                xxhash.xxh3_64_digest(chunk)
                with lock:
                    total += CHUNK_BYTES

        threads = [threading.Thread(target=read, args=(buffer,), daemon=True) for buffer in buffers]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        while not failures and (time.perf_counter() - started < seconds or not total):
            time.sleep(min(seconds, 0.01))
        read_bytes, elapsed = total, time.perf_counter() - started
        with lock:
            stopping = True
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return read_bytes / elapsed

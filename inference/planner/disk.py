"""What the disk under a folder gives: reads as the ring makes them, measured once and kept."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import xxhash

from inference.errors import StoreError
from inference.kernels.native.build import processor_marks
from inference.memory.direct import CHUNK_BYTES, Buffer, DirectFile
from inference.planner.measured import keep, kept, measured_place

FORMAT = 2
READERS = 2
FILE_BYTES = 512 * 2**20
LEAST_FREE = 2 * 2**30
LEAST_SECONDS = 2.0


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

    Measuring writes a file of FILE_BYTES into the folder, reads it for some seconds and removes it. StoreError where
    there is no room for it. Kept by device, processor, readers and chunk size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = measured_place(
        "disks", [FORMAT, os.stat(folder).st_dev, processor_marks(), psutil.boot_time() // 60, readers, CHUNK_BYTES]
    )
    found = None if again else kept(place)
    if found is not None:
        return DiskRate(**found)
    with TrialFile(folder) as trial:
        rate = DiskRate(
            trial.read_for(LEAST_SECONDS, readers),
            trial.write_bytes_per_s,
            readers,
            CHUNK_BYTES,
            trial.direct,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
    keep(place, asdict(rate))
    return rate


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

    def read_for(self, seconds: float, readers: int, meanwhile: Callable[[], object] | None = None) -> float:
        """Bytes a second that so many threads read, for so long or as long as `meanwhile` takes."""
        lock = threading.Lock()
        at, total, stopping = 0, 0, False

        def read() -> None:
            nonlocal at, total
            buffer = Buffer(CHUNK_BYTES)
            while not stopping:
                with lock:
                    start, at = at, (at + CHUNK_BYTES) % FILE_BYTES
                self._file.read(buffer.view, start)
                xxhash.xxh3_64_digest(buffer.view)
                with lock:
                    total += CHUNK_BYTES

        threads = [threading.Thread(target=read, daemon=True) for _ in range(readers)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        if meanwhile is None:
            time.sleep(seconds)
        else:
            meanwhile()
        read_bytes, elapsed = total, time.perf_counter() - started
        stopping = True
        for thread in threads:
            thread.join()
        return read_bytes / elapsed

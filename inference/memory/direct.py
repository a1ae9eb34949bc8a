"""Files read and written past the page cache, into memory at page borders.

What is streamed is read once a step and not again for a long time: in the page cache it would only push out what others
need, and under a memory limit it would count. So files are opened with O_DIRECT. Where a filesystem refuses that
(tmpfs, some network and overlay ones), they are read through the cache, and given up there at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from inference.errors import StoreError

ALIGNMENT = 4096
"""Of memory, offsets and lengths of direct reads and writes, in bytes."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes asked of the disk at a time: enough for its full rate, few enough for several threads to share a file."""
MOST_VIEWS = 1024
"""That the system takes in one call (IOV_MAX)."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def aligned(nbytes: int) -> int:
    """Bytes filled up to whole multiples of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Buffer:
    """Zeroed memory at a page border, lent by the system as it is first written. Freed with its last view.

    nbytes: filled up to whole pages. view: its bytes. tensor: the same as uint8 [nbytes].
    """

    def __init__(self, nbytes: int) -> None:
        """Raises MemoryError."""
        self.nbytes = aligned(max(1, nbytes))
        try:
            # Private: shared memory gets no huge pages on most hosts, and pinning its pages cost a read three times as
            # much of the processor (0.041 against 0.015 s a GB).
            memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{self.nbytes} bytes cannot be had for a buffer: {error.strerror}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer pages to pin for each read, and fewer to look up while computing. Refused where the kernel has none.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)


class DirectFile:
    """A file for reads and writes at multiples of ALIGNMENT, from any number of threads."""

    def __init__(self, path: Path, *, write: bool = False, create: bool = False) -> None:
        """write: may be written too. create: is made anew, or emptied. Raises StoreError."""
        self.path = path
        self._flags = (os.O_RDWR if write or create else os.O_RDONLY) | os.O_CLOEXEC
        self._handle = -1
        self.direct = hasattr(os, "O_DIRECT")
        self._open(os.O_CREAT | os.O_TRUNC if create else 0)

    def _open(self, flags: int) -> None:
        try:
            if self.direct:
                try:
                    self._handle = os.open(self.path, self._flags | flags | os.O_DIRECT, 0o600)
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            self.direct = False
            self._handle = os.open(self.path, self._flags | flags, 0o600)
        except OSError as error:
            raise self._trouble("cannot be opened", error) from error

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    @property
    def nbytes(self) -> int:
        """The file's length now; StoreError where that cannot be told."""
        try:
            return os.fstat(self._handle).st_size
        except OSError as error:
            raise self._trouble("cannot be read", error) from error

    @property
    def is_removed(self) -> bool:
        """Whether no folder names the file any more."""
        return os.fstat(self._handle).st_nlink == 0

    def read(self, view: memoryview, offset: int) -> None:
        """Fill the view from that byte on. StoreError where the file ends before, or the disk fails."""
        self.read_into([view], offset)

    def read_into(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill views, one after the other, with what follows one another in the file. Raises as `read`."""
        self._move(views, offset, writing=False)

    def write(self, view: memoryview, offset: int) -> None:
        """Write the view at that byte. StoreError where the disk is full or fails."""
        self.write_from([view], offset)

    def write_from(self, views: Sequence[memoryview], offset: int) -> None:
        """Write views, one after the other, from that byte on. Raises as `write`."""
        self._move(views, offset, writing=True)

    def _move(self, views: Sequence[memoryview], offset: int, *, writing: bool) -> None:
        move = os.pwritev if writing else os.preadv
        left, at, nbytes = list(views), 0, sum(map(len, views))
        while left:
            try:
                moved = move(self._handle, left[:MOST_VIEWS], offset + at)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._give_up_direct()
                    continue
                place = f"at byte {offset + at}"
                raise self._trouble(f"cannot be {'written' if writing else 'read'} {place}", error) from error
            if moved <= 0:
                raise StoreError(self.path, f"ends at byte {offset + at}; {offset + nbytes} bytes are needed")
            at += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if moved:
                left[0] = left[0][moved:]
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _give_up_direct(self) -> None:
        """Some filesystems take the flag and refuse the read."""
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def reserve(self, nbytes: int) -> None:
        """Take that many bytes of the disk now; StoreError, with what is free, where they are not to be had."""
        try:
            os.posix_fallocate(self._handle, 0, nbytes)
        except OSError as error:
            raise self._trouble(f"cannot be given {nbytes} bytes", error) from error

    def sync(self) -> None:
        """Return when all that was written is on the disk. Raises StoreError."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise self._trouble("cannot be written", error) from error

    def _trouble(self, what: str, error: OSError) -> StoreError:
        free = ""
        if error.errno in _FULL:
            free = f" ({shutil.disk_usage(self.path.parent).free} bytes are free)"
        return StoreError(self.path, f"{what}: {error.strerror}{free}")

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
from pathlib import Path
from types import TracebackType

import torch

from inference.errors import StoreError

ALIGNMENT = 4096
"""Of memory, offsets and lengths of direct reads and writes, in bytes."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes asked of the disk at a time: enough for its full rate, few enough for several threads to share a file."""
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
        self._move(view, offset, writing=False)

    def write(self, view: memoryview, offset: int) -> None:
        """Write the view at that byte. StoreError where the disk is full or fails."""
        self._move(view, offset, writing=True)

    def _move(self, view: memoryview, offset: int, *, writing: bool) -> None:
        move = os.pwritev if writing else os.preadv
        at = 0
        while at < len(view):
            try:
                moved = move(self._handle, [view[at:]], offset + at)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._give_up_direct()
                    continue
                place = f"at byte {offset + at}"
                raise self._trouble(f"cannot be {'written' if writing else 'read'} {place}", error) from error
            if moved <= 0:
                raise StoreError(self.path, f"ends at byte {offset + at}; {offset + len(view)} bytes are needed")
            at += moved
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, offset, len(view), os.POSIX_FADV_DONTNEED)

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

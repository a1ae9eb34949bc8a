"""Telling the C library to keep what is freed.

A step asks for the same large pieces of memory again and again. By default glibc gives each back to the system, which
zeroes it anew when it is next touched, page after page: a quarter of the time of steps of many rows on large models.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Some glibc versions take no more than this as the size from which on a piece is mapped by itself.
_MAPPED_FROM = (256 * 2**20, 32 * 2**20)
_KEPT_BYTES = 512 * 2**20


@functools.cache
def keep_freed_memory() -> bool:
    """Whether it could be had: once a process, where the C library is glibc. What is kept is no more than was in use
    at once."""
    try:
        library = ctypes.CDLL(None)
        mallopt, _ = library.mallopt, library.gnu_get_libc_version
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    mapped = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MAPPED_FROM)
    return mapped and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def give_back_freed_memory() -> bool:
    """Give what is freed and kept back to the system now; whether the C library can."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return bool(trim(0))

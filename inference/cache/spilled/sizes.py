"""What a spilled cache takes of memory and of disk, known before anything is made."""

from __future__ import annotations

from inference.cache.pages import pages_for
from inference.kernels.base import CacheKind, page_head_bytes
from inference.memory.direct import CHUNK_BYTES, aligned
from inference.model.config import DecoderConfig

BUFFERS = 3  # one is computed with, one is filled, one is written back
READERS = 2
# A buffer holds a sequence of full length, but no more than so many bytes, and at least so many where there are pages.
MOST_BUFFER_BYTES = 64 * 1024 * 1024
LEAST_BUFFER_BYTES = 16 * 1024 * 1024
# Reading over a gap of so many bytes is cheaper than asking the disk twice.
GAP_BYTES = 64 * 1024
_RECORD_BYTES = 9  # of a page's checksum, and whether it has been written


def layer_page_bytes(config: DecoderConfig, kind: CacheKind) -> int:
    """Bytes of one page in one layer."""
    return config.kv_heads * page_head_bytes(kind, config.head_dim)


def page_stride(config: DecoderConfig, kind: CacheKind) -> int:
    """Bytes from one page to the next, on disk and in buffers: at the borders that direct reads ask for."""
    return aligned(layer_page_bytes(config, kind))


def buffer_pages(config: DecoderConfig, kind: CacheKind, pages: int) -> int:
    """Pages of a layer that a buffer holds, of `pages` in all; no sequence can have more than these."""
    stride = page_stride(config, kind)
    longest = min(pages_for(config.max_context), max(1, MOST_BUFFER_BYTES // stride))
    return min(pages, max(longest, LEAST_BUFFER_BYTES // stride))


def pages_at_once(stride: int) -> int:
    """Pages that one call reads or writes."""
    return max(1, CHUNK_BYTES // stride)


def spilled_memory_bytes(config: DecoderConfig, kind: CacheKind, layers: int, pages: int) -> int:
    """Bytes of memory for that many spilled layers of `pages` pages: buffers, what gaps are read into, checksums."""
    if not layers:
        return 0
    buffers = BUFFERS * buffer_pages(config, kind, pages) * page_stride(config, kind)
    return buffers + GAP_BYTES + layers * pages * _RECORD_BYTES


def spilled_disk_bytes(config: DecoderConfig, kind: CacheKind, layers: int, pages: int) -> int:
    """Bytes of the file for that many spilled layers."""
    return layers * pages * page_stride(config, kind)

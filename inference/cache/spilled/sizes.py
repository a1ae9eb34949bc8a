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
_RECORD_BYTES = 9  # of a page's checksum, and whether it has been written


def layer_page_bytes(config: DecoderConfig, kind: CacheKind) -> int:
    """Bytes of one page in one layer."""
    return config.kv_heads * page_head_bytes(kind, config.head_dim)


def buffer_pages(config: DecoderConfig, kind: CacheKind, pages: int) -> int:
    """Pages of a layer that a buffer holds, of `pages` in all; no sequence can have more than these."""
    page_bytes = layer_page_bytes(config, kind)
    longest = min(pages_for(config.max_context), max(1, MOST_BUFFER_BYTES // page_bytes))
    return min(pages, max(longest, LEAST_BUFFER_BYTES // page_bytes))


def staging_bytes(page_bytes: int) -> int:
    """Bytes that pass between disk and buffers at a time: whole pages, at the borders that direct reads ask for."""
    stride = aligned(page_bytes)
    return max(1, CHUNK_BYTES // stride) * stride


def spilled_memory_bytes(
    config: DecoderConfig, kind: CacheKind, layers: int, pages: int, *, readers: int = READERS
) -> int:
    """Bytes of memory for that many spilled layers of `pages` pages: buffers, staging of each thread, checksums."""
    if not layers:
        return 0
    page_bytes = layer_page_bytes(config, kind)
    buffers = BUFFERS * aligned(buffer_pages(config, kind, pages) * page_bytes)
    return buffers + (readers + 1) * staging_bytes(page_bytes) + layers * pages * _RECORD_BYTES


def spilled_disk_bytes(config: DecoderConfig, kind: CacheKind, layers: int, pages: int) -> int:
    """Bytes of the file for that many spilled layers."""
    return layers * pages * aligned(layer_page_bytes(config, kind))

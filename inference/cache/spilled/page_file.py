"""Pages of some layers in one file, and the checksum of each: what comes back is what was written, or is lost."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence as Several
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from inference.cache.spilled.sizes import staging_bytes
from inference.errors import StoreError
from inference.memory.direct import Buffer, DirectFile, aligned

Bytes = npt.NDArray[np.uint8]

# Reading over a gap of so many bytes is cheaper than asking the disk twice.
GAP_BYTES = 64 * 1024


class Place(NamedTuple):
    """A page, and its place in a buffer."""

    page: int
    local: int


class LostPage(NamedTuple):
    page: int
    reason: str


class PageFile:
    """[layers, pages] of page_bytes each, in a file that has no name any more: it goes with the process.

    All of it is taken of the disk at once. Any number of threads may call, but none of them reads or writes a page that
    another one writes. bytes_read, bytes_written: of pages, so far, without what was read over.
    """

    def __init__(self, folder: Path, layers: Several[int], pages: int, page_bytes: int) -> None:
        """layers: their indices in the model, as errors name them. Raises StoreError, if the disk is full among others.

        The file lies in `folder`, which is made where need be.
        """
        self.page_bytes = page_bytes
        self.bytes_read = self.bytes_written = 0
        self._stride = aligned(page_bytes)
        self._layers = list(layers)
        self._pages = pages
        self._checksums = np.zeros((len(layers), pages), dtype=np.uint64)
        self._written = np.zeros((len(layers), pages), dtype=np.bool_)
        self._lost: dict[tuple[int, int], str] = {}
        self._counting = threading.Lock()
        self._staging = threading.local()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(folder, f"cannot hold the key-value cache: {error.strerror}") from None
        self._file = DirectFile(folder / f"key-value-cache-{os.getpid()}-{uuid.uuid4().hex[:8]}", create=True)
        self.path = self._file.path
        self.path.unlink()
        try:
            self._file.reserve(len(layers) * pages * self._stride)
        except StoreError:
            self._file.close()
            raise

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def spans(self, places: list[Place]) -> list[list[Place]]:
        """Places, sorted by page, in pieces that are read at once."""
        longest = staging_bytes(self.page_bytes) // self._stride
        gap = max(1, GAP_BYTES // self._stride)
        spans: list[list[Place]] = []
        for place in places:
            span = spans[-1] if spans else None
            if span is not None and place.page - span[-1].page <= gap and place.page - span[0].page < longest:
                span.append(place)
            else:
                spans.append([place])
        return spans

    def read(self, layer: int, span: list[Place], into: Bytes) -> list[LostPage]:
        """Fill rows of `into`, [any, page_bytes], with one of `spans`; returns those that cannot be had."""
        lost = [LostPage(page, reason) for page, _ in span if (reason := self._lost.get((layer, page))) is not None]
        for page, _ in span:
            if not self._written[layer, page] and (layer, page) not in self._lost:
                lost.append(LostPage(page, f"{self._named(layer, page)} has not been written"))
        if lost:
            return lost
        first, count = span[0].page, span[-1].page + 1 - span[0].page
        view, staged = self._stage(count)
        try:
            self._file.read(view, self._offset(layer, first))
        except StoreError as error:
            if len(span) == 1:
                return [LostPage(first, f"{self._named(layer, first)} is lost: {error.message}")]
            return [gone for place in span for gone in self.read(layer, [place], into)]
        for page, local in span:
            into[local] = staged[page - first]
            # Of what will be used, not of what it was copied from.
            if xxhash.xxh3_64_intdigest(into[local]) != int(self._checksums[layer, page]):
                lost.append(LostPage(page, f"{self._named(layer, page)} is not what was written there"))
        with self._counting:
            self.bytes_read += len(span) * self.page_bytes
        return lost

    def write(self, layer: int, places: list[Place], rows: Bytes) -> None:
        """Write rows of `rows`, [any, page_bytes], to pages. What cannot be written is lost, and told when read."""
        longest = staging_bytes(self.page_bytes) // self._stride
        run: list[Place] = []
        for place in places:
            if run and (place.page != run[-1].page + 1 or len(run) == longest):
                self._write_run(layer, run, rows)
                run = []
            run.append(place)
        if run:
            self._write_run(layer, run, rows)

    def _write_run(self, layer: int, run: list[Place], rows: Bytes) -> None:
        first = run[0].page
        view, staged = self._stage(len(run))
        for page, local in run:
            staged[page - first] = rows[local]
        try:
            self._file.write(view, self._offset(layer, first))
        except StoreError as error:
            for page, _ in run:
                self._lost[layer, page] = f"{self._named(layer, page)} is lost: {error.message}"
            return
        for page, local in run:
            self._checksums[layer, page] = xxhash.xxh3_64_intdigest(rows[local])
            self._written[layer, page] = True
            self._lost.pop((layer, page), None)
        with self._counting:
            self.bytes_written += len(run) * self.page_bytes

    def copy(self, layer: int, source: int, target: int) -> None:
        """Write one page's content over another's; the target is lost where that fails."""
        row = np.empty((1, self.page_bytes), dtype=np.uint8)
        lost = self.read(layer, [Place(source, 0)], row)
        if lost:
            self._lost[layer, target] = lost[0].reason
        else:
            self.write(layer, [Place(target, 0)], row)

    def forget(self, pages: list[int]) -> None:
        """Nobody may read these before they are written again."""
        self._written[:, pages] = False
        for layer in range(len(self._layers)):
            for page in pages:
                self._lost.pop((layer, page), None)

    def _offset(self, layer: int, page: int) -> int:
        return (layer * self._pages + page) * self._stride

    def _named(self, layer: int, page: int) -> str:
        begin = self._offset(layer, page)
        return f"page {page} of layer {self._layers[layer]} (bytes {begin} to {begin + self.page_bytes})"

    def _stage(self, pages: int) -> tuple[memoryview, Bytes]:
        """This thread's memory for so many pages, as the disk sees it, and as [pages, page_bytes]."""
        buffer = getattr(self._staging, "buffer", None)
        if buffer is None:
            buffer = self._staging.buffer = Buffer(staging_bytes(self.page_bytes))
        nbytes = pages * self._stride
        rows: Bytes = buffer.tensor[:nbytes].numpy().reshape(pages, self._stride)[:, : self.page_bytes]
        return buffer.view[:nbytes], rows

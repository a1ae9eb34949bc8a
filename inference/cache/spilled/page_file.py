"""Pages of some layers in one file, and the checksum of each: what comes back is what was written, or is lost."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from collections.abc import Sequence as Several
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from inference.cache.spilled.sizes import GAP_BYTES, pages_at_once
from inference.errors import StoreError
from inference.memory.direct import Buffer, DirectFile, aligned


class Place(NamedTuple):
    """A page, and its place in a buffer."""

    page: int
    local: int


class LostPage(NamedTuple):
    page: int
    reason: str


class PageBuffer:
    """Memory for pages, each of which the disk can be given and asked for as it lies there.

    rows: uint8 [pages, page_bytes], with gaps between them.
    """

    def __init__(self, pages: int, page_bytes: int) -> None:
        """Raises MemoryError."""
        self._stride = aligned(page_bytes)
        self._memory = Buffer(pages * self._stride)
        self.rows: torch.Tensor = self._memory.tensor[: pages * self._stride].view(pages, -1)[:, :page_bytes]
        self._rows = self.rows.numpy()

    def whole(self, run: list[Place]) -> memoryview:
        """Pages that follow one another, gaps included."""
        return self._memory.view[run[0].local * self._stride : (run[-1].local + 1) * self._stride]

    def checksum(self, local: int) -> int:
        return xxhash.xxh3_64_intdigest(self._rows[local])

    def clear(self, places: list[int]) -> None:
        """Fill pages with zeros."""
        self._rows[places] = 0


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
        self._unwanted = Buffer(GAP_BYTES).view  # read over, by any thread
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
        longest = pages_at_once(self._stride)
        gap = max(1, GAP_BYTES // self._stride)
        spans: list[list[Place]] = []
        for place in places:
            span = spans[-1] if spans else None
            if span is not None and place.page - span[-1].page <= gap and place.page - span[0].page < longest:
                span.append(place)
            else:
                spans.append([place])
        return spans

    def read(self, layer: int, span: list[Place], into: PageBuffer) -> list[LostPage]:
        """Fill pages with one of `spans`; returns those that cannot be had."""
        lost = [LostPage(page, reason) for page, _ in span if (reason := self._lost.get((layer, page))) is not None]
        for page, _ in span:
            if not self._written[layer, page] and (layer, page) not in self._lost:
                lost.append(LostPage(page, f"{self._named(layer, page)} has not been written"))
        if lost:
            return lost
        first = span[0].page
        views, at = [], first
        for run in _runs(span, len(span)):
            if over := run[0].page - at:
                views.append(self._unwanted[: over * self._stride])
            views.append(into.whole(run))
            at = run[-1].page + 1
        try:
            self._file.read_into(views, self._offset(layer, first))
        except StoreError as error:
            if len(span) == 1:
                return [LostPage(first, f"{self._named(layer, first)} is lost: {error.message}")]
            return [gone for place in span for gone in self.read(layer, [place], into)]
        for page, local in span:
            if into.checksum(local) != int(self._checksums[layer, page]):
                lost.append(LostPage(page, f"{self._named(layer, page)} is not what was written there"))
        with self._counting:
            self.bytes_read += len(span) * self.page_bytes
        return lost

    def write(self, layer: int, places: list[Place], source: PageBuffer) -> None:
        """Write pages, sorted. What cannot be written is lost, and told when read."""
        for run in _runs(places, pages_at_once(self._stride)):
            self._write_run(layer, run, source)

    def _write_run(self, layer: int, run: list[Place], source: PageBuffer) -> None:
        try:
            self._file.write(source.whole(run), self._offset(layer, run[0].page))
        except StoreError as error:
            for page, _ in run:
                self._lost[layer, page] = f"{self._named(layer, page)} is lost: {error.message}"
            return
        for page, local in run:
            self._checksums[layer, page] = source.checksum(local)
            self._written[layer, page] = True
            self._lost.pop((layer, page), None)
        with self._counting:
            self.bytes_written += len(run) * self.page_bytes

    def copy(self, layer: int, source: int, target: int) -> None:
        """Write one page's content over another's; the target is lost where that fails."""
        page = PageBuffer(1, self.page_bytes)
        lost = self.read(layer, [Place(source, 0)], page)
        if lost:
            self._lost[layer, target] = lost[0].reason
        else:
            self.write(layer, [Place(target, 0)], page)

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


def _runs(places: list[Place], longest: int) -> Iterator[list[Place]]:
    """Places, sorted by page, in pieces that follow one another both in the file and in memory."""
    run: list[Place] = []
    for place in places:
        if run and (place != (run[-1].page + 1, run[-1].local + 1) or len(run) == longest):
            yield run
            run = []
        run.append(place)
    if run:
        yield run

"""The token embedding, kept as it is stored: rows are dequantized as they are looked up."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import torch
import xxhash

from inference.errors import StoreError
from inference.quant.groupwise import Array, GroupwiseTensor
from inference.quant.rotated import RotatedTensor, dequantize_rotated
from inference.weights.store import Stored, StoreReader, numpy_type, verify_file

NAME = "embedding"


class TokenEmbedding(Protocol):
    nbytes: int
    """Bytes of memory that it holds."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [M] -> float32 [M, H]."""
        ...


class Embedding:
    """A table in memory."""

    def __init__(self, stored: Stored, device: torch.device | None = None) -> None:
        """stored: [V, ...]; copied, to that device's memory where one is named."""
        if isinstance(stored, RotatedTensor):
            stored = dequantize_rotated(stored)
        self._table: torch.Tensor | None = None
        if isinstance(stored, GroupwiseTensor):
            self._group = stored.group_size
            self._packed = stored.scheme == "int4"
            self._values = torch.from_numpy(stored.values.copy())
            self._scales = torch.from_numpy(stored.scales.astype(np.float32))
            minima = stored.minima
            self._minima = None if minima is None else torch.from_numpy(minima.astype(np.float32))
            self.nbytes = self._values.nbytes + self._scales.nbytes * (1 if minima is None else 2)
        elif stored.dtype == np.uint16:
            self._table = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
            self.nbytes = self._table.nbytes
        else:
            self._table = torch.from_numpy(stored.copy())
            self.nbytes = self._table.nbytes
        for name, held in vars(self).items() if device is not None else ():
            if isinstance(held, torch.Tensor):
                setattr(self, name, held.to(device))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [M] -> float32 [M, H]."""
        if self._table is not None:
            return self._table[token_ids].float()
        levels = self._values[token_ids]  # [M, H] or [M, H / 2]
        if self._packed:
            levels = torch.stack([levels & 0x0F, levels >> 4], dim=2).reshape(len(token_ids), -1)
        groups = levels.reshape(len(token_ids), -1, self._group).float()
        groups *= self._scales[token_ids][:, :, None]
        if self._minima is not None:
            groups += self._minima[token_ids][:, :, None]
        return groups.reshape(len(token_ids), -1)


class StreamedEmbedding:
    """Rows read from the store's file as they are looked up, each once a step.

    Their checksums (XXH3, 64 bits) are taken when the file is opened, and compared with each reading: 8 bytes of memory
    for each part of a row.
    """

    def __init__(self, reader: StoreReader) -> None:
        """Reads the whole file once, and compares its SHA-256 with the manifest's. Raises StoreError."""
        self._entry = reader.entry(NAME)
        self._path = reader.folder / self._entry.file
        verify_file(reader.folder, next(file for file in reader.manifest.files if file.name == self._entry.file))
        self._checksums = [_checksums(array) for array in reader.arrays(NAME).values()]
        self.nbytes = sum(sums.nbytes for sums in self._checksums)
        try:
            self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(self._path, f"cannot be opened: {error.strerror}") from None
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            os.close(handle)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [M] -> float32 [M, H]. Raises StoreError."""
        rows, places = torch.unique(token_ids.cpu(), return_inverse=True)
        return Embedding(self._read(rows.tolist()))(places).to(token_ids.device)

    def _read(self, rows: list[int]) -> Stored:
        if os.fstat(self._handle).st_nlink == 0:
            raise StoreError(self._path, "has been removed or replaced while it was in use")
        parts = [(part, part.bytes // self._entry.shape[0]) for part in self._entry.parts]
        if hasattr(os, "posix_fadvise"):
            # All at once to the disk, before the first is waited for.
            for part, width in parts:
                for row in rows:
                    os.posix_fadvise(self._handle, part.offset + row * width, width, os.POSIX_FADV_WILLNEED)
        arrays: dict[str, Array] = {}
        for (part, width), checksums in zip(parts, self._checksums, strict=True):
            array = np.empty((len(rows), *part.shape[1:]), dtype=numpy_type(part))
            view = array.data.cast("B")
            for at, row in enumerate(rows):
                self._read_row(view[at * width : (at + 1) * width], part.offset + row * width, int(checksums[row]))
            arrays[part.role] = array
        return StoreReader.assembled(self._entry, arrays)

    def _read_row(self, view: memoryview, offset: int, checksum: int) -> None:
        try:
            read = os.preadv(self._handle, [view], offset)
        except OSError as error:
            raise StoreError(self._path, f"cannot be read at byte {offset}: {error.strerror}") from None
        if read != len(view):
            raise StoreError(self._path, f"ends at byte {offset + read}; {offset + len(view)} bytes are needed")
        if xxhash.xxh3_64_intdigest(view) != checksum:
            raise StoreError(self._path, f"is damaged: bytes {offset} to {offset + read - 1} are not those stored")


def _checksums(array: Array) -> Array:
    """uint64 [V], of each row's bytes."""
    return np.fromiter((xxhash.xxh3_64_intdigest(row) for row in np.ascontiguousarray(array)), np.uint64, len(array))

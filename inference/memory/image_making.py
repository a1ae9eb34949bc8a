"""Makes layer images, one matrix in memory at a time, aside and renamed; and finds those that were made before."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from inference.errors import StoreError
from inference.memory.direct import CHUNK_BYTES, Buffer, DirectFile, aligned
from inference.memory.folders import FOLDER_VARIABLE, images_folder, sync_folder
from inference.memory.image import INDEX_NAME, ArrayPlace, ImageKey, LayerImage, MatrixPlace, UnitPlace

logger = logging.getLogger(__name__)


class Matrix(NamedTuple):
    """A matrix to be written. pieces: the arrays of its rows, some rows at a time; each array is all of its pieces."""

    name: str
    form: str
    pieces: Sequence[Mapping[str, torch.Tensor]]


class Unit(NamedTuple):
    """A unit to be written, its matrices made as they are asked for."""

    name: str
    matrices: Iterable[Matrix]


def image_for(
    key: ImageKey, units: Callable[[], Iterable[Unit]], *, total: int, expected_bytes: int, folder: Path | None = None
) -> LayerImage:
    """The image of that key, made now where there is none yet; whoever else wants it meanwhile waits.

    units: gives the units, total of them, in the order in which a step uses them. expected_bytes: of the files, nearly.
    folder: of images, see `images_folder`.
    Raises StoreError: a disk that is full, an image that is damaged or of something else, and what making units raises.
    """
    root = images_folder(folder)
    place = root / key.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{key.name}.lock"):
            if not (place / INDEX_NAME).is_file():
                for left in root.glob(f".{key.name}.*.partial"):  # by whoever was killed while at it
                    shutil.rmtree(left, ignore_errors=True)
                if place.exists():  # its index is gone, so nobody can use the rest
                    logger.warning("%s has no %s: it is made anew", place, INDEX_NAME)
                    shutil.rmtree(place, ignore_errors=True)
                _remove_outdated(root, key)
                _make(place, key, units(), total, expected_bytes)
    except OSError as error:
        raise _not_written(place, error, expected_bytes) from error
    except StoreError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise _not_written(place, error.__cause__, expected_bytes) from error
    image = LayerImage.load(place, key)
    image.check_files()
    return image


def _remove_outdated(root: Path, key: ImageKey) -> None:
    """Remove images of the same store and arithmetic in earlier layouts of the same kernels, unless in use."""
    for folder in sorted(root.glob(f"{key.store[:16]}-{key.compute}-*")):
        try:
            image = LayerImage.load(folder)
            with image.used(alone=True):
                if folder.name != key.name and image.key.is_another_layout_of(key):
                    logger.info("removing %s: its layout is no longer the kernels' own", folder)
                    shutil.rmtree(folder, ignore_errors=True)
        except (OSError, StoreError) as error:
            logger.info("%s stays: %s", folder, error)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits for every other process and thread that is in here. The system frees the lock of one that was killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _not_written(place: Path, error: OSError, expected_bytes: int) -> StoreError:
    told = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        told = f": {expected_bytes} bytes are needed, and {shutil.disk_usage(place.parent).free} are free"
    return StoreError(place, f"cannot be written: {error.strerror}{told}; nothing was left behind")


def _make(place: Path, key: ImageKey, units: Iterable[Unit], total: int, expected_bytes: int) -> None:
    free = shutil.disk_usage(place.parent).free
    if free < expected_bytes:
        raise StoreError(
            place,
            f"the disk is too full for the layers' image: {expected_bytes} bytes are needed, and {free} are free; free "
            f"some, or name another folder by {FOLDER_VARIABLE}",
        )
    logger.info("writing %s: %.1f GB of layers as the kernels compute with them", place, expected_bytes / 1e9)
    aside = place.parent / f".{place.name}.{uuid.uuid4().hex[:8]}.partial"
    aside.mkdir()
    try:
        places: list[UnitPlace] = []
        staging = Buffer(CHUNK_BYTES)
        started = time.monotonic()
        for unit in units:
            places.append(_write_unit(aside / f"{len(places):05d}.bin", unit, staging))
            written, seconds = sum(one.bytes for one in places), time.monotonic() - started
            logger.info(
                "%s: %s (%d of %d units), %.2f GB, %.0f s",
                place.name,
                unit.name,
                len(places),
                total,
                written / 1e9,
                seconds,
            )
        index = LayerImage(aside, key, tuple(places))
        with (aside / INDEX_NAME).open("w", encoding="utf-8") as file:
            file.write(index.to_json())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(aside)
        aside.rename(place)
        sync_folder(place.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_unit(path: Path, unit: Unit, staging: Buffer) -> UnitPlace:
    with DirectFile(path, create=True) as file:
        out = _ChunkWriter(file, staging)
        matrices = tuple(_write_matrix(out, matrix) for matrix in unit.matrices)
        out.finish()
        file.sync()
    return UnitPlace(unit.name, path.name, out.at, out.digest.hexdigest(), tuple(out.checksums), matrices)


def _write_matrix(out: _ChunkWriter, matrix: Matrix) -> MatrixPlace:
    arrays = []
    for name, first in matrix.pieces[0].items():
        parts = [piece[name] for piece in matrix.pieces]
        out.fill_page()
        offset = out.at
        for part in parts:
            out.write(part)
        shape = (sum(len(part) for part in parts), *first.shape[1:])
        arrays.append(ArrayPlace(name, str(first.dtype).removeprefix("torch."), shape, offset, out.at - offset))
    return MatrixPlace(matrix.name, matrix.form, tuple(arrays))


class _ChunkWriter:
    """Gathers bytes into whole chunks, and writes and sums up each."""

    def __init__(self, file: DirectFile, staging: Buffer) -> None:
        self.at = 0
        self.digest = hashlib.sha256()
        self.checksums: list[str] = []
        self._file = file
        self._staging = staging
        self._filled = 0

    def write(self, array: torch.Tensor) -> None:
        data = array.detach().contiguous().reshape(-1).view(torch.uint8)
        for part in _cut(data, CHUNK_BYTES - self._filled):
            self._staging.tensor[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self.at += len(part)
            if self._filled == CHUNK_BYTES:
                self._flush()

    def fill_page(self) -> None:
        missing = aligned(self.at) - self.at
        self._staging.tensor[self._filled : self._filled + missing] = 0
        self._filled += missing
        self.at += missing
        if self._filled == CHUNK_BYTES:
            self._flush()

    def finish(self) -> None:
        self.fill_page()
        if self._filled:
            self._flush()

    def _flush(self) -> None:
        chunk = self._staging.view[: self._filled]
        self.digest.update(chunk)
        self.checksums.append(xxhash.xxh3_64_hexdigest(chunk))
        self._file.write(chunk, self.at - self._filled)
        self._filled = 0


def _cut(data: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
    """A first part of at most that many elements, and then parts of a chunk at most."""
    if len(data):
        yield data[:first]
    for start in range(first, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]

"""The layer image: a model's matrices on disk in the form that the kernels compute with, a file for each unit.

A store holds weights at rest; before the kernels can use them they are unpacked, fused and laid out anew. An image is
what comes out of that, made once for a store, an arithmetic and a layout, so that a layer read from disk is computed
with as it is. A unit is what is read at a time: a layer, or the head. Arrays lie at whole pages, files are filled up
to whole pages, and each chunk of CHUNK_BYTES has a checksum (XXH3, 64 bits), compared whenever it is read. index.json
tells of all that; its own digest is in it. `image_making` writes and finds them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from inference.errors import StoreError
from inference.memory.direct import ALIGNMENT, CHUNK_BYTES

FORMAT = "penstock-image"
FORMAT_VERSION = 1
INDEX_NAME = "index.json"
_REMEDY = "remove the image's folder to have it made anew"

Views = dict[str, dict[str, torch.Tensor]]
"""The arrays of each of a unit's matrices, by their names."""


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """A run of a unit's file: `dtype` in PyTorch's words, without its name before it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """A matrix of a unit: its arrays are those of a product of that form (`Linear.arrays`)."""

    name: str
    form: str
    arrays: tuple[ArrayPlace, ...]


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """A unit's file. `checksums`: XXH3 of each chunk, 16 hexadecimal digits."""

    name: str
    file: str
    bytes: int
    sha256: str
    checksums: tuple[str, ...]
    matrices: tuple[MatrixPlace, ...]

    def views(self, memory: torch.Tensor) -> Views:
        """The unit's arrays in uint8 memory that holds its file."""
        return {
            matrix.name: {
                array.name: memory[array.offset : array.offset + array.bytes]
                .view(getattr(torch, array.dtype))
                .view(array.shape)
                for array in matrix.arrays
            }
            for matrix in self.matrices
        }


@dataclass(frozen=True, slots=True)
class ImageKey:
    """What an image is of: a store's digest, the arithmetic, and the layout that the kernels want."""

    store: str
    compute: str
    layout: str

    @property
    def name(self) -> str:
        """A folder's name: of the store first, so that a person finds the images of one."""
        of_kind = hashlib.sha256(f"{FORMAT_VERSION}\n{self.compute}\n{self.layout}".encode()).hexdigest()
        return f"{self.store[:16]}-{self.compute}-{of_kind[:12]}"

    def is_another_layout_of(self, other: ImageKey) -> bool:
        """Whether only the layout's own mark, its last word, differs: what an upgrade leaves behind."""
        mine, others = self.layout.rpartition(" "), other.layout.rpartition(" ")
        return (self.store, self.compute, mine[0]) == (other.store, other.compute, others[0]) and mine != others


@dataclass(frozen=True, slots=True)
class LayerImage:
    """An image's index. `units` in the order in which a step uses them."""

    folder: Path
    key: ImageKey
    units: tuple[UnitPlace, ...]

    @property
    def total_bytes(self) -> int:
        return sum(unit.bytes for unit in self.units)

    def unit(self, name: str) -> UnitPlace:
        """StoreError where the image has no such unit."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise StoreError(self.folder / INDEX_NAME, f"lists no unit {name!r}; {_REMEDY}")

    def path(self, unit: UnitPlace) -> Path:
        return self.folder / unit.file

    def to_json(self) -> str:
        body = _body(self.key, self.units)
        return json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n"

    @classmethod
    def load(cls, folder: Path, key: ImageKey | None = None) -> LayerImage:
        """Read an image's index. StoreError where it is missing, damaged, or of something else than the key."""
        path = folder / INDEX_NAME
        try:
            data = json.loads(path.read_text("utf-8"))
            if data.get("format") != FORMAT or data.get("format_version") != FORMAT_VERSION:
                raise ValueError(f"is no {FORMAT} of version {FORMAT_VERSION}")
            found = ImageKey(**data["key"])
            units = tuple(_unit_from(entry) for entry in data["units"])
            if data["digest"] != _digest(_body(found, units)):
                raise ValueError("its content is not what its digest was made of")
            for unit in units:
                _check(unit)
        except OSError as error:
            raise StoreError(path, f"cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(path, f"cannot be read: {error}; {_REMEDY}") from None
        if key is not None and found != key:
            raise StoreError(
                path,
                f"is of store {found.store[:16]} in {found.compute}, not of {key.store[:16]} in "
                f"{key.compute} and this layout; {_REMEDY}",
            )
        return cls(folder, found, units)

    def used(self, *, alone: bool = False) -> IO[bytes]:
        """A lock on the image, until the file is closed: shared by all who read it. alone: nobody else may hold one.

        OSError where the image is gone, or (alone) in use.
        """
        file = (self.folder / INDEX_NAME).open("rb")
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file

    def check_files(self) -> None:
        """StoreError, naming the file, where a unit's is missing or has another size. Reads none."""
        for unit in self.units:
            try:
                size = self.path(unit).stat().st_size
            except OSError as error:
                raise StoreError(self.path(unit), f"cannot be read: {error.strerror}; {_REMEDY}") from None
            if size != unit.bytes:
                raise StoreError(self.path(unit), f"has {size} bytes; {INDEX_NAME} says {unit.bytes}; {_REMEDY}")


def verify_image(folder: Path) -> LayerImage:
    """Read every file of an image and compare its SHA-256; StoreError names the first that does not match."""
    image = LayerImage.load(folder)
    image.check_files()
    for unit in image.units:
        digest = hashlib.sha256()
        with image.path(unit).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != unit.sha256:
            raise StoreError(
                image.path(unit), f"has SHA-256 {digest.hexdigest()}; {INDEX_NAME} says {unit.sha256}; {_REMEDY}"
            )
    return image


def _body(key: ImageKey, units: tuple[UnitPlace, ...]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "chunk_bytes": CHUNK_BYTES,
        "key": asdict(key),
        "units": [asdict(unit) for unit in units],
    }


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check(unit: UnitPlace) -> None:
    """ValueError where arrays lie outside of the file, or this one of its folder, or sizes and shapes do not agree."""
    if Path(unit.file).name != unit.file:
        raise ValueError(f"unit {unit.name} lies in {unit.file!r}, which is not in its folder")
    if unit.bytes % ALIGNMENT or len(unit.checksums) != -(-unit.bytes // CHUNK_BYTES):
        raise ValueError(f"unit {unit.name} has {unit.bytes} bytes and {len(unit.checksums)} checksums")
    for matrix in unit.matrices:
        for array in matrix.arrays:
            width: int = getattr(torch, array.dtype).itemsize
            wrong = array.offset < 0 or array.offset % ALIGNMENT or array.offset + array.bytes > unit.bytes
            if wrong or array.bytes != math.prod(array.shape) * width:
                raise ValueError(f"unit {unit.name}: array {array.name} of {matrix.name} does not lie in its file")


def _unit_from(entry: Mapping[str, Any]) -> UnitPlace:
    matrices = tuple(
        MatrixPlace(
            matrix["name"],
            matrix["form"],
            tuple(ArrayPlace(**{**array, "shape": tuple(array["shape"])}) for array in matrix["arrays"]),
        )
        for matrix in entry["matrices"]
    )
    return UnitPlace(**{**entry, "checksums": tuple(entry["checksums"]), "matrices": matrices})

"""The weight store on disk: a folder written aside and renamed, one page-aligned file a layer."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from inference.errors import StoreError
from inference.memory.folders import sync_folder
from inference.quant.groupwise import Array, GroupwiseTensor, dequantize
from inference.quant.rotated import ENCODING as ROTATED
from inference.quant.rotated import RotatedTensor, dequantize_rotated
from inference.weights.layout import check_layout
from inference.weights.manifest import MANIFEST_NAME, StoredTensor, StoreFile, StoreManifest, TensorPart

PAGE_BYTES = 4096
PART_ALIGNMENT = 64
_CHUNK = 8 * 1024 * 1024
_ALL = slice(None)

Stored = Array | GroupwiseTensor | RotatedTensor


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, read as a stream, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def bfloat16_to_float32(bits: Array) -> Array:
    """uint16 bit patterns of bfloat16 -> float32 of the same values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """float32 -> uint16 bit patterns of bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


class _FileWriter:
    """One file of the store: parts at aligned offsets, hashed as they are written, padded to whole pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("wb")
        self._digest = hashlib.sha256()
        self._at = 0

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._at += len(data)

    def _pad(self, alignment: int) -> None:
        self._write(bytes(-self._at % alignment))

    def part(self, role: str, dtype: str, array: Array) -> TensorPart:
        self._pad(PART_ALIGNMENT)
        offset = self._at
        self._write(np.ascontiguousarray(array).tobytes())
        return TensorPart(role, dtype, tuple(array.shape), offset, self._at - offset)

    def close(self) -> StoreFile:
        self._pad(PAGE_BYTES)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return StoreFile(self.path.name, self._at, self._digest.hexdigest())

    def abandon(self) -> None:
        self._file.close()


class StoreWriter:
    """Collects tensors into files of a folder that is not yet the store. Made by `writing_store`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[StoreFile] = []
        self.tensors: list[StoredTensor] = []

    @contextmanager
    def file(self, name: str) -> Iterator[_FileWriter]:
        writer = _FileWriter(self.folder / name)
        try:
            yield writer
            self.files.append(writer.close())
        finally:
            writer.abandon()

    def add(self, writer: _FileWriter, name: str, tensor: Array | GroupwiseTensor | RotatedTensor) -> None:
        """Write a tensor: quantized, or plain (float32, float16, or uint16 holding bfloat16 bits)."""
        if isinstance(tensor, GroupwiseTensor):
            pieces = [("values", tensor.values), ("scales", tensor.scales)]
            if tensor.minima is not None:
                pieces.append(("minima", tensor.minima))
            parts = tuple(writer.part(role, str(array.dtype), array) for role, array in pieces)
            shape, encoding, group_size = tensor.shape, str(tensor.scheme), tensor.group_size
        elif isinstance(tensor, RotatedTensor):
            roles = ("values", "steps", "offsets", "scales")
            pieces = [(role, getattr(tensor, role)) for role in roles]
            parts = tuple(writer.part(role, str(array.dtype), array) for role, array in pieces)
            shape, encoding, group_size = tensor.shape, ROTATED, tensor.group_size
        else:
            encoding = "bfloat16" if tensor.dtype == np.uint16 else str(tensor.dtype)
            parts = (writer.part("values", encoding, tensor),)
            shape, group_size = tuple(tensor.shape), 0
        self.tensors.append(StoredTensor(name, writer.path.name, shape, encoding, group_size, parts))

    def text(self, name: str, content: str) -> None:
        data = content.encode("utf-8", errors="surrogateescape")
        path = self.folder / name
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.files.append(StoreFile(name, len(data), hashlib.sha256(data).hexdigest()))


@contextmanager
def writing_store(store: Path) -> Iterator[StoreWriter]:
    """A folder beside `store` that becomes it when the block ends well, and disappears when it does not.

    Raises StoreError where the store exists already, or the disk is full.
    """
    if store.exists():
        raise StoreError(store, "exists already; remove it or name another folder")
    aside = store.parent / f".{store.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
    except OSError as error:
        raise StoreError(store, f"cannot be made: {error.strerror}") from None
    try:
        yield StoreWriter(aside)
        sync_folder(aside)
        try:
            aside.rename(store)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise StoreError(store, "was made by another import meanwhile") from error
            raise
        sync_folder(store.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(store.parent).free
            raise StoreError(store, f"the disk is full ({free} bytes free); nothing was left behind") from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_manifest(writer: StoreWriter, manifest: StoreManifest) -> None:
    path = writer.folder / MANIFEST_NAME
    with path.open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())


def verify_store(store: Path | str) -> StoreManifest:
    """Read every file of the store and compare size and SHA-256; StoreError names the first that does not match."""
    folder = Path(store)
    manifest = StoreManifest.load(folder)
    for entry in manifest.files:
        verify_file(folder, entry)
    return manifest


def verify_file(folder: Path, entry: StoreFile) -> None:
    """Read one file of a store and compare size and SHA-256; StoreError where they do not match."""
    path = folder / entry.name
    if not path.is_file():
        raise StoreError(path, "is missing")
    size = path.stat().st_size
    if size != entry.bytes:
        raise StoreError(path, f"has {size} bytes; the manifest says {entry.bytes}")
    found = sha256_of(path)
    if found != entry.sha256:
        raise StoreError(path, f"has SHA-256 {found}; the manifest says {entry.sha256}")


def numpy_type(part: TensorPart) -> Any:
    """The type of a part's elements; bfloat16 comes as uint16 bits."""
    return np.dtype(np.uint16 if part.dtype == "bfloat16" else part.dtype)


class StoreReader:
    """Reads tensors of a store as NumPy arrays. Files are mapped, one at a time."""

    def __init__(self, store: Path | str) -> None:
        """Raises StoreError where the manifest is missing, damaged, or contradicts itself."""
        self.folder = Path(store)
        self.manifest = StoreManifest.load(self.folder)
        try:
            check_layout(self.manifest)
        except (ValueError, TypeError) as error:
            raise StoreError(self.folder / MANIFEST_NAME, str(error)) from None
        self._by_name = {tensor.name: tensor for tensor in self.manifest.tensors}
        self._sizes = {entry.name: entry.bytes for entry in self.manifest.files}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def _map(self, file: str) -> Array:
        path = self.folder / file
        try:
            data: Array = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise StoreError(path, f"cannot be read: {error}") from None
        if len(data) != self._sizes.get(file):
            raise StoreError(path, f"has {len(data)} bytes; the manifest says {self._sizes.get(file)}")
        return data

    def entry(self, name: str) -> StoredTensor:
        """What the manifest says of a tensor. StoreError where it lists none of that name."""
        entry = self._by_name.get(name)
        if entry is None:
            raise StoreError(self.folder / MANIFEST_NAME, f"lists no tensor {name!r}")
        return entry

    def arrays(self, name: str) -> dict[str, Array]:
        """The parts that a tensor is stored in, by their roles, where the file is mapped."""
        entry = self.entry(name)
        data = self._map(entry.file)
        arrays: dict[str, Array] = {}
        for part in entry.parts:
            run = data[part.offset : part.offset + part.bytes]
            arrays[part.role] = np.frombuffer(run, dtype=numpy_type(part)).reshape(part.shape)
        return arrays

    def tensor(self, name: str, rows: slice = _ALL) -> Stored:
        """The tensor as stored, or some of its rows; bfloat16 comes as uint16 bits."""
        return self.assembled(self.entry(name), {role: array[rows] for role, array in self.arrays(name).items()})

    @staticmethod
    def assembled(entry: StoredTensor, arrays: dict[str, Array]) -> Stored:
        """The tensor of its parts, or of the same rows of each."""
        if entry.encoding == ROTATED:
            return RotatedTensor(entry.group_size, **arrays)
        if entry.encoding not in ("int4", "int8"):
            return arrays["values"]
        scheme: Any = entry.encoding
        return GroupwiseTensor(scheme, entry.group_size, arrays["values"], arrays["scales"], arrays.get("minima"))

    def float32(self, name: str, rows: slice = _ALL) -> Array:
        """The tensor's weights in float32, or those of some rows; dequantized where they are quantized."""
        tensor = self.tensor(name, rows)
        if isinstance(tensor, GroupwiseTensor):
            return dequantize(tensor)
        if isinstance(tensor, RotatedTensor):
            return dequantize_rotated(tensor)
        if tensor.dtype == np.uint16:
            return bfloat16_to_float32(tensor)
        return tensor.astype(np.float32)

    def forget_cached(self) -> None:
        """Ask the system to keep none of the files in its cache: they have been read, and will not be soon again."""
        for file in self._sizes:
            with contextlib.suppress(OSError), (self.folder / file).open("rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

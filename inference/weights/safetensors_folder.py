"""A reader of Hugging Face folders: config.json and safetensors files, never pickle.

Format: github.com/huggingface/safetensors, "Format": 8 bytes of header length, a JSON header, then the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference.errors import ModelFormatError
from inference.quant.groupwise import Array
from inference.weights.store import sha256_of

MAX_HEADER_BYTES = 100_000_000
_DTYPES: dict[str, tuple[Any, int]] = {"F32": (np.float32, 4), "F16": (np.float16, 2), "BF16": (np.uint16, 2)}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where a tensor lies: `offset` is within the file."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelFormatError where it is missing or no object."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelFormatError(path, "file", "is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(path, "file", f"is not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelFormatError(path, "file", f"holds a JSON {type(data).__name__}; an object is expected")
    return data


def read_header(path: Path) -> dict[str, SafeTensor]:
    """The tensors of one safetensors file, every length checked against the file's size."""
    size = path.stat().st_size
    if size < 8:
        raise ModelFormatError(path, "byte 0", f"{size} bytes are too few for the header length of 8")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelFormatError(path, "byte 0", f"claims a header of {length} bytes in a file of {size}: truncated?")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ModelFormatError(path, "byte 8", f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelFormatError(path, "byte 8", "the header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> SafeTensor:
    where = f"tensor {name!r}"
    try:
        kind = str(entry["dtype"])
        shape = tuple(int(extent) for extent in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelFormatError(path, where, "needs dtype, shape and two data_offsets") from None
    if not 0 <= begin <= end or start + end > size:
        raise ModelFormatError(path, where, f"needs bytes to {start + end}, but the file has {size}: truncated?")
    if kind in _DTYPES and (min(shape, default=1) < 0 or math.prod(shape) * _DTYPES[kind][1] != end - begin):
        raise ModelFormatError(path, where, f"shape {shape} of {kind} does not fill its {end - begin} bytes")
    return SafeTensor(path, name, kind, shape, start + begin, end - begin)


class SafetensorsFolder:
    """An open Hugging Face model folder: `config` and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        quantized = self.config.get("quantization_config")
        if quantized:
            how = quantized.get("quant_method") if isinstance(quantized, dict) else None
            raise ModelFormatError(
                path / "config.json",
                "key 'quantization_config'",
                f"says that the weights are quantized already ({how or 'somehow'}); folders in 16 or 32 bits are read",
            )
        self.files = self._weight_files()
        self.tensors: dict[str, SafeTensor] = {}
        for file in self.files:
            self.tensors.update(read_header(file))

    def _weight_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
            for name in names:
                if Path(name).name != name:
                    raise ModelFormatError(index, "weight_map", f"points outside the folder: {name!r}")
            files = [self.path / name for name in names]
        else:
            files = sorted(self.path.glob("*.safetensors"))
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise ModelFormatError(missing[0], "file", f"is named by {index.name} but missing")
        if not files:
            pickles = [*self.path.glob("*.bin"), *self.path.glob("*.pt"), *self.path.glob("*.pth")]
            hint = f"; {pickles[0].name} is a pickle, which is never loaded" if pickles else ""
            raise ModelFormatError(self.path, "folder", f"holds no safetensors file{hint}")
        return files

    def tensor(self, name: str, shape: tuple[int, ...]) -> SafeTensor:
        """The tensor of that name, which must have that shape and a floating type."""
        found = self.tensors.get(name)
        if found is None:
            raise ModelFormatError(self.path, f"tensor {name!r}", "is missing")
        if found.shape != shape:
            raise ModelFormatError(found.file, f"tensor {name!r}", f"has shape {found.shape}; {shape} expected")
        if found.kind not in _DTYPES:
            raise ModelFormatError(found.file, f"tensor {name!r}", f"is {found.kind}; {', '.join(_DTYPES)} are read")
        return found

    def floats(self, tensor: SafeTensor, start: int = 0, count: int | None = None) -> Array:
        """The tensor in its own precision: float32, float16, or uint16 holding bfloat16 bits.

        With `count`, only that many rows (of the last dimension) from row `start` on, as a matrix.
        """
        dtype, _ = _DTYPES[tensor.kind]
        width = tensor.shape[-1] if tensor.shape else 1
        row = width * np.dtype(dtype).itemsize
        wanted = tensor.nbytes if count is None else count * row
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset + start * row)
            data = file.read(wanted)
        if len(data) != wanted:
            raise ModelFormatError(tensor.file, f"tensor {tensor.name!r}", "the file shrank while it was read")
        return np.frombuffer(data, dtype=dtype).reshape(tensor.shape if count is None else (count, width))


def digest_of_files(files: list[Path]) -> str:
    """SHA-256 of the list of the files' own digests and names, in hexadecimal."""
    lines = "".join(f"{sha256_of(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()

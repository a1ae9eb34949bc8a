"""A reader of GGUF files (version 2 and 3, little-endian) that checks every length before it believes it.

Format: ggml/docs/gguf.md. Header, key-value pairs, tensor infos, padding to `general.alignment`, tensor data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference.errors import ModelFormatError
from inference.quant.groupwise import Array
from inference.quant.superblocks import dequantize_blocks
from inference.weights.store import float32_to_bfloat16

MAGIC = b"GGUF"
MAX_STRING_BYTES = 64 * 1024 * 1024
MAX_DIMENSIONS = 4

_SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

# Number, as ggml.h has it: name, weights to a block, bytes of a block.
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
# Types of whole numbers and of intermediate results, which no weight has.
_KNOWN_UNSUPPORTED = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"}
TENSOR_TYPES: dict[int, str] = {number: name for number, (name, _, _) in _TYPES.items()}
_BLOCKS: dict[str, tuple[int, int]] = {name: (weights, size) for name, weights, size in _TYPES.values()}
_FLOATS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is row-major (rows first), the reverse of GGUF's own order. `offset` in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through a mapped file; every read is checked against the end."""

    def __init__(self, path: Path, data: Array) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def fail(self, message: str) -> ModelFormatError:
        return ModelFormatError(self.path, f"byte {self.at}", message)

    def take(self, count: int, what: str) -> bytes:
        left = len(self.data) - self.at
        if count > left:
            raise self.fail(f"the file ends within {what}: {count} bytes expected, {left} left")
        piece = self.data[self.at : self.at + count].tobytes()
        self.at += count
        return piece

    def scalar(self, code: str, what: str) -> Any:
        layout = "<" + code
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        if length > MAX_STRING_BYTES:
            raise self.fail(f"{what} claims {length} bytes; at most {MAX_STRING_BYTES} are believed")
        # Vocabularies hold pieces that are no valid UTF-8; they must survive the round trip.
        return self.take(length, what).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, depth)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has value type {kind}, which GGUF does not define")
        return self.scalar(_SCALARS[kind], what)

    def array(self, what: str, depth: int) -> list[Any]:
        if depth > 3:
            raise self.fail(f"{what} nests arrays more than three deep")
        kind = self.scalar("I", what)
        count = self.scalar("Q", what)
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind]}"
            width = struct.calcsize("<" + _SCALARS[kind])
            if count > (len(self.data) - self.at) // width:
                raise self.fail(f"{what} claims {count} values of {width} bytes; the file ends before that")
            return list(struct.unpack(layout, self.take(count * width, what)))
        smallest = 8 if kind == _STRING else 12
        if count > (len(self.data) - self.at) // smallest:
            raise self.fail(f"{what} claims {count} entries; the file ends before that")
        return [self.value(kind, what, depth + 1) for _ in range(count)]


class GGUFFile:
    """An open GGUF file: `metadata` by key and `tensors` by name; bytes are read on demand from a memory map."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFormatError where the file is truncated or malformed, naming the byte or the tensor."""
        self.path = path
        size = path.stat().st_size
        if size < 24:
            raise ModelFormatError(path, "byte 0", f"{size} bytes are too few for a GGUF header of 24")
        self._data: Array = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(path, self._data)
        magic = cursor.take(4, "the magic")
        if magic != MAGIC:
            raise ModelFormatError(path, "byte 0", f"starts with {magic!r}; a GGUF file starts with {MAGIC!r}")
        self.version: int = cursor.scalar("I", "the version")
        if self.version not in (2, 3):
            raise ModelFormatError(path, "byte 4", f"GGUF version {self.version}; versions 2 and 3 are read")
        tensor_count = cursor.scalar("Q", "the tensor count")
        pair_count = cursor.scalar("Q", "the key count")
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string("a key")
            kind = cursor.scalar("I", f"key {key!r}")
            self.metadata[key] = cursor.value(kind, f"key {key!r}")
        infos = [self._tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFormatError(path, "key 'general.alignment'", f"is {alignment!r}; want a positive number")
        start = math.ceil(cursor.at / alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, kind_name, shape, offset in infos:
            self._place(name, kind_name, shape, start + offset, size)

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
        name = cursor.string("a tensor's name")
        what = f"tensor {name!r}"
        dimensions = cursor.scalar("I", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelFormatError(self.path, what, f"has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(cursor.scalar("Q", what) for _ in range(dimensions))
        kind = cursor.scalar("I", what)
        offset = cursor.scalar("Q", what)
        if kind not in TENSOR_TYPES:
            known = _KNOWN_UNSUPPORTED.get(kind, f"number {kind}")
            readable = ", ".join(TENSOR_TYPES.values())
            raise ModelFormatError(self.path, what, f"is of type {known}; the types read are {readable}")
        return name, TENSOR_TYPES[kind], shape[::-1], offset

    def _place(self, name: str, kind: str, shape: tuple[int, ...], offset: int, size: int) -> None:
        what = f"tensor {name!r}"
        elements = math.prod(shape)
        if elements < 1:
            raise ModelFormatError(self.path, what, f"has shape {shape}, which is empty")
        block_weights, block_bytes = _BLOCKS[kind]
        if shape[-1] % block_weights:
            message = f"rows of {shape[-1]} do not divide into {kind}'s blocks of {block_weights}"
            raise ModelFormatError(self.path, what, message)
        nbytes = elements // block_weights * block_bytes
        if offset + nbytes > size:
            raise ModelFormatError(
                self.path, what, f"needs bytes {offset} to {offset + nbytes}, but the file has only {size}: truncated?"
            )
        if name in self.tensors:
            raise ModelFormatError(self.path, what, "is listed twice")
        self.tensors[name] = GGUFTensor(name, kind, shape, offset, nbytes)

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A metadata value that must be there and of that Python type."""
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {type(value).__name__}"
            raise ModelFormatError(self.path, f"key {key!r}", f"{found}; it is needed")
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        """The tensor of that name, which must have that shape (rows first)."""
        found = self.tensors.get(name)
        if found is None:
            raise ModelFormatError(self.path, f"tensor {name!r}", "is missing")
        if found.shape != shape:
            raise ModelFormatError(self.path, f"tensor {name!r}", f"has shape {found.shape}; {shape} expected")
        return found

    def raw(self, tensor: GGUFTensor) -> Array:
        """The tensor's bytes, uint8 [nbytes], mapped and not copied."""
        return self._data[tensor.offset : tensor.offset + tensor.nbytes]

    def floats(self, tensor: GGUFTensor) -> Array:
        """An F32, F16 or BF16 tensor in its own precision: float32, float16, or uint16 holding bfloat16 bits.

        The few block types that `quant.blocks` does not take over come as bfloat16 too, rounded to nearest.
        """
        kind = _FLOATS.get(tensor.kind)
        if kind is None:
            return float32_to_bfloat16(dequantize_blocks(tensor.kind, self.raw(tensor), tensor.shape))
        return np.frombuffer(self.raw(tensor).tobytes(), dtype=kind).reshape(tensor.shape)

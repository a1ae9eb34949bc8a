"""Whether a store's manifest agrees with itself: compiled kernels and views of files believe what it says."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from inference.quant.rotated import ENCODING as ROTATED
from inference.quant.rotated import fits
from inference.weights.manifest import StoredTensor, StoreManifest
from inference.weights.shapes import tensor_shapes

_PLAIN = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
_GROUPWISE = {"int4": "uint8", "int8": "int8"}
_FACTORS = ("float16", "float32")

Part = tuple[tuple[str, ...], tuple[int, ...]]
"""The types that a part may be of, and its shape."""


def check_layout(manifest: StoreManifest) -> None:
    """Raises ValueError: a tensor of the model is missing or of another shape, or does not lie within its file."""
    sizes = {file.name: file.bytes for file in manifest.files}
    for name in sizes:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"names the file {name!r}, which is not in its folder")
    for tensor in manifest.tensors:
        _check_parts(tensor, sizes.get(tensor.file, -1))
    if manifest.config.is_foreign:
        return
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    for _, name, shape in tensor_shapes(manifest.config):
        if shapes.get(name) != shape:
            raise ValueError(f"tensor {name!r} is {shapes.get(name, 'missing')}; {shape} is what its model has")


def _check_parts(tensor: StoredTensor, file_bytes: int) -> None:
    wanted, optional = _parts(tensor)
    found = {part.role for part in tensor.parts}
    if len(found) != len(tensor.parts) or not set(wanted) - optional <= found <= set(wanted):
        raise ValueError(f"tensor {tensor.name!r} in {tensor.encoding} has the parts {sorted(found)}")
    for part in tensor.parts:
        dtypes, shape = wanted[part.role]
        where = f"tensor {tensor.name!r}: its {part.role}"
        if part.dtype not in dtypes or part.shape != shape:
            raise ValueError(f"{where} are {part.dtype} {part.shape}; {' or '.join(dtypes)} {shape} is right")
        width = np.dtype("uint16" if part.dtype == "bfloat16" else part.dtype).itemsize
        whole = all(type(number) is int for number in (part.offset, part.bytes, file_bytes))
        if not whole or part.bytes != math.prod(shape) * width or not 0 <= part.offset <= file_bytes - part.bytes:
            raise ValueError(
                f"{where} do not lie in {tensor.file!r}: bytes {part.offset} to {part.offset + part.bytes}"
            )


def _parts(tensor: StoredTensor) -> tuple[dict[str, Part], frozenset[str]]:
    """The parts of a tensor in that encoding, by their roles, and which of them need not be there."""
    shape, group, encoding = tensor.shape, tensor.group_size, tensor.encoding
    if not all(type(extent) is int and extent >= 1 for extent in shape):
        raise ValueError(f"tensor {tensor.name!r} has the shape {shape}")
    if type(group) is not int or not isinstance(encoding, str):
        raise ValueError(f"tensor {tensor.name!r} has the encoding {encoding!r}, in groups of {group!r}")
    if encoding in _PLAIN:
        return {"values": ((_PLAIN[encoding],), shape)}, frozenset()
    if encoding not in (*_GROUPWISE, ROTATED):
        raise ValueError(f"tensor {tensor.name!r} has the unknown encoding {encoding!r}")
    if len(shape) != 2 or group < 1 or shape[1] % group or shape[1] % 2:
        raise ValueError(f"tensor {tensor.name!r} of {shape} does not divide into groups of {group!r}")
    rows, columns = shape
    if encoding == ROTATED and not fits(columns, group):
        raise ValueError(f"tensor {tensor.name!r} of {shape} cannot be {ROTATED} in groups of {group}")
    packed, groups = (rows, columns // 2), (rows, columns // group)
    if encoding == ROTATED:
        return {
            "values": (("uint8",), packed),
            "steps": (("uint8",), groups),
            "offsets": (("int8",), groups),
            "scales": (("float32",), (rows,)),
        }, frozenset()
    values = packed if encoding == "int4" else shape
    return {
        "values": ((_GROUPWISE[encoding],), values),
        "scales": (_FACTORS, groups),
        "minima": (_FACTORS, groups),
    }, frozenset({"minima"})

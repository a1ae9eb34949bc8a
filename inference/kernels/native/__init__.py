"""The kernels in C++: compiled on the spot, kept in a user cache, called through ctypes (which releases the GIL)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from inference.kernels.base import CacheKind, Compute, LayerCache, Linear, Rows
from inference.kernels.native.build import KernelsUnavailable, compiled_library
from inference.kernels.native.calling import pointer, threads
from inference.kernels.native.families import SIGNATURES, FamilyKernels
from inference.kernels.native.layers import CACHE_KINDS, LayersTogether
from inference.kernels.native.linear import NibbleLinear, PackedLinear, packed_nbytes, padded
from inference.model.batch import StepBatch
from inference.model.config import NO_ROTATION, DecoderConfig
from inference.model.layers import DecoderLayer
from inference.model.linear import bound_linear, linear_nbytes, make_linear
from inference.model.rotary import rotary_tables
from inference.quant.groupwise import GroupwiseTensor
from inference.quant.rotated import RotatedTensor

__all__ = ["KernelsUnavailable", "NativeKernels", "compiled_library"]

_KINDS = {"fp32": 0, "bf16": 1, "int8": 2}
_UINT8 = 3
_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.uint8]


class NativeKernels:
    name = "native"

    def __init__(self, config: DecoderConfig, compute: Compute) -> None:
        """Raises KernelsUnavailable."""
        self._library = _bound(compiled_library(config))
        self._config = config
        self.compute = compute
        self.device = torch.device("cpu")
        packs = bool(self._library.penstock_has_dot_products())
        self._kind = _UINT8 if compute == "int8" and packs else _KINDS[compute]
        self.rows_at_once = 256 if self._kind == _UINT8 else None
        self.cache_kinds = _cache_kinds(compute, packs)
        self._tables = rotary_tables(config)
        self._families = FamilyKernels(self._library, config, self._kind)

    def takes(self, weight: GroupwiseTensor) -> bool:
        return False

    def linear(self, name: str, weight: torch.Tensor | RotatedTensor | GroupwiseTensor) -> Linear:
        assert not isinstance(weight, GroupwiseTensor), "not taken"
        if self._kind != _UINT8:
            return make_linear(name, weight, self.compute)
        if isinstance(weight, RotatedTensor):
            return NibbleLinear.of(self._library, name, weight)
        return PackedLinear.of(self._library, name, weight)

    def linear_nbytes(self, outputs: int, inputs: int, *, rotated_group: int = 0, int4_group: int = 0) -> int:
        if self._kind != _UINT8:
            return linear_nbytes(outputs, inputs, self.compute)
        return packed_nbytes(outputs, inputs, rotated_group)

    def bound(self, form: str, arrays: Mapping[str, torch.Tensor]) -> Linear:
        if form == PackedLinear.form and self._kind == _UINT8:
            return PackedLinear(self._library, **arrays)
        if form == NibbleLinear.form and self._kind == _UINT8:
            return NibbleLinear(self._library, **arrays)
        return bound_linear(form, arrays)

    def together(self, layers: Sequence[DecoderLayer]) -> LayersTogether | None:
        """All these layers in one call, for weights that stay where they are; None where it must be layer by layer."""
        if self._kind != _UINT8 or self.rows_at_once is None:
            return None
        return LayersTogether.of(self._library, self._config, self._tables, self.rows_at_once, layers)

    def _out(self, rows: int, width: int) -> Rows:
        """An empty result."""
        scales = torch.empty(rows, dtype=torch.float32) if self.compute == "int8" else None
        values = torch.empty((rows, padded(width) if self._kind == _UINT8 else width), dtype=_DTYPES[self._kind])
        return Rows(values, scales)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> Rows:
        if weight is None:
            return self._families.rows(x, self._out(*x.shape))
        return self._add_norm(x.contiguous(), None, None, weight)

    def norm_exact(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._library.penstock_add_norm(
            x.data_ptr(),
            None,
            None,
            weight.data_ptr(),
            self._config.rms_norm_eps,
            *x.shape,
            _KINDS["fp32"],
            out.data_ptr(),
            None,
            threads(),
        )
        return out

    def add_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        scales: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        post: torch.Tensor | None = None,
    ) -> Rows:
        if post is not None or weight is None:
            self.add(x, y, scales, post=post)
            return self.norm(x, weight)
        return self._add_norm(x, y, scales, weight)

    def add(
        self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None, *, post: torch.Tensor | None = None
    ) -> None:
        if post is not None:
            self._families.add_post(x, y, scales, post)
            return
        rows, width = x.shape
        self._library.penstock_add_norm(
            x.data_ptr(), y.data_ptr(), pointer(scales), None, 0.0, rows, width, 0, None, None, threads()
        )

    def _add_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, scales: torch.Tensor | None, weight: torch.Tensor | None
    ) -> Rows:
        rows, width = x.shape
        out = self._out(rows, width)
        self._library.penstock_add_norm(
            x.data_ptr(),
            pointer(y),
            pointer(scales),
            pointer(weight),
            self._config.rms_norm_eps,
            rows,
            width,
            self._kind,
            out.values.data_ptr(),
            pointer(out.scales),
            threads(),
        )
        return out

    def rotate_and_store(
        self,
        y: torch.Tensor,
        scales: torch.Tensor | None,
        batch: StepBatch,
        layer: LayerCache,
        *,
        rope: int = 0,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config, rows = self._config, y.shape[0]
        kind = CACHE_KINDS[layer.kind]
        q = torch.empty((rows, config.heads * self._library.penstock_query_bytes(kind)), dtype=torch.uint8)
        table = None if rope == NO_ROTATION else self._tables[rope]
        self._library.penstock_rotate_store(
            y.data_ptr(),
            pointer(scales),
            batch.rotations.data_ptr(),
            batch.slots.data_ptr(),
            None if table is None else table.cos.data_ptr(),
            None if table is None else table.sin.data_ptr(),
            rows,
            config.heads,
            config.kv_heads,
            pointer(q_norm),
            pointer(k_norm),
            config.rms_norm_eps,
            q_norm is not None and len(q_norm) > config.head_dim,
            0 if table is None else config.rotated,
            config.query_scale,
            q.data_ptr(),
            layer.pages.data_ptr(),
            layer.page_stride,
            kind,
            threads(),
        )
        return q

    def attend(self, q: torch.Tensor, batch: StepBatch, layer: LayerCache, *, window: int = 0) -> Rows:
        rows = q.shape[0]
        out = self._out(rows, self._config.query_size)
        scratch = torch.empty((rows, self._config.query_size), dtype=torch.float32)
        segments, width = batch.page_table.shape
        self._library.penstock_attend(
            q.data_ptr(),
            batch.positions.data_ptr(),
            layer.pages.data_ptr(),
            layer.page_stride,
            CACHE_KINDS[layer.kind],
            batch.segment_starts.data_ptr(),
            batch.page_table.data_ptr(),
            segments,
            width,
            self._config.kv_heads,
            window,
            self._config.attention_softcap,
            rows,
            self._kind,
            out.values.data_ptr(),
            pointer(out.scales),
            scratch.data_ptr(),
            threads(),
        )
        return out

    def silu_mul(self, y: torch.Tensor, scales: torch.Tensor | None) -> Rows:
        rows, width = y.shape[0], y.shape[1] // 2
        if self._config.activation != "silu":
            return self._families.gelu_mul(y, scales, self._out(rows, width))
        out = self._out(rows, width)
        self._library.penstock_silu_mul(
            y.data_ptr(),
            pointer(scales),
            rows,
            width,
            self._kind,
            out.values.data_ptr(),
            pointer(out.scales),
            threads(),
        )
        return out

    def route(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._families.route(rows, weights)

    def soft_cap(self, y: torch.Tensor, scales: torch.Tensor | None, cap: float) -> torch.Tensor:
        return self._families.soft_cap(y, scales, cap)


def _cache_kinds(compute: Compute, packs: bool) -> tuple[CacheKind, ...]:
    """Whole-number caches where the processor has dot products for them, by choice of their own only beside int8."""
    if not packs:
        return ("fp32", "bf16") if compute == "fp32" else ("bf16", "fp32")
    if compute == "int8":
        return ("int8", "int4", "bf16", "fp32")
    return ("fp32", "bf16", "int8", "int4") if compute == "fp32" else ("bf16", "fp32", "int8", "int4")


def _bound(path: Path) -> ctypes.CDLL:
    """The library with its argument types. It shares PyTorch's OpenMP threads: both ask for the same libgomp."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from None
    p, f, i, n = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
    signatures = {
        "penstock_add_norm": [p, p, p, p, f, n, n, i, p, p, i],
        "penstock_silu_mul": [p, p, n, n, i, p, p, i],
        "penstock_rotate_store": [p, p, p, p, p, p, n, i, i, p, p, f, i, i, f, p, p, n, i, i],
        "penstock_attend": [p, p, p, n, i, p, p, n, n, i, i, f, n, i, p, p, p, i],
        "penstock_pack": [p, n, n, p, p],
        "penstock_pack_nibbles": [p, p, p, n, n, n, p, p, p],
        "penstock_matmul": [p, n, n, p, p, p, n, p, p, n, n, p, i],
        "penstock_matmul_best": [p, n, n, p, p, p, n, p, p, n, n, p, p, i],
    }
    for name, arguments in (signatures | SIGNATURES).items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.penstock_has_dot_products.restype = ctypes.c_int
    library.penstock_step_bytes.restype = library.penstock_layer_bytes.restype = n
    library.penstock_layers.argtypes, library.penstock_layers.restype = [p, p, n, n, p], n
    library.penstock_query_bytes.argtypes, library.penstock_query_bytes.restype = [i], n
    return library

"""The kernels in C++: compiled on the spot, kept in a user cache, called through ctypes (which releases the GIL)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from inference.kernels.base import Compute, Rows
from inference.kernels.native.build import KernelsUnavailable, compiled_library
from inference.model.batch import StepBatch
from inference.model.config import DecoderConfig
from inference.model.rotary import rotary_tables

__all__ = ["KernelsUnavailable", "NativeKernels", "compiled_library"]

_KINDS = {"fp32": 0, "bf16": 1, "int8": 2}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class NativeKernels:
    name = "native"

    def __init__(self, config: DecoderConfig, compute: Compute) -> None:
        """Raises KernelsUnavailable."""
        lacking = _lacking(config)
        if lacking:
            raise KernelsUnavailable(f"{lacking} of {config.architecture} is not handled by the compiled kernels")
        self._library = _bound(compiled_library(config))
        self._config = config
        self._kind = _KINDS[compute]
        self._dtype = _DTYPES[compute]
        self._cos, self._sin = rotary_tables(config)[0]

    def _out(self, rows: int, width: int) -> tuple[Rows, torch.Tensor]:
        """An empty result, and float32 scratch of its size."""
        scratch = torch.empty((rows, width), dtype=torch.float32)
        if self._kind == _KINDS["fp32"]:
            return Rows(scratch, None), scratch
        scales = torch.empty(rows, dtype=torch.float32) if self._kind == _KINDS["int8"] else None
        return Rows(torch.empty((rows, width), dtype=self._dtype), scales), scratch

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> Rows:
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
            out.data_ptr(),
            _threads(),
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
        return self._add_norm(x, y, scales, weight)

    def add(
        self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None, *, post: torch.Tensor | None = None
    ) -> None:
        rows, width = x.shape
        self._library.penstock_add_norm(
            x.data_ptr(), y.data_ptr(), _pointer(scales), None, 0.0, rows, width, 0, None, None, None, _threads()
        )

    def _add_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, scales: torch.Tensor | None, weight: torch.Tensor | None
    ) -> Rows:
        rows, width = x.shape
        out, scratch = self._out(rows, width)
        self._library.penstock_add_norm(
            x.data_ptr(),
            _pointer(y),
            _pointer(scales),
            _pointer(weight),
            self._config.rms_norm_eps,
            rows,
            width,
            self._kind,
            out.values.data_ptr(),
            _pointer(out.scales),
            scratch.data_ptr(),
            _threads(),
        )
        return out

    def rotate_and_store(
        self,
        y: torch.Tensor,
        scales: torch.Tensor | None,
        batch: StepBatch,
        layer: torch.Tensor,
        *,
        rope: int = 0,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        config, rows = self._config, y.shape[0]
        q = torch.empty((rows, config.query_size), dtype=torch.float32)
        self._library.penstock_rotate_store(
            y.data_ptr(),
            _pointer(scales),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            rows,
            config.heads,
            config.kv_heads,
            config.head_dim**-0.5,
            q.data_ptr(),
            layer.data_ptr(),
            layer.dtype == torch.float32,
            _threads(),
        )
        return q

    def attend(self, q: torch.Tensor, batch: StepBatch, layer: torch.Tensor, *, window: int = 0) -> Rows:
        out, scratch = self._out(*q.shape)
        segments, width = batch.page_table.shape
        self._library.penstock_attend(
            q.data_ptr(),
            batch.positions.data_ptr(),
            layer.data_ptr(),
            layer.dtype == torch.float32,
            batch.segment_starts.data_ptr(),
            batch.page_table.data_ptr(),
            segments,
            width,
            self._config.kv_heads,
            q.shape[0],
            self._kind,
            out.values.data_ptr(),
            _pointer(out.scales),
            scratch.data_ptr(),
            _threads(),
        )
        return out

    def silu_mul(self, y: torch.Tensor, scales: torch.Tensor | None) -> Rows:
        rows, width = y.shape[0], y.shape[1] // 2
        out, scratch = self._out(rows, width)
        self._library.penstock_silu_mul(
            y.data_ptr(),
            _pointer(scales),
            rows,
            width,
            self._kind,
            out.values.data_ptr(),
            _pointer(out.scales),
            scratch.data_ptr(),
            _threads(),
        )
        return out

    def route(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights.expand(len(rows), -1, -1), rows[:, :, None])[:, :, 0]

    def soft_cap(self, y: torch.Tensor, scales: torch.Tensor | None, cap: float) -> torch.Tensor:
        return torch.tanh((y if scales is None else y * scales[:, None]) / cap) * cap


def _lacking(config: DecoderConfig) -> str:
    """The first thing that this model needs and these kernels have not got; "" where there is none."""
    needs = {
        "an attention window": any(config.windows),
        "the soft cap of attention": config.attention_softcap != 0,
        "the norm of queries and keys": config.qk_norm != "none",
        "a layer with a rotation of its own": any(config.ropes),
        "partial rotation": config.rotated != config.head_dim,
        "the scale of attention": config.attention_scale is not None,
        f"the activation {config.activation}": config.activation != "silu",
        "a norm after attention": config.norms != "pre",
        "a mixture of experts": config.experts is not None,
        "the soft cap of logits": config.logit_softcap != 0,
        "longrope": config.rope_scaling is not None and config.rope_scaling.kind == "longrope",
    }
    return next((what for what, needed in needs.items() if needed), "")


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads() -> int:
    return torch.get_num_threads()


def _bound(path: Path) -> ctypes.CDLL:
    """The library with its argument types. It shares PyTorch's OpenMP threads: both ask for the same libgomp."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from None
    p, f, i, n = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
    signatures = {
        "penstock_add_norm": [p, p, p, p, f, n, n, i, p, p, p, i],
        "penstock_silu_mul": [p, p, n, n, i, p, p, p, i],
        "penstock_rotate_store": [p, p, p, p, p, p, n, i, i, f, p, p, i, i],
        "penstock_attend": [p, p, p, i, p, p, n, n, i, n, i, p, p, p, i],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    return library

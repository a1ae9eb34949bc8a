"""The compiled kernels that only some families need."""

from __future__ import annotations

import ctypes

import torch

from inference.kernels.base import Rows
from inference.kernels.native.calling import pointer, threads
from inference.model.config import DecoderConfig

_P, _F, _I, _N = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64
SIGNATURES = {
    "penstock_add_post": [_P, _P, _P, _P, _F, _N, _N, _I],
    "penstock_rows": [_P, _N, _N, _I, _P, _P, _I],
    "penstock_gelu_mul": [_P, _P, _N, _N, _I, _I, _P, _P, _I],
    "penstock_soft_cap": [_P, _P, _F, _N, _N, _P, _I],
    "penstock_route": [_P, _P, _N, _N, _N, _P, _I],
}


class FamilyKernels:
    """Calls into the library; `out` is an empty result of the right kind."""

    def __init__(self, library: ctypes.CDLL, config: DecoderConfig, kind: int) -> None:
        self._library = library
        self._config = config
        self._kind = kind

    def add_post(self, x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor | None, post: torch.Tensor) -> None:
        """x += RMS norm of y * scales by `post`, in place."""
        self._library.penstock_add_post(
            x.data_ptr(),
            y.data_ptr(),
            pointer(scales),
            post.data_ptr(),
            self._config.rms_norm_eps,
            *x.shape,
            threads(),
        )

    def rows(self, x: torch.Tensor, out: Rows) -> Rows:
        """x as it is."""
        x = x.contiguous()
        self._library.penstock_rows(
            x.data_ptr(), *x.shape, self._kind, out.values.data_ptr(), pointer(out.scales), threads()
        )
        return out

    def gelu_mul(self, y: torch.Tensor, scales: torch.Tensor | None, out: Rows) -> Rows:
        """gelu(gate) * up of [M, 2 * I], by the config's kind of gelu."""
        self._library.penstock_gelu_mul(
            y.data_ptr(),
            pointer(scales),
            y.shape[0],
            y.shape[1] // 2,
            self._config.activation == "gelu_tanh",
            self._kind,
            out.values.data_ptr(),
            pointer(out.scales),
            threads(),
        )
        return out

    def soft_cap(self, y: torch.Tensor, scales: torch.Tensor | None, cap: float) -> torch.Tensor:
        out = torch.empty_like(y)
        self._library.penstock_soft_cap(y.data_ptr(), pointer(scales), cap, *y.shape, out.data_ptr(), threads())
        return out

    def route(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(rows), len(weights)), dtype=torch.float32)
        self._library.penstock_route(
            rows.data_ptr(), weights.data_ptr(), *rows.shape, len(weights), out.data_ptr(), threads()
        )
        return out

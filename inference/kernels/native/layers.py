"""All layers of a step in one native call: Python's part of a step would otherwise be a fifth of its time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from inference.kernels.base import Between, CacheKind, LayerCache
from inference.kernels.native.calling import pointer, threads
from inference.kernels.native.linear import PackedProduct, padded
from inference.model.batch import StepBatch
from inference.model.config import NO_ROTATION, DecoderConfig
from inference.model.feed_forward import CACHED_BYTES, Affine, GatedNetwork
from inference.model.layers import DecoderLayer
from inference.model.rotary import RotaryTable

CACHE_KINDS: dict[CacheKind, int] = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_ALIGNMENT = 64
_ALL_ROWS = 2**40
_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("panels", _P),
        ("nibbles", _P),
        ("factors", _P),
        ("group", _N),
        ("scales", _P),
        ("corrections", _P),
        ("tiles", _N),
        ("outputs", _N),
        ("bias", _P),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", _Matrix),
        ("o", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("attention_norm", _P),
        ("attention_post_norm", _P),
        ("q_norm", _P),
        ("k_norm", _P),
        ("mlp_post_norm", _P),
        ("mlp_norm", _P),
        ("cosines", _P),
        ("sines", _P),
        ("window", _N),
        ("rows_at_once", _N),
    )


class _Rows(ctypes.Structure):
    _fields_ = (("values", _P), ("stride", _N), ("scales", _P))


class _Step(ctypes.Structure):
    _fields_ = (
        ("x", _P),
        ("rows", _N),
        ("width", _N),
        ("rotations", _P),
        ("slots", _P),
        ("positions", _P),
        ("starts", _P),
        ("table", _P),
        ("segments", _N),
        ("table_width", _N),
        ("pages", _P),
        ("page_stride", _N),
        ("cache_kind", _N),
        ("heads", _N),
        ("kv_heads", _N),
        ("norm_all_heads", _N),
        ("rotated", _N),
        ("activation", _N),
        ("threads", _N),
        ("epsilon", _F),
        ("query_scale", _F),
        ("softcap", _F),
        ("normed", _Rows),
        ("attended", _Rows),
        ("activated", _Rows),
        ("projected", _P),
        ("added", _P),
        ("scratch", _P),
        ("queries", _P),
    )


class _Product(NamedTuple):
    matrix: PackedProduct
    bias: torch.Tensor | None


class _Parts(NamedTuple):
    """A layer's products."""

    qkv: _Product
    o: _Product
    gate_up: _Product
    down: _Product


class LayersTogether:
    """Layers whose weights stay where they are: the same arithmetic as layer by layer, and the same bits."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: DecoderConfig,
        tables: Sequence[RotaryTable],
        rows_at_once: int,
        layers: Sequence[DecoderLayer],
        parts: Sequence[_Parts],
    ) -> None:
        assert library.penstock_step_bytes() == ctypes.sizeof(_Step), "layers.cpp has another Step"
        assert library.penstock_layer_bytes() == ctypes.sizeof(_Layer), "layers.cpp has another Layer"
        self._library = library
        self._config = config
        self._kept = tuple(layers), tuple(tables)  # what the structures point into
        self._layers = (_Layer * len(layers))()
        for place, layer, products in zip(self._layers, layers, parts, strict=True):
            place.qkv, place.o, place.gate_up, place.down = map(_matrix, products)
            for name in ("attention_norm", "attention_post_norm", "q_norm", "k_norm", "mlp_post_norm", "mlp_norm"):
                setattr(place, name, pointer(getattr(layer, name)))
            if layer.shape.rope != NO_ROTATION:
                place.cosines = tables[layer.shape.rope].cos.data_ptr()
                place.sines = tables[layer.shape.rope].sin.data_ptr()
            place.window = layer.shape.window
            place.rows_at_once = rows_at_once if layer.feed_forward.nbytes <= CACHED_BYTES else _ALL_ROWS
        q_norm = layers[0].q_norm
        self._norms_all_heads = q_norm is not None and len(q_norm) > config.head_dim
        self._widest = max(max(one.qkv.matrix.outputs, one.gate_up.matrix.outputs) for one in parts)
        self._inner = max(one.gate_up.matrix.outputs // 2 for one in parts)

    @classmethod
    def of(
        cls,
        library: ctypes.CDLL,
        config: DecoderConfig,
        tables: Sequence[RotaryTable],
        rows_at_once: int,
        layers: Sequence[DecoderLayer],
    ) -> LayersTogether | None:
        """None for layers with experts or without a norm before each half, or whose products are watched."""
        parts = [_parts(layer) for layer in layers]
        plain = [one for one in parts if one is not None]
        return cls(library, config, tables, rows_at_once, layers, plain) if len(plain) == len(layers) else None

    def __call__(
        self, x: torch.Tensor, batch: StepBatch, caches: Sequence[LayerCache], between: Between | None = None
    ) -> None:
        """The residual stream x, float32 [M, H], becomes that after the last layer, in place."""
        config, (rows, width) = self._config, x.shape
        kind = CACHE_KINDS[caches[0].kind]
        pages = (ctypes.c_void_p * len(caches))(*(cache.pages.data_ptr() for cache in caches))
        query_bytes = config.heads * self._library.penstock_query_bytes(kind)
        strides = [padded(columns) for columns in (width, config.query_size, self._inner)]
        space = _Space(
            *(rows * size for stride in strides for size in (stride, 4)),
            *(rows * columns * 4 for columns in (self._widest, width, config.query_size)),
            rows * query_bytes,
        )
        take = iter(space.addresses)
        normed, attended, activated = (_Rows(next(take), stride, next(take)) for stride in strides)
        segments, table_width = batch.page_table.shape
        step = _Step(
            x.data_ptr(),
            rows,
            width,
            batch.rotations.data_ptr(),
            batch.slots.data_ptr(),
            batch.positions.data_ptr(),
            batch.segment_starts.data_ptr(),
            batch.page_table.data_ptr(),
            segments,
            table_width,
            ctypes.addressof(pages),
            caches[0].page_stride,
            kind,
            config.heads,
            config.kv_heads,
            self._norms_all_heads,
            config.rotated,
            _ACTIVATIONS[config.activation],
            threads(),
            config.rms_norm_eps,
            config.query_scale,
            config.attention_softcap,
            normed,
            attended,
            activated,
            *take,
        )
        due = None if between is None else ctypes.addressof(between.due)
        layer = 0
        while layer < len(self._layers):
            if between is not None:
                between.call()
            layer = self._library.penstock_layers(
                ctypes.addressof(step), ctypes.addressof(self._layers), layer, len(self._layers), due
            )


class _Space:
    """One piece of memory for several arrays of so many bytes, each on a cache line's border. Not zeroed."""

    def __init__(self, *sizes: int) -> None:
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._memory = torch.empty(places[-1] + _ALIGNMENT, dtype=torch.uint8)
        start = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.addresses = [start + place for place in places[:-1]]


def _parts(layer: DecoderLayer) -> _Parts | None:
    network = layer.feed_forward
    if layer.attention_norm is None or layer.mlp_norm is None or not isinstance(network, GatedNetwork):
        return None
    products = [_product(one) for one in (layer.qkv, layer.o, network.gate_up, network.down)]
    packed = [one for one in products if one is not None]
    return _Parts(*packed) if len(packed) == len(products) else None


def _product(affine: Affine) -> _Product | None:
    linear = affine.linear
    return _Product(linear, affine.bias) if isinstance(linear, PackedProduct) else None


def _matrix(product: _Product) -> _Matrix:
    matrix, bias = product
    panels, nibbles, factors = map(pointer, matrix.weights)
    return _Matrix(
        panels,
        nibbles,
        factors,
        matrix.group,
        matrix.scales.data_ptr(),
        matrix.corrections.data_ptr(),
        matrix.tiles,
        matrix.outputs,
        pointer(bias),
    )

"""A decoder's layers and head, wherever their matrices lie: in memory, or in a layer image and streamed from there."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from inference.errors import StoreError
from inference.kernels.base import Kernels, Linear
from inference.memory.image import ImageKey, LayerImage, UnitPlace, Views
from inference.memory.image_making import Matrix, Unit, image_for
from inference.memory.placement import Placement
from inference.memory.ring import LayerRing, StreamStats, read_units
from inference.model.layers import HEAD, DecoderLayer, LayerReader, unit_name

_HOUSE = Path(__file__).parents[1]
# What decides about the bytes of an image: how weights are read, fused, rounded and laid out.
_LAYING_OUT = (
    "quant/*.py",
    "model/layers.py",
    "model/linear.py",
    "device/products.py",
    "kernels/native/linear.py",
    "kernels/native/matmul.cpp",
    "kernels/native/*.h",
)


class Weights(Protocol):
    """layers, head: as they are between steps; only those that stay in memory can be computed with there."""

    layers: list[DecoderLayer]
    head: Linear | None
    nbytes: int
    """Bytes of memory that they hold."""

    @property
    def streams(self) -> bool:
        """Whether a step reads from disk."""
        ...

    @contextmanager
    def step(self, *, head: bool) -> Iterator[None]:
        """A step begins, and ends; whether it will use the head."""
        ...

    def in_order(self) -> Iterator[DecoderLayer]:
        """The layers of a step, each to be computed with until the next is asked for. Raises StoreError."""
        ...

    @contextmanager
    def for_head(self) -> Iterator[Linear]:
        """The head, to be computed with in the block, after the layers. Raises StoreError."""
        ...

    def stream_stats(self) -> StreamStats | None:
        """None where nothing is streamed."""
        ...

    def close(self) -> None:
        """Read no more."""
        ...


class WeightsInMemory:
    streams = False

    def __init__(self, layers: list[DecoderLayer], head: Linear | None) -> None:
        self.layers = layers
        self.head = head
        self.nbytes = sum(layer.nbytes for layer in layers) + (0 if head is None else head.nbytes)

    @classmethod
    def read(cls, parts: LayerReader) -> WeightsInMemory:
        """All of a store. Raises StoreError, QuantizationError."""
        layers = [parts.layer(index) for index in range(parts.config.layers)]
        if not parts.config.has_head:
            return cls(layers, None)
        names, factor = parts.head_product()
        return cls(layers, parts.linear(*names, factor=factor))

    @contextmanager
    def step(self, *, head: bool) -> Iterator[None]:
        yield

    def in_order(self) -> Iterator[DecoderLayer]:
        return iter(self.layers)

    @contextmanager
    def for_head(self) -> Iterator[Linear]:
        assert self.head is not None
        yield self.head

    def stream_stats(self) -> StreamStats | None:
        return None

    def close(self) -> None:
        pass


class StreamedWeights:
    """What the placement pins is read once, here; the rest whenever a step comes to it."""

    streams = True

    def __init__(self, parts: LayerReader, image: LayerImage, placement: Placement) -> None:
        """Raises StoreError, MemoryError; ValueError where the kernels have not got a matrix's form."""
        count = parts.config.layers
        pinned = [unit_name(index) for index in range(count) if index in placement.pinned]
        streamed = [unit_name(index) for index in range(count) if index not in placement.pinned]
        if parts.config.has_head:
            (pinned if placement.head_pinned else streamed).append(HEAD)
        held = read_units(image, pinned, placement.readers)
        self._ring = LayerRing(
            image,
            streamed,
            ring=placement.ring,
            readers=placement.readers,
            optional=HEAD if HEAD in streamed else None,
        )
        weakref.finalize(self, self._ring.stop)
        self._streamed = frozenset(streamed)
        kernels = parts.kernels

        def linears(name: str) -> dict[str, Linear]:
            views = held.get(name) or self._ring.first_views(name)
            return bound_products(kernels, image.unit(name), views)

        self.layers = [parts.layer(index, linears(unit_name(index))) for index in range(count)]
        self.head = linears(HEAD)[HEAD] if parts.config.has_head else None
        small = sum(layer.nbytes - sum(one.nbytes for one in layer.linears().values()) for layer in self.layers)
        self.nbytes = sum(image.unit(name).bytes for name in pinned) + self._ring.nbytes + small

    @contextmanager
    def step(self, *, head: bool) -> Iterator[None]:
        with self._ring.step(optional=head):
            yield

    def in_order(self) -> Iterator[DecoderLayer]:
        for index, layer in enumerate(self.layers):
            name = unit_name(index)
            if name not in self._streamed:
                yield layer
                continue
            with self._ring.unit(name) as views:
                yield layer.with_linears(_over(layer.linears(), views))

    @contextmanager
    def for_head(self) -> Iterator[Linear]:
        assert self.head is not None
        if HEAD not in self._streamed:
            yield self.head
            return
        with self._ring.unit(HEAD) as views:
            yield self.head.over(views[HEAD])

    def stream_stats(self) -> StreamStats | None:
        return self._ring.stats()

    def close(self) -> None:
        self._ring.close()


def bound_products(kernels: Kernels, unit: UnitPlace, views: Views) -> dict[str, Linear]:
    """A unit's products over its bytes in memory, by name. Raises ValueError for a form that they have not got."""
    return {matrix.name: kernels.bound(matrix.form, views[matrix.name]) for matrix in unit.matrices}


def _over(linears: Mapping[str, Linear], views: Views) -> dict[str, Linear]:
    return {name: linear.over(views[name]) for name, linear in linears.items()}


def layer_image(parts: LayerReader, folder: Path | None = None) -> LayerImage:
    """The image of a store's layers and head for these kernels; made where there is none yet. Raises StoreError.

    folder: of images; `folders.images_folder` tells where they are kept otherwise.
    """
    config = parts.config
    return image_for(
        _key(parts),
        lambda: _units(parts),
        total=config.layers + config.has_head,
        expected_bytes=matrices_nbytes(parts),
        folder=folder,
    )


def made_image(parts: LayerReader, folder: Path) -> LayerImage | None:
    """That image where it has been made and is whole, else None."""
    key = _key(parts)
    try:
        image = LayerImage.load(folder / key.name, key)
        image.check_files()
    except StoreError:
        return None
    return image


def _key(parts: LayerReader) -> ImageKey:
    return ImageKey(parts.reader.manifest.digest, parts.kernels.compute, _layout(parts.kernels))


def _units(parts: LayerReader) -> Iterator[Unit]:
    for index in range(parts.config.layers):
        yield Unit(unit_name(index), _matrices(parts, parts.products(index)))
        parts.reader.forget_cached()
    if parts.config.has_head:
        yield Unit(HEAD, _matrices(parts, {HEAD: parts.head_product()}))
        parts.reader.forget_cached()


def _matrices(parts: LayerReader, products: Mapping[str, tuple[tuple[str, ...], float]]) -> Iterable[Matrix]:
    for key, (names, factor) in products.items():
        pieces = parts.pieces(*names, factor=factor)
        yield Matrix(key, pieces[0].form, [piece.arrays() for piece in pieces])


def matrices_nbytes(parts: LayerReader) -> int:
    """Bytes of all that can be streamed, in the form that the kernels compute with; told from the manifest."""
    products = [product for index in range(parts.config.layers) for product in parts.products(index).values()]
    if parts.config.has_head:
        products.append(parts.head_product())
    return sum(parts.nbytes(names) for names, _ in products)


def _layout(kernels: Kernels) -> str:
    """Names the form that these kernels want matrices in; another for every change of what lays them out."""
    digest = hashlib.sha256()
    for pattern in _LAYING_OUT:
        for path in sorted(_HOUSE.glob(pattern)):
            digest.update(path.read_bytes())
    form = kernels.linear("trial", torch.zeros((16, 64))).form
    return f"{kernels.name} {form} {digest.hexdigest()[:16]}"

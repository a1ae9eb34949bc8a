"""A model's matrices over three tiers: the device, the host's page-locked memory, and the layer image on disk."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from inference.device.ring import DeviceRing
from inference.device.streams import lock_pages
from inference.kernels.base import Linear
from inference.memory.image import LayerImage, Views
from inference.memory.placement import Placement
from inference.memory.ring import LayerRing, StreamStats, read_flat
from inference.model.layers import HEAD, DecoderLayer, LayerReader, unit_name
from inference.model.residency import bound_products


class _HostUnits:
    """Units in the host's memory: some stay there, the others come from disk through a ring of buffers."""

    def __init__(self, image: LayerImage, hosted: list[str], on_disk: list[str], placement: Placement) -> None:
        self.held = read_flat(image, hosted, placement.readers)
        self._first = on_disk[0] if on_disk else None
        self.disk = LayerRing(image, on_disk, ring=placement.ring, readers=placement.readers) if on_disk else None

    def memories(self) -> list[torch.Tensor]:
        return [*self.held.values(), *(self.disk.memories() if self.disk is not None else ())]

    @contextmanager
    def unit(self, name: str) -> Iterator[torch.Tensor]:
        """Its bytes, uint8. Units from disk are asked for in order."""
        if name in self.held:
            yield self.held[name]
            return
        assert self.disk is not None
        if name == self._first:
            with self.disk.step(optional=False):  # a cycle begins; this ring has nothing optional
                pass
        with self.disk.memory(name) as memory:
            yield memory


class DeviceWeights:
    """What the placement pins lies on the device; all else is copied there as a step comes to it.

    nbytes: of device memory. host_nbytes: of the host's.
    """

    def __init__(self, parts: LayerReader, image: LayerImage, placement: Placement) -> None:
        """Raises StoreError, MemoryError, torch.OutOfMemoryError; ValueError for a placement that cannot work."""
        count, kernels = parts.config.layers, parts.kernels
        device = kernels.device
        names = [unit_name(index) for index in range(count)]
        pinned = {names[index] for index in placement.pinned}
        hosted = {names[index] for index in placement.hosted}
        if parts.config.has_head:
            names.append(HEAD)
            (pinned if placement.head_pinned else hosted).add(HEAD)
        copied = [name for name in names if name not in pinned]
        on_disk = [name for name in copied if name not in hosted]
        held: dict[str, Views] = {}
        for name in names:
            if name in pinned:
                unit = image.unit(name)
                held[name] = unit.views(read_flat(image, [name], placement.readers)[name].to(device))
        self._host = host = _HostUnits(image, [name for name in copied if name in hosted], on_disk, placement)
        for memory in host.memories():
            lock_pages(memory, device, self)
        self.host_nbytes = sum(memory.nbytes for memory in host.memories())
        self._ring: DeviceRing | None = None
        if copied:
            self._ring = DeviceRing(
                device,
                [image.unit(name) for name in copied],
                host.unit,
                ring=placement.device_ring,
                leaves=frozenset(on_disk),
                optional=HEAD if HEAD in copied else None,
            )
            weakref.finalize(self, _stop, self._ring, host.disk)
        self._copied = frozenset(copied)

        def linears(name: str) -> dict[str, Linear]:
            views = held.get(name)
            if views is None:
                assert self._ring is not None
                views = self._ring.views(name)
            return bound_products(kernels, image.unit(name), views)

        self.layers: list[DecoderLayer] = [parts.layer(index, linears(unit_name(index))) for index in range(count)]
        self.head = linears(HEAD)[HEAD] if parts.config.has_head else None
        small = sum(layer.nbytes - sum(one.nbytes for one in layer.linears().values()) for layer in self.layers)
        ring_nbytes = 0 if self._ring is None else self._ring.nbytes
        self.nbytes = sum(image.unit(name).bytes for name in pinned) + ring_nbytes + small

    @property
    def streams(self) -> bool:
        return self._ring is not None

    @contextmanager
    def step(self, *, head: bool) -> Iterator[None]:
        if self._ring is None:
            yield
            return
        with self._ring.step(optional=head):
            yield

    def in_order(self) -> Iterator[DecoderLayer]:
        for index, layer in enumerate(self.layers):
            name = unit_name(index)
            if name not in self._copied:
                yield layer
                continue
            assert self._ring is not None
            with self._ring.unit(name) as views:
                yield layer.with_linears({key: one.over(views[key]) for key, one in layer.linears().items()})

    @contextmanager
    def for_head(self) -> Iterator[Linear]:
        assert self.head is not None
        if HEAD not in self._copied:
            yield self.head
            return
        assert self._ring is not None
        with self._ring.unit(HEAD) as views:
            yield self.head.over(views[HEAD])

    def stream_stats(self) -> StreamStats | None:
        """bytes: read from disk. waited_seconds: for copies to the device, which may have waited for the disk."""
        if self._ring is None:
            return None
        read = self._host.disk.stats() if self._host.disk is not None else StreamStats()
        return StreamStats(
            read.bytes, read.reading_seconds, self._ring.waited_seconds, read.steps, self._ring.copied_bytes
        )

    def close(self) -> None:
        if self._ring is not None:
            self._ring.stop()
            if self._host.disk is not None:
                self._host.disk.close()
            self._ring.close()


def _stop(ring: DeviceRing, disk: LayerRing | None) -> None:
    ring.stop()
    if disk is not None:
        disk.stop()

"""Where the parts of a model lie while it runs: in memory, or on disk and read as they are used."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

LEAST_RING = 2
MOST_RING = MOST_READERS = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """What of a model stays in memory, and by how much of it the rest is streamed.

    pinned: layers whose matrices stay in memory. head_pinned: the head, a unit of its own after the last layer.
    embedding_pinned: False: its rows are read from the store's file as they are looked up. ring: buffers for the units
    that are streamed, 0 where none are; one is computed with while the others are filled. readers: threads that read,
    each one chunk at a time. spilled: layers whose keys and values lie on disk.
    Norms, biases and routers are small and always stay in memory.

    device: what computes, in PyTorch's words ("cuda:0"); None: the processor, out of the host's memory. On a device,
    what is pinned lies in its memory, the embedding too, unless embedding_pinned is False; hosted (head_hosted): layers
    that stay in the host's page-locked memory, while those neither pinned nor hosted are read from disk; both are
    copied through device_ring buffers on the device. The head is never on disk. hosted_cache: layers whose keys and
    values lie in the host's memory.
    """

    pinned: frozenset[int]
    head_pinned: bool = True
    embedding_pinned: bool = True
    ring: int = 0
    readers: int = 0
    spilled: frozenset[int] = frozenset()
    device: str | None = None
    hosted: frozenset[int] = frozenset()
    head_hosted: bool = False
    hosted_cache: frozenset[int] = frozenset()
    device_ring: int = 0

    def __post_init__(self) -> None:
        """ValueError, naming the field: plans come out of files."""
        for name in _LAYERS:
            layers = getattr(self, name)
            if not isinstance(layers, frozenset) or not all(type(layer) is int and layer >= 0 for layer in layers):
                raise ValueError(f"{name}: must be numbers of layers, from 0, not {layers!r}")
        for name, most in (("ring", MOST_RING), ("device_ring", MOST_RING), ("readers", MOST_READERS)):
            count = getattr(self, name)
            if type(count) is not int or not 0 <= count <= most:
                raise ValueError(f"{name}: must be a whole number from 0 to {most}, not {count!r}")
        for name in ("head_pinned", "embedding_pinned", "head_hosted"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be true or false, not {getattr(self, name)!r}")
        if self.device is None and (self.hosted or self.head_hosted or self.hosted_cache or self.device_ring):
            raise ValueError("device: None, while something is copied to one")
        if self.device is not None:
            self._check_device()
            return
        if self.ring and self.ring < LEAST_RING:
            raise ValueError(f"ring: {self.ring} buffer cannot be filled and used at once; at least {LEAST_RING}")
        if self.ring and self.readers < 1:
            raise ValueError("readers: at least 1 is needed where anything is streamed")
        if not self.head_pinned and not self.ring:
            raise ValueError(f"ring: the head is streamed, so there must be {LEAST_RING} buffers at least")

    def _check_device(self) -> None:
        if not isinstance(self.device, str) or re.fullmatch(r"cpu|cuda(:\d{1,2})?", self.device) is None:
            raise ValueError(f'device: must be None, "cpu", "cuda" or "cuda:N", not {self.device!r}')
        if self.head_pinned == self.head_hosted:
            raise ValueError("head: must be on the device or in the host's memory, one of both")
        if self.pinned & self.hosted:
            raise ValueError(f"hosted: layers {sorted(self.pinned & self.hosted)} are pinned to the device, too")
        if self.spilled:
            raise ValueError("spilled: a device's keys and values go to the host's memory, not to disk")
        if (self.hosted or self.head_hosted or self.ring) and self.device_ring < LEAST_RING:
            raise ValueError(f"device_ring: there must be {LEAST_RING} buffers at least for what is copied")
        if self.ring and (self.ring < LEAST_RING or self.readers < 1):
            raise ValueError(f"ring: {LEAST_RING} buffers and a reader at least are needed for what is read from disk")

    @classmethod
    def resident(cls, layers: int) -> Placement:
        """Everything in memory."""
        return cls(pinned=frozenset(range(layers)))

    def streams(self, layers: int, *, head: bool = True) -> bool:
        """Whether any matrix is streamed of a model of that many layers and, maybe, a head.

        ValueError where there is no ring for it, or where it is not that model's.
        """
        strange = sorted((self.pinned | self.spilled | self.hosted | self.hosted_cache).difference(range(layers)))
        if strange:
            raise ValueError(f"pinned, spilled, hosted: of {layers} layers there is no {strange[0]}")
        if self.device is not None:
            on_disk = not (self.pinned | self.hosted).issuperset(range(layers))
            if on_disk and not self.ring:
                raise ValueError(f"ring: layers are on disk, so there must be {LEAST_RING} buffers at least")
            return on_disk or bool(self.hosted) or (head and self.head_hosted)
        streamed = (head and not self.head_pinned) or not self.pinned.issuperset(range(layers))
        if streamed and not self.ring:
            raise ValueError(f"ring: layers are streamed, so there must be {LEAST_RING} buffers at least")
        return streamed

    def as_dict(self) -> dict[str, Any]:
        """Plain data, layers in order."""
        return asdict(self) | {name: sorted(getattr(self, name)) for name in _LAYERS}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Placement:
        return cls(**data | {name: frozenset(data[name]) for name in _LAYERS if name in data})


_LAYERS = ("pinned", "spilled", "hosted", "hosted_cache")

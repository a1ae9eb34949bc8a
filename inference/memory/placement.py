"""Where the parts of a model lie while it runs: in memory, or on disk and read as they are used."""

from __future__ import annotations

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
    """

    pinned: frozenset[int]
    head_pinned: bool = True
    embedding_pinned: bool = True
    ring: int = 0
    readers: int = 0
    spilled: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """ValueError, naming the field: plans come out of files."""
        for name, layers in (("pinned", self.pinned), ("spilled", self.spilled)):
            if not isinstance(layers, frozenset) or not all(type(layer) is int and layer >= 0 for layer in layers):
                raise ValueError(f"{name}: must be numbers of layers, from 0, not {layers!r}")
        for name, count, most in (("ring", self.ring, MOST_RING), ("readers", self.readers, MOST_READERS)):
            if type(count) is not int or not 0 <= count <= most:
                raise ValueError(f"{name}: must be a whole number from 0 to {most}, not {count!r}")
        for name in ("head_pinned", "embedding_pinned"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be true or false, not {getattr(self, name)!r}")
        if self.ring and self.ring < LEAST_RING:
            raise ValueError(f"ring: {self.ring} buffer cannot be filled and used at once; at least {LEAST_RING}")
        if self.ring and self.readers < 1:
            raise ValueError("readers: at least 1 is needed where anything is streamed")
        if not self.head_pinned and not self.ring:
            raise ValueError(f"ring: the head is streamed, so there must be {LEAST_RING} buffers at least")

    @classmethod
    def resident(cls, layers: int) -> Placement:
        """Everything in memory."""
        return cls(pinned=frozenset(range(layers)))

    def streams(self, layers: int, *, head: bool = True) -> bool:
        """Whether any matrix is streamed of a model of that many layers and, maybe, a head.

        ValueError where there is no ring for it, or where it is not that model's.
        """
        strange = sorted((self.pinned | self.spilled).difference(range(layers)))
        if strange:
            raise ValueError(f"pinned, spilled: of {layers} layers there is no {strange[0]}")
        streamed = (head and not self.head_pinned) or not self.pinned.issuperset(range(layers))
        if streamed and not self.ring:
            raise ValueError(f"ring: layers are streamed, so there must be {LEAST_RING} buffers at least")
        return streamed

    def as_dict(self) -> dict[str, Any]:
        """Plain data, layers in order."""
        return asdict(self) | {"pinned": sorted(self.pinned), "spilled": sorted(self.spilled)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Placement:
        return cls(**data | {"pinned": frozenset(data["pinned"]), "spilled": frozenset(data["spilled"])})

"""What stays in memory and what lies on disk, by a mixed-integer linear program: the disk is to have least to do.

Unknowns: n layers' weights pinned; the head pinned or not, the embedding pinned or not; s layers' keys and values
spilled; and, as what they cost comes at once, whether anything is streamed at all (u), or spilled (v).

    least    (L - n) layer + (1 - head) head + (1 - embedding) rows looked up        bytes read, by the read rate
             + s (pages that a step reads)                                           bytes read, by the read rate
             + s (pages that a step writes)                                          bytes written, by the write rate
    memory   n layer + head + embedding + (L - s) cache of a layer
             + u ring of layers + (1 - head) (ring of heads - ring of layers) + v spilling buffers   <= what is left
    disk     u image + s file of a layer                                             <= what is given
    and      L - n <= L u,    1 - head <= u,    s <= L v
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from inference.cache.spilled.sizes import buffer_pages, spilled_disk_bytes, spilled_memory_bytes
from inference.kernels.base import CacheKind
from inference.memory.direct import aligned
from inference.memory.placement import LEAST_RING, Placement
from inference.planner.cost import StepLoad
from inference.planner.disk import READERS, RING
from inference.planner.sizes import ModelSizes

# Spilled pages are many small reads and writes, and cost the processor a copy each: not for a few percent.
WORTH_SPILLING = 0.8

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Need:
    """What is to be placed. pages: of the cache; longest_pages: of one sequence. step: a typical one. step_rows: of the
    largest. fixed_bytes: in memory, whatever is placed where.
    """

    sizes: ModelSizes
    cache: CacheKind
    pages: int
    longest_pages: int
    step: StepLoad
    step_rows: int
    fixed_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes in memory and on disk, and the disk's rates."""

    memory_bytes: int
    disk_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Placed:
    """host_bytes, disk_bytes: taken. streamed_bytes: of weights, read in each step."""

    placement: Placement
    host_bytes: int
    disk_bytes: int
    streamed_bytes: int


def place(need: Need, room: Room, most_pinned: int | None = None) -> Placed | None:
    """The placement with which the disk has least to do; None where there is none. most_pinned: layers, of weights.

    Keys and values are spilled only where nothing else fits, or the disk has much less to do then (WORTH_SPILLING).
    """
    kept = _best(need, room, most_pinned, spilling=False)
    if kept is not None and not kept.streamed_bytes:
        return kept
    spilled = _best(need, room, most_pinned, spilling=True)
    if kept is None or spilled is None:
        return spilled or kept
    return spilled if _disk_seconds(need, spilled, room) < WORTH_SPILLING * _disk_seconds(need, kept, room) else kept


def _disk_seconds(need: Need, placed: Placed, room: Room) -> float:
    page = len(placed.placement.spilled) * aligned(need.sizes.page_of_layer(need.cache))
    read = placed.streamed_bytes + page * need.step.pages_read
    return read / room.read_bytes_per_s + page * need.step.pages_written / room.write_bytes_per_s


def _best(need: Need, room: Room, most_pinned: int | None, *, spilling: bool) -> Placed | None:
    for ring in (RING, LEAST_RING):
        layers = len(need.sizes.layers)
        pinned = layers if most_pinned is None else most_pinned
        while (solution := _solved(need, room, ring, pinned, spilling)) is not None:
            found = _placed(need, solution, ring)
            if found.host_bytes <= room.memory_bytes:
                return found
            # Layers counted with their mean size; these are larger ones.
            if not solution.pinned:
                break
            pinned = solution.pinned - 1
    return None


@dataclass(frozen=True, slots=True)
class _Solution:
    pinned: int
    head: bool
    embedding: bool
    spilled: int


def _solved(need: Need, room: Room, ring: int, most_pinned: int, spilling: bool) -> _Solution | None:
    sizes, step = need.sizes, need.step
    config, count = sizes.config, len(sizes.layers)
    layer, page = sum(sizes.layers) / count, sizes.page_of_layer(need.cache)
    largest, head = max(sizes.layers), sizes.head
    row = sizes.embedding / config.vocab_size
    looked_up = min(sizes.embedding, need.step_rows * row)
    read, written = step.pages_read * aligned(page), step.pages_written * aligned(page)
    can_spill = spilling and need.longest_pages <= buffer_pages(config, need.cache, need.pages)
    buffers = spilled_memory_bytes(config, need.cache, count, need.pages)
    spill_file = spilled_disk_bytes(config, need.cache, 1, need.pages)
    more_for_heads = ring * (max(largest, head) - largest)
    # Unknowns:         n      head                  embedding        s                            u               v
    seconds = np.array([-layer, -head, -looked_up, read, 0.0, 0.0]) / room.read_bytes_per_s
    seconds[3] += written / room.write_bytes_per_s
    seconds[4:] += 1e-9  # no ring and no buffers for nothing
    memory = np.array([layer, head - more_for_heads, sizes.embedding, -need.pages * page, ring * largest, buffers])
    left = room.memory_bytes - need.fixed_bytes - count * need.pages * page - more_for_heads
    disk = np.array([0.0, 0.0, 0.0, spill_file, sizes.weights, 0.0])
    rules: list[tuple[Numbers, float]] = [
        (memory, left),
        (disk, room.disk_bytes),
        (np.array([-1.0, 0, 0, 0, -count, 0]), -count),  # L - n <= L u
        (np.array([0, -1.0, 0, 0, -1, 0]), -1.0),  # 1 - head <= u
        (np.array([0, 0, 0, 1.0, 0, -count]), 0.0),  # s <= L v
    ]
    found = milp(
        c=seconds,
        integrality=np.ones(6),
        bounds=Bounds(
            np.array([0, 0 if head else 1, 0, 0, 0, 0]),
            np.array([min(most_pinned, count), 1, 1, count if can_spill else 0, 1, 1]),
        ),
        constraints=LinearConstraint(np.array([rule for rule, _ in rules]), -np.inf, np.array([at for _, at in rules])),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    pinned, head_pinned, embedding, spilled = (round(value) for value in found.x[:4])
    return _Solution(pinned, bool(head_pinned), bool(embedding), spilled)


def _placed(need: Need, solution: _Solution, ring: int) -> Placed:
    sizes = need.sizes
    count, config, cache = len(sizes.layers), sizes.config, need.cache
    pinned = spread(count, solution.pinned)
    spilled = frozenset(range(count)) - spread(count, count - solution.spilled)
    streamed = [size for index, size in enumerate(sizes.layers) if index not in pinned]
    streamed += [] if solution.head else [sizes.head]
    placement = Placement(
        pinned=pinned,
        head_pinned=solution.head,
        embedding_pinned=solution.embedding,
        ring=ring if streamed else 0,
        readers=READERS if streamed else 0,
        spilled=spilled,
    )
    host = need.fixed_bytes + sizes.weights - sum(streamed) + (sizes.embedding if solution.embedding else 0)
    host += (count - len(spilled)) * need.pages * sizes.page_of_layer(cache)
    host += spilled_memory_bytes(config, cache, len(spilled), need.pages)
    disk = spilled_disk_bytes(config, cache, len(spilled), need.pages)
    if streamed:
        host += ring * max(streamed)
        disk += sizes.weights
    return Placed(placement, host, disk, sum(streamed))


def spread(layers: int, pinned: int) -> frozenset[int]:
    """Which to pin of the layers: the others lie as far apart as can be, so that the disk is never idle."""
    others = layers - pinned
    apart = {int((index + 0.5) * layers / others) for index in range(others)}
    return frozenset(range(layers)) - apart

"""What lies on a device, in the host's memory and on disk: an integer program for the shortest step.

Computing, copies to the device and reads from disk go on beside one another, so a step takes as long as the longest of
the three. Which parts lie where decides about the latter two:

    minimize T  subject to  T >= computing,  T >= bytes copied / copy rate,  T >= bytes read / disk rate,
                            device, host and disk hold what is put there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from inference.cache.pages import pages_for
from inference.cache.spilled.sizes import buffer_pages
from inference.device.cache import BUFFERS
from inference.device.sizes import GATHERED, TierBytes, fixed_bytes, tier_bytes
from inference.kernels.base import CacheKind
from inference.memory.placement import Placement
from inference.planner.placing import spread
from inference.planner.sizes import ModelSizes

RING, DISK_RING, READERS = 3, 3, 2
# Layers counted with their mean size may turn out larger: then the room is taken to be that much smaller, and again.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step is of. context: mean tokens of a row; longest: tokens of the longest; pages: of the whole cache."""

    max_batch: int
    token_budget: int
    context: float
    longest: int
    pages: int


@dataclass(frozen=True, slots=True)
class Room:
    """What may be used of each tier, and the rates between them; disk_bytes_per_s 0: nothing may stay on disk."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    copy_bytes_per_s: float
    disk_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OnTiers:
    """copied_bytes, read_bytes: of each step, to the device and from disk."""

    placement: Placement
    bytes: TierBytes
    copied_bytes: int
    read_bytes: int


def place(
    sizes: ModelSizes, cache: CacheKind, rows: Rows, room: Room, device: str, compute_seconds: float
) -> OnTiers | None:
    """The placement with the shortest step; None where none fits. compute_seconds: of a step, whatever lies where."""
    tried = room
    for _ in range(_TRIES):
        placement = _solved(sizes, cache, rows, tried, device, compute_seconds)
        if placement is None:
            return None
        needed = tier_bytes(
            sizes, placement, cache, rows.pages, max_batch=rows.max_batch, token_budget=rows.token_budget
        )
        over_device, over_host = needed.device - room.device_bytes, needed.host - room.host_bytes
        if over_device <= 0 and over_host <= 0:
            return _counted(sizes, cache, rows, placement, needed)
        tried = replace(
            tried,
            device_bytes=tried.device_bytes - max(0, over_device),
            host_bytes=tried.host_bytes - max(0, over_host),
        )
    return None


def _cache_step_bytes(sizes: ModelSizes, cache: CacheKind, rows: Rows) -> int:
    """Of one hosted layer's keys and values, both ways, in a step that decodes."""
    return rows.max_batch * (pages_for(round(rows.context)) + 1) * sizes.page_of_layer(cache)


def _counted(sizes: ModelSizes, cache: CacheKind, rows: Rows, placement: Placement, needed: TierBytes) -> OnTiers:
    layers = frozenset(range(sizes.config.layers))
    copied = sum(sizes.layers[index] for index in layers - placement.pinned)
    copied += sizes.head if placement.head_hosted else 0
    copied += len(placement.hosted_cache) * _cache_step_bytes(sizes, cache, rows)
    read = sum(sizes.layers[index] for index in layers - placement.pinned - placement.hosted)
    return OnTiers(placement, needed, copied, read)


def _solved(
    sizes: ModelSizes, cache: CacheKind, rows: Rows, room: Room, device: str, compute_seconds: float
) -> Placement | None:
    config, count = sizes.config, len(sizes.layers)
    layer, largest, head, table = sum(sizes.layers) / count, max(sizes.layers), sizes.head, sizes.embedding
    wider_for_head = RING * max(0, head - largest)  # buffers are of the largest unit that goes through them
    keys = rows.pages * sizes.page_of_layer(cache)  # of a layer
    window = buffer_pages(config, cache, rows.pages)
    cache_step = _cache_step_bytes(sizes, cache, rows)
    can_host_cache = pages_for(rows.longest) <= window
    copying, reading = 1 / room.copy_bytes_per_s, 1 / room.disk_bytes_per_s if room.disk_bytes_per_s else 0.0
    may_read = bool(reading) and sizes.weights <= room.disk_bytes
    # Unknowns: layers on the device, layers in the host's memory, layers whose cache is there, head and embedding on
    # the device, whether anything is copied, read from disk, or of a cache; and the seconds of a step.
    names = ("pinned", "hosted", "hosted_cache", "head", "table", "copies", "reads", "caches", "seconds")
    at = {name: place for place, name in enumerate(names)}
    rules: list[tuple[npt.NDArray[np.float64], float]] = []

    def rule(most: float, **weights: float) -> None:
        row = np.zeros(len(names))
        for name, weight in weights.items():
            row[at[name]] = weight
        rules.append((row, most))

    rule(
        -(count * layer + head) * copying,
        pinned=-layer * copying,
        head=-head * copying,
        hosted_cache=cache_step * copying,
        seconds=-1.0,
    )
    rule(-count * layer * reading, pinned=-layer * reading, hosted=-layer * reading, seconds=-1.0)
    rule(
        room.device_bytes
        - fixed_bytes(sizes, rows.max_batch, rows.token_budget)
        - (count + GATHERED) * keys
        - wider_for_head,
        pinned=layer,
        head=head - wider_for_head,
        table=table,
        copies=RING * largest,
        hosted_cache=-keys,
        caches=BUFFERS * window * sizes.page_of_layer(cache),
    )
    rule(
        room.host_bytes - head - table // 8,
        hosted=layer,
        head=-head,
        table=-(table // 8),
        reads=DISK_RING * max(sizes.layers),
        hosted_cache=keys,
    )
    rule(count, pinned=1.0, hosted=1.0)
    rule(-count, pinned=-1.0, copies=-count)  # what is not on the device is copied
    rule(-1.0, head=-1.0, copies=-1.0)
    rule(-count, pinned=-1.0, hosted=-1.0, reads=-count)
    rule(0.0, hosted_cache=1.0, caches=-count)
    costs = np.zeros(len(names))
    costs[at["seconds"]] = 1 / max(compute_seconds, 1e-6)  # the solver's own tolerances are of about 1
    # Among equally fast ones, the one that keeps most on the device, and most of the rest off the disk.
    tie = 1e-3 / count
    costs[[at["pinned"], at["head"], at["table"]]] = -3 * tie
    costs[at["hosted"]], costs[at["hosted_cache"]] = -2 * tie, tie
    lower, upper = np.zeros(len(names)), np.ones(len(names))
    lower[at["seconds"]], upper[at["seconds"]] = compute_seconds, np.inf
    upper[at["pinned"]] = upper[at["hosted"]] = count
    upper[at["hosted_cache"]] = count if can_host_cache else 0
    upper[at["reads"]] = 1 if may_read else 0
    lower[at["head"]] = 0 if head else 1
    found: Any = milp(
        c=costs,
        options={"mip_rel_gap": 0.0},
        integrality=np.array([name != "seconds" for name in names]),
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(
            np.array([row for row, _ in rules]), -np.inf, np.array([most for _, most in rules])
        ),
    )
    if found.x is None:
        return None
    solution = {name: round(float(found.x[at[name]])) for name in names if name != "seconds"}
    return _placement(count, solution, device)


def _placement(count: int, solution: dict[str, int], device: str) -> Placement:
    pinned = spread(count, solution["pinned"])
    others = [index for index in range(count) if index not in pinned]
    # Those on disk lie as far apart as can be, so that the disk is never idle.
    hosted = frozenset(others[place] for place in spread(len(others), solution["hosted"])) if others else frozenset()
    on_disk = len(others) > len(hosted)
    copies = bool(others) or not solution["head"]
    return Placement(
        pinned=pinned,
        head_pinned=bool(solution["head"]),
        head_hosted=not solution["head"],
        embedding_pinned=bool(solution["table"]),
        ring=DISK_RING if on_disk else 0,
        readers=READERS if copies else 0,
        device=device,
        hosted=hosted,
        hosted_cache=frozenset(range(count)) - spread(count, count - solution["hosted_cache"]),
        device_ring=RING if copies else 0,
    )

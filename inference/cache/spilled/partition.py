"""A step cut into parts whose pages fit a buffer, with the pages numbered as they lie in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from inference.cache.pages import PAGE_TOKENS
from inference.cache.spilled.page_file import Place
from inference.model.batch import StepBatch

Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Segments that follow one another; the same for every layer with the same window.

    rows: theirs. batch: of these alone, over the buffer. kept: pages that hold what the step reads, by number.
    fresh: places in the buffer of pages that hold nothing yet, or nothing that is read. changed: pages that the step
    writes to, by number.
    """

    rows: slice
    batch: StepBatch
    kept: list[Place]
    fresh: list[int]
    changed: list[Place]


def partition(batch: StepBatch, capacity: int, window: int = 0) -> list[PartPlan]:
    """As few parts as can be without changing the order. ValueError where one sequence's pages exceed the capacity.

    window: tokens that a row of the layer sees, itself among them; what lies before is not kept. 0: all.
    """
    contexts = np.array([context for _, context in batch.lengths])
    begins = contexts - np.array([count for count, _ in batch.lengths])
    table: Table = batch.page_table.numpy()
    columns = np.arange(table.shape[1])
    held = columns < -(-contexts // PAGE_TOKENS)[:, None]
    kept = columns < -(-begins // PAGE_TOKENS)[:, None]
    if window:
        kept &= columns >= (np.maximum(begins + 1 - window, 0) // PAGE_TOKENS)[:, None]
    changed = held & (columns >= (begins // PAGE_TOKENS)[:, None])
    plans = []
    for first, last in _groups(table, held, capacity):
        width = int(held[first:last].sum(axis=1).max())
        cut = np.s_[first:last, :width]
        numbers, places = np.unique(table[cut][held[cut]], return_inverse=True)
        local = np.full((last - first, width), -1, dtype=np.int32)
        local[held[cut]] = places
        old = np.unique(local[kept[cut]])
        plans.append(
            PartPlan(
                *_compacted(batch, local, first, last),
                kept=[Place(int(numbers[place]), int(place)) for place in old],
                fresh=np.setdiff1d(np.arange(len(numbers)), old).tolist(),
                changed=[Place(int(numbers[place]), int(place)) for place in np.unique(local[changed[cut]])],
            )
        )
    return plans


def holders(batch: StepBatch, pages: set[int]) -> list[int]:
    """Segments that hold any of these pages."""
    return [segment for segment, held in enumerate(batch.page_table.tolist()) if not pages.isdisjoint(held)]


def _groups(table: Table, held: npt.NDArray[np.bool_], capacity: int) -> Iterator[tuple[int, int]]:
    """(first, behind the last) of the segments of each part."""
    if len(np.unique(table[held])) <= capacity:
        yield 0, len(table)
        return
    first, pages = 0, set[int]()
    for segment in range(len(table)):
        own = set(table[segment][held[segment]].tolist())
        if len(own) > capacity:
            raise ValueError(f"a sequence of {len(own)} pages does not fit into buffers of {capacity}")
        if len(pages | own) > capacity:
            yield first, segment
            first, pages = segment, set()
        pages |= own
    yield first, len(table)


def _compacted(batch: StepBatch, local: Table, first: int, last: int) -> tuple[slice, StepBatch]:
    """(rows of the segments first to last, their batch with the pages of `local`, [segments, width])."""
    starts = batch.segment_starts[first : last + 1]
    rows = slice(int(starts[0]), int(starts[-1]))
    starts = starts - starts[0]
    positions = batch.positions[rows]
    segments = np.repeat(np.arange(last - first), np.diff(starts.numpy()))
    at = positions.numpy()
    slots = local[segments, at // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + at % PAGE_TOKENS
    part = replace(
        batch,
        positions=positions,
        rotations=batch.rotations[rows],
        slots=torch.from_numpy(slots),
        segment_starts=starts,
        page_table=torch.from_numpy(local),
        lengths=batch.lengths[first:last],
    )
    return rows, part

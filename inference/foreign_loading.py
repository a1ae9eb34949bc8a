"""What of a model that runs in transformers' own code stays in memory, where not all of it can."""

from __future__ import annotations

from pathlib import Path

from inference.errors import MemoryBudgetError
from inference.kernels.base import Compute
from inference.memory.placement import Placement
from inference.model.foreign_shell import Shell
from inference.weights.store import StoreReader

_RING, _READERS = 3, 2
# Of the memory, for keys and values.
_CACHE_PART = 8


def fitting_placement(store: Path, compute: Compute, free_bytes: int) -> Placement:
    """As many of the repeated blocks in memory as free_bytes hold beside the buffers for the others.

    Raises MemoryBudgetError where not even the buffers fit; StoreError for a model that cannot be streamed.
    """
    shell = Shell(StoreReader(store), compute)
    sizes = [shell.unit_nbytes(index) for index in range(len(shell.blocks))]
    # A head is kept in float beside its int8 form, where it is tied.
    needed = shell.nbytes * 5 // 4 + _RING * max(sizes)
    free = free_bytes - free_bytes // _CACHE_PART
    if free < needed:
        raise MemoryBudgetError(
            f"{max(0, free)} bytes do not hold what is used at every layer and buffers for {_RING} of them: they need "
            f"{needed}; allow more memory"
        )
    pinned = set()
    for index, size in enumerate(sizes):
        needed += size
        if needed > free:
            break
        pinned.add(index)
    return Placement(frozenset(pinned), ring=_RING, readers=_READERS)

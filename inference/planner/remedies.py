"""What would make a plan possible where none is: more memory or disk, less context, smaller weights, fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from inference.planner.sizes import ModelSizes
from inference.planner.workload import Lengths, Workload

if TYPE_CHECKING:
    from inference.planner.search import Ask

# Of a weight, in the form that 4-bit ones are computed with, and of one in int8.
INT4_SHARE = 0.57
PLENTY = 2**50


def what_would_work(ask: Ask, fits: Callable[[Ask], bool]) -> str:
    """A message: what is missing, and each single change that would do. fits: whether there is any placement."""
    workload = ask.workload
    batch = "a single sequence" if (ask.max_batch or 1) == 1 else f"{ask.max_batch} sequences"
    wanted = f"{batch} of {workload.context} tokens"
    roomy = replace(ask, memory_bytes=PLENTY, disk_bytes=PLENTY)
    if not fits(replace(ask, memory_bytes=PLENTY)) or fits(replace(ask, disk_bytes=PLENTY)):
        least = _least(lambda size: fits(replace(ask, disk_bytes=size)), PLENTY)
        return (
            f"{ask.memory_bytes} bytes of memory hold this model only with parts of it on disk, and the disk has "
            f"{ask.disk_bytes} bytes for that; {_bytes(least)} of disk would do"
        )
    least = _least(lambda size: fits(replace(roomy, memory_bytes=size)), PLENTY)
    remedies = [f"allow {_bytes(least)}"]
    context = _most_context(ask, fits)
    if context:
        remedies.append(f"allow at most {context} tokens of context")
    if (ask.max_batch or 1) > 1 and fits(replace(ask, max_batch=1)):
        remedies.append("take fewer sequences at a time")
    if ask.could_shrink and ask.compute == "int8" and fits(replace(ask, sizes=_in_int4(ask.sizes))):
        remedies.append("import the model with --quantize int4")
    return (
        f"{ask.memory_bytes} bytes do not hold what has to be in memory for {wanted}, even with every layer "
        f"on disk; what would do: {', or '.join(remedies)}"
    )


def _bytes(count: int) -> str:
    return f"{count} bytes" + (f" ({count / 1e9:.2f} GB)" if count >= 10**7 else "")


def _least(works: Callable[[int], bool], most: int) -> int:
    """The least number that works, to a thousandth, where larger ones do."""
    low, high = 0, most
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _most_context(ask: Ask, fits: Callable[[Ask], bool]) -> int:
    """Tokens of a row's prompt and answer for which there is a placement; 0 where there is none for any."""

    def works(context: int) -> bool:
        return fits(replace(ask, workload=_shortened(ask.workload, context)))

    low, high = 1, ask.workload.context
    if not works(2):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def _shortened(workload: Workload, context: int) -> Workload:
    prompt = max(1, context * workload.prompt.largest // workload.context)
    return replace(workload, prompt=Lengths.all(prompt), new=Lengths.all(max(1, context - prompt)))


def _in_int4(sizes: ModelSizes) -> ModelSizes:
    return replace(sizes, layers=tuple(round(size * INT4_SHARE) for size in sizes.layers))

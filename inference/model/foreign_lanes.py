"""Several sequences' forward passes in step: each repeated block is computed for all of them before the next one.

transformers' code runs a model from its first layer to its last in one call, so sequences computed one after the other
would read every streamed block once each. Here each call runs as a coroutine that stops before every block until all
have come that far; so one reading serves them all. They are greenlets: the code between blocks is not ours to rewrite,
and threads of their own would each bring along a pool of OpenMP threads.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")


class OutOfTurnError(Exception):
    """A model does not use its blocks once each, in their order."""


def wait_for_turn(block: int) -> None:
    """To be called before a block is computed, within a task of `in_turns`."""
    driver = getcurrent().parent
    if driver is None:
        raise OutOfTurnError("a block is computed outside of any step")
    driver.switch(block)


def in_turns(
    tasks: Sequence[Callable[[], T]], blocks: int, weights: Callable[[int], AbstractContextManager[None]]
) -> list[T]:
    """What the tasks return; each of them calls `wait_for_turn` with 0 to blocks - 1.

    weights: makes a block ready to be computed with, in the context that it gives.
    Raises OutOfTurnError, and whatever a task or `weights` raises; no task goes on then.
    """
    lanes: list[Any] = [greenlet(task) for task in tasks]
    for lane in lanes:
        lane.gr_context = contextvars.copy_context()
    try:
        arrived = [lane.switch() for lane in lanes]
        for block in range(blocks):
            if any(lane.dead or at != block for lane, at in zip(lanes, arrived, strict=True)):
                raise OutOfTurnError(f"block {block} is not used in its turn")
            with weights(block):
                arrived = [lane.switch() for lane in lanes]
        if not all(lane.dead for lane in lanes):
            raise OutOfTurnError("a block is used more than once")
        return arrived
    finally:
        for lane in lanes:
            if not lane.dead:
                lane.throw(GreenletExit)

"""Threads yield to a busy host, and come back."""

from __future__ import annotations

from inference.parallelism import LONGEST_ALONE, STEPS_ALONE, STEPS_TO_JUDGE, ThreadGovernor


def steps_until(governor: ThreadGovernor, threads: int, wall: float, processor: float) -> int:
    for step in range(1, 2000):
        governor.observe(wall, processor)
        if governor.threads == threads:
            return step
    raise AssertionError(f"never came to {threads} threads")


def test_a_host_of_its_own_keeps_all_threads() -> None:
    governor = ThreadGovernor(4)
    for _ in range(100):
        governor.observe(0.050, 0.049)
        assert governor.threads == 4


def test_a_contended_host_is_left_with_one_thread_and_tried_again_ever_later() -> None:
    governor = ThreadGovernor(2)
    assert steps_until(governor, 1, wall=0.5, processor=0.1) == STEPS_TO_JUDGE
    waits = []
    for _ in range(8):
        waits.append(steps_until(governor, 2, wall=0.1, processor=0.05))
        steps_until(governor, 1, wall=0.5, processor=0.1)
    assert waits == sorted(waits)
    assert STEPS_ALONE <= waits[0] < waits[-1] == LONGEST_ALONE
    # The others are gone: it comes back and stays, and has forgotten the long wait.
    steps_until(governor, 2, wall=0.1, processor=0.1)
    for _ in range(50):
        governor.observe(0.05, 0.05)
        assert governor.threads == 2
    steps_until(governor, 1, wall=0.5, processor=0.1)
    assert steps_until(governor, 2, wall=0.1, processor=0.1) == 2 * STEPS_ALONE


def test_a_single_thread_has_nothing_to_yield() -> None:
    governor = ThreadGovernor(1)
    for _ in range(20):
        governor.observe(1.0, 0.01)
    assert governor.threads == 1

"""How many threads a step uses, when others want the processor too.

A step is some hundred short parallel regions, each of which ends when its slowest thread does. Where other processes
hold the cores, every region waits for a thread that is not running, and two threads are many times slower than one
(measured: 15 tokens a second instead of 160). The stepping thread notices: it is then off the processor for much of a
step. So it goes on alone for a while, and tries again.
"""

from __future__ import annotations

# On a host of its own the stepping thread computes or spins nearly all of the time.
CONTENDED_SHARE = 0.7
STEPS_TO_JUDGE = 4
STEPS_ALONE = 16
LONGEST_ALONE = 256


class ThreadGovernor:
    """Chooses 1 or `limit` threads for each step, from how much of the last ones' wall time was processor time.

    Only for arithmetic that gives the same bits with any number of threads.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.threads = limit
        self._wall = self._processor = 0.0
        self._steps = 0
        self._alone = STEPS_ALONE

    def observe(self, wall_seconds: float, processor_seconds: float) -> None:
        """Take a finished step into account: its wall time, and the stepping thread's own processor time."""
        if self.limit == 1:
            return
        self._wall += wall_seconds
        self._processor += processor_seconds
        self._steps += 1
        if self.threads == 1:
            if self._steps >= self._alone:
                self._turn(self.limit)
        elif self._steps >= STEPS_TO_JUDGE:
            if self._processor < CONTENDED_SHARE * self._wall:
                self._turn(1)
                return
            self._alone = STEPS_ALONE
            self._turn(self.limit)

    def _turn(self, threads: int) -> None:
        if threads == 1 and self.threads > 1:
            # Each trial that finds the host still contended makes the next one later.
            self._alone = min(2 * self._alone, LONGEST_ALONE)
        self.threads = threads
        self._wall = self._processor = 0.0
        self._steps = 0

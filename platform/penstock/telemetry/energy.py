"""The power that this host draws, measured where the processor counts it (Intel and AMD RAPL through Linux powercap).

RAPL counts the processor packages and, where the platform tells it apart, the memory. It does not see power supply,
disks or accelerators, so a measured figure is a lower bound of what the wall socket delivers; the rate card's watts
are for the whole host under load. Reading the counters takes root on most systems. Where they cannot be read, energy
is the rate card's watts times the seconds, and marked as estimated.

Source: Linux kernel, Documentation/power/powercap/powercap.rst.
"""

import datetime as dt
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Protocol

POWERCAP = Path("/sys/class/powercap")
SAMPLE_SECONDS = 1.0
SAMPLES_KEPT = 4 * 3600


class PowerMeter(Protocol):
    def mean_watts(self, start: dt.datetime, end: dt.datetime) -> Decimal | None:
        """Mean power between two aware times, in watts; None where it was not measured."""
        ...


class NoMeter:
    """A host whose energy nobody counts."""

    def mean_watts(self, start: dt.datetime, end: dt.datetime) -> Decimal | None:
        return None


@dataclass(frozen=True, slots=True)
class RaplCounter:
    """One counter of microjoules, which wraps around at `range_microjoules`."""

    path: Path
    range_microjoules: int

    def read(self) -> int:
        return int(self.path.read_text())


def readable_counters(root: Path = POWERCAP) -> list[RaplCounter]:
    """The packages (`intel-rapl:0`) and their memory (`intel-rapl:0:1` named dram). Cores and graphics are part of
    their package and `psys` overlaps all of them: counting these too would count twice."""
    counters = []
    for zone in sorted(root.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            if not name.startswith("package") and name != "dram":
                continue
            counter = RaplCounter(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
            counter.read()
        except (OSError, ValueError):
            continue
        counters.append(counter)
    # Memory without its package would pass for the host's power.
    return counters if any(c.path.parent.name.count(":") == 1 for c in counters) else []


class RaplMeter:
    """Keeps the host's joules since it was started, once a second, for the last four hours.

    A thread of its own samples, because a busy spell can begin long before anybody asks about it. `clock` gives
    seconds since the epoch.
    """

    def __init__(self, counters: list[RaplCounter], clock: Callable[[], float] = time.time) -> None:
        self._counters = counters
        self._clock = clock
        self._last = [counter.read() for counter in counters]
        self._joules = 0.0
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float]] = deque([(clock(), 0.0)], maxlen=SAMPLES_KEPT)

    def start(self) -> None:
        threading.Thread(target=self._sample_for_ever, name="power-meter", daemon=True).start()

    def sample(self) -> None:
        """Reads the counters once. A counter that has wrapped around since the last reading is put right."""
        with self._lock:
            now = [counter.read() for counter in self._counters]
            for counter, before, after in zip(self._counters, self._last, now, strict=True):
                moved = after - before if after >= before else after - before + counter.range_microjoules
                self._joules += moved / 1e6
            self._last = now
            self._samples.append((self._clock(), self._joules))

    def mean_watts(self, start: dt.datetime, end: dt.datetime) -> Decimal | None:
        try:
            self.sample()
        except OSError:
            return None  # the counters are gone: a figure less is no reason to lose a result
        with self._lock:
            samples = list(self._samples)
        times = [when for when, _ in samples]
        first = bisect_right(times, start.timestamp()) - 1
        last = min(bisect_left(times, end.timestamp()), len(samples) - 1)
        if first < 0 or times[last] <= times[first]:
            return None  # the spell began before the meter did
        watts = (samples[last][1] - samples[first][1]) / (times[last] - times[first])
        return Decimal(str(round(watts, 3)))

    def _sample_for_ever(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            try:
                self.sample()
            except OSError:
                return  # the counters are gone; what follows is estimated


@lru_cache(maxsize=1)
def _meter_of_process(pid: int) -> PowerMeter:
    counters = readable_counters()
    if not counters:
        return NoMeter()
    meter = RaplMeter(counters)
    meter.start()
    return meter


def power_meter() -> PowerMeter:
    """This process's meter, started when first asked for (a forked child starts its own)."""
    return _meter_of_process(os.getpid())

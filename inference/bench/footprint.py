"""How much memory a run has really taken: this process at its peak, and its control group where that can be read."""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inference.memory.budget import group_limit_bytes, group_page_cache_bytes, group_peak_bytes

_STATUS = Path("/proc/self/status")
_FORGET = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # proc(5), clear_refs


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes; None where the system does not tell.

    process_peak_bytes: resident at most (VmHWM), files in the page cache that are mapped included. Of the control group
    (which may hold other processes): group_peak_bytes, page cache included, which is given up only when the limit is
    met, so that the peak is often the limit itself; group_page_cache_bytes: of it, now.
    """

    process_peak_bytes: int | None
    group_limit_bytes: int | None
    group_peak_bytes: int | None
    group_page_cache_bytes: int | None

    @classmethod
    def now(cls) -> Footprint:
        return cls(_process_peak_bytes(), group_limit_bytes(), group_peak_bytes(), group_page_cache_bytes())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def forget_process_peak() -> None:
    """Count the process's peak from here on, where the system allows that."""
    with contextlib.suppress(OSError):
        _FORGET.write_text(_FORGET_PEAK)


def _process_peak_bytes() -> int | None:
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None

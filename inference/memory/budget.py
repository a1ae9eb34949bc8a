"""What this process may use: the machine's free memory, or its control group's where that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
DEFAULT_SHARE = 0.6


def available_memory_bytes() -> int:
    """Bytes that can be had without swapping, within the control group's limit (version 2) where there is one."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def default_budget_bytes() -> int:
    """What an engine takes at most when it is not told: a share of what is available, the rest being other people's."""
    return int(available_memory_bytes() * DEFAULT_SHARE)

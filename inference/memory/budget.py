"""What this process may use: the machine's free memory, or what its control groups leave where that is less."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from inference.errors import InferenceError

DEFAULT_SHARE = 0.6
_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
_V1_PREFIX = "total_"  # of what a group and those below it hold

# What the interpreter's and the libraries' files hold of the page cache while they are in use: under a limit their
# pages count, and where they are pushed out every step waits for them.
LIBRARY_BYTES = 150 * 1024 * 1024

_LONGEST_SIZE = 40  # characters; more digits than these are beyond any number of bytes

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}


class SizeError(InferenceError):
    """A size that cannot be read."""


def parse_size(text: str) -> int:
    """Bytes of "3GB", "2.5 GiB", "512MB" or a plain number: GB are thousands, GiB (or G) are 1024s. SizeError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS or len(text) > _LONGEST_SIZE:
        raise SizeError(f"{text!r} is no size; want a number and a unit, as in 3GB, 2.5GiB or 512MB")
    found = int(float(match[1]) * _UNITS[unit])
    if found < 1:
        raise SizeError(f"{text!r} is no size: at least one byte is needed")
    return found


def available_memory_bytes() -> int:
    """Bytes that can be had without swapping, within the limits of this process's control groups."""
    left = group_left_bytes()
    available = int(psutil.virtual_memory().available)
    return available if left is None else min(available, left)


def group_left_bytes(process: Path = _PROCESS, groups: Path = _GROUPS) -> int | None:
    """What the control groups that this process is in, version 1 or 2, leave it; None where none limits it.

    A group's page cache is given up when memory is needed, so it counts as free. process, groups: where the system
    tells of both.
    """
    left = [limit - used for limit, used in _limits(process, groups)]
    return max(0, min(left)) if left else None


def group_limit_bytes(process: Path = _PROCESS, groups: Path = _GROUPS) -> int | None:
    """The least limit of the control groups that this process is in; None where none limits it."""
    return min((limit for limit, _ in _limits(process, groups)), default=None)


def group_peak_bytes(process: Path = _PROCESS, groups: Path = _GROUPS) -> int | None:
    """What this process's own control group has held at most, page cache included; None where that is not told."""
    for group, first in _memory_groups(process, groups):
        with contextlib.suppress(OSError, ValueError):
            return int((group / ("memory.max_usage_in_bytes" if first else "memory.peak")).read_text())
    return None


def group_page_cache_bytes(process: Path = _PROCESS, groups: Path = _GROUPS) -> int | None:
    """What this process's own control group holds of the page cache now; None where that is not told."""
    for group, first in _memory_groups(process, groups):
        with contextlib.suppress(OSError, ValueError):
            return _page_cache(group, _V1_PREFIX if first else "")
    return None


def process_bytes() -> int:
    """What this process takes without any model: its own memory, and the libraries' files that it works with."""
    try:
        status = (_PROCESS / "status").read_text()
    except OSError:
        return int(psutil.Process().memory_info().rss)
    own = sum(int(kib) for kib in re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+) kB", status, re.MULTILINE))
    return own * 1024 + LIBRARY_BYTES


def default_budget_bytes() -> int:
    """What an engine takes at most when it is not told: a share of what is available, the rest being other people's."""
    return int(available_memory_bytes() * DEFAULT_SHARE)


def _limits(process: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without page cache) of each limited group, from the process's own up to the root."""
    for group, first in _memory_groups(process, groups):
        limits, used_name, prefix = (
            (("memory.limit_in_bytes",), "memory.usage_in_bytes", _V1_PREFIX)
            if first
            else (("memory.max", "memory.high"), "memory.current", "")
        )
        found = [limit for name in limits if (limit := _limit(group / name)) is not None]
        if not found:
            continue  # a root without limits, or a group that is not shown to this process
        with contextlib.suppress(OSError, ValueError):
            yield min(found), max(0, int((group / used_name).read_text()) - _page_cache(group, prefix))


def _limit(file: Path) -> int | None:
    """None where there is none, or the file is not shown. Above memory.high a group is slowed down to a crawl."""
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):  # "max", in version 2
        return None
    return limit if limit < 2**60 else None  # version 1 says "no limit" as a number near 2 ** 63


def _memory_groups(process: Path, groups: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, whether of version 1) of each control group that this process is in, its own first, then upwards."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        first = "memory" in controllers.split(",")
        if not first and controllers:
            continue
        for group in _upwards(groups / "memory" if first else groups, path):
            yield group, first


def _upwards(root: Path, path: str) -> Iterator[Path]:
    group = root / path.strip("/")
    while True:
        yield group
        if group in (root, group.parent):
            return
        group = group.parent


def _page_cache(group: Path, prefix: str) -> int:
    wanted = {prefix + "inactive_file", prefix + "active_file"}
    fields = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(value) for name, value in fields if name in wanted)

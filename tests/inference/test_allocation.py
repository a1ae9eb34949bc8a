"""Freed memory is kept: large pieces that are asked for again cost no new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from inference.memory.allocation import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = None
for _ in range(20):
    torch.full((5_000_000,), 1.0)  # 20 MB, freed at once
    before = before or resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_pieces_asked_for_again_come_without_new_pages() -> None:
    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120
        )
        return int(done.stdout)

    # 19 times 20 MB are 92,773 pages of 4 KiB, or 190 of 2 MiB where the system lends those.
    assert faults("keep") < 5_000

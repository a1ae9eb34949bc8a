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
def ask(times):
    for _ in range(times):
        torch.full((5_000_000,), 1.0)  # 20 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = ask(20)  # until pieces have found their places
print(ask(20) - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_pieces_asked_for_again_come_without_new_pages() -> None:
    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120
        )
        return int(done.stdout)

    # 20 times 20 MB are 97,656 pages of 4 KiB; where the system lends larger pages, there are fewer either way.
    assert faults("keep") < 5_000

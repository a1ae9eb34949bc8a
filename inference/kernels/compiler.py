"""Where the C++ compiler is that the kernels are built with."""

from __future__ import annotations

import os
import shutil


def cpp_compiler() -> str | None:
    """What `CXX` names, else the first of g++, c++ and clang++ that is on the path; None where there is none."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)

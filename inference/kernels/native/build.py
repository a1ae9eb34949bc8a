"""Compiles the kernels on the spot, for the processor at hand, and keeps them in a user cache."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import tempfile
from pathlib import Path

import platformdirs

from inference.cache.pages import PAGE_TOKENS
from inference.kernels.compiler import cpp_compiler
from inference.model.config import DecoderConfig

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]
COMPILE_SECONDS = 120


class KernelsUnavailable(Exception):
    """No compiled kernels on this host; says why. The reference kernels do the same work, slower."""


def compiled_library(config: DecoderConfig) -> Path:
    """The shared library for a model's head size, compiled now or before. KernelsUnavailable where that fails."""
    compiler = cpp_compiler()
    if compiler is None:
        raise KernelsUnavailable("there is no C++ compiler (g++ or clang++) on the path")
    if config.head_dim % 32:
        raise KernelsUnavailable(f"heads of {config.head_dim} elements are not handled; multiples of 32 are")
    defines = [f"-DHEAD_DIM={config.head_dim}", f"-DGROUP={config.group}", f"-DPAGE_TOKENS={PAGE_TOKENS}"]
    key = hashlib.sha256("\n".join([compiler, *_FLAGS, *defines, processor_marks()]).encode())
    for source in (*SOURCES, *HEADERS):
        key.update(source.read_bytes())
    library = Path(platformdirs.user_cache_dir("penstock")) / "kernels" / f"{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as aside:
            built = Path(aside) / "kernels.so"
            # The command is fixed but for the compiler, which the person who runs us names.
            subprocess.run(
                [compiler, *_FLAGS, *defines, *map(str, SOURCES), "-o", str(built)],
                check=True,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
            )
            built.rename(library)
    except subprocess.CalledProcessError as error:
        raise KernelsUnavailable(f"{compiler} failed: {error.stderr.strip()[:500]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{compiler} could not be run: {error}") from None
    return library


def processor_marks() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))

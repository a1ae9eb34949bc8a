"""What the commands share: numbers and sizes as they are given, and errors as they are told."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from inference.errors import InferenceError
from inference.memory.budget import SizeError, parse_size

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def positive(text: str) -> int:
    """For argparse: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def byte_count(text: str) -> int:
    """For argparse: "2GB" or "1.5GiB" as bytes."""
    try:
        return parse_size(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def told(command: Callable[[], int]) -> int:
    """Run a command; what goes wrong with what it was given becomes one line, and no traceback. The exit status."""
    try:
        return command()
    except InferenceError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or else flushing at exit would fail again
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED

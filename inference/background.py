"""Threads that work in the background, and are let come to an end when the process exits.

Python cuts a daemon thread off where it next wants the interpreter's lock; where C++ or Rust is on its stack, that
aborts the whole process, after all its work was done.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_SECONDS = 10.0  # for a step or a read at hand; a disk that no longer answers must not hold the process

_guard = threading.Lock()
_stops: weakref.WeakKeyDictionary[threading.Thread, weakref.WeakMethod[Callable[[], None]] | None] = (
    weakref.WeakKeyDictionary()
)


def start_in_background(thread: threading.Thread, stop: Callable[[], None] | None = None) -> None:
    """Start a daemon thread. stop: a bound method that asks it to end, and does not wait until it has."""
    with _guard:
        _stops[thread] = None if stop is None else weakref.WeakMethod(stop)
    thread.start()


@atexit.register
def _end() -> None:
    """Those that use others were started after them: each comes to its end while what it uses still works."""
    with _guard:
        # Those that could not be started, and a forked process's copies of its parent's, are not alive.
        threads = [(thread, reference) for thread, reference in _stops.items() if thread.is_alive()]
    until = time.monotonic() + EXIT_SECONDS
    for thread, reference in reversed(threads):
        stop = None if reference is None else reference()
        if stop is None:
            continue
        try:
            stop()
        except Exception:
            logger.exception("%s could not be asked to end", thread.name)
        thread.join(max(0.0, until - time.monotonic()))
    for thread, _ in threads:
        thread.join(max(0.0, until - time.monotonic()))

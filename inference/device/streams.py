"""Copies beside the computing: on CUDA a stream of their own, elsewhere in line."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


class CopyStream:
    """Where copies between a device and the host go one after the other, while the current stream computes.

    Events are None, and nothing waits, on a device without streams, where every copy is done when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        streams: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream | None = streams(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self, after: torch.Event | None = None) -> Iterator[None]:
        """The copies of the block, from any thread, begin when that event has come."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def copied(self) -> torch.Event | None:
        """Comes when all copies so far are done."""
        return None if self._stream is None else self._stream.record_event()

    def computed(self) -> torch.Event | None:
        """Comes when all that the calling thread has begun to compute is done."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    def compute_after(self, event: torch.Event | None) -> None:
        """Let what the calling thread computes from now on wait for that event; the thread itself does not."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        """Wait for all copies, in the calling thread."""
        if self._stream is not None:
            self._stream.synchronize()


def lock_pages(memory: torch.Tensor, device: torch.device, owner: object) -> None:
    """Have the driver hold host memory in place for as long as the owner lives, so that the device copies by itself.

    Where the driver refuses (a limit on locked memory), copies are right all the same, and slower.
    """
    if device.type != "cuda" or not memory.nbytes or memory.is_pinned():
        return
    cuda: Any = torch.cuda
    code = int(cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        logger.warning("%d bytes of host memory could not be page-locked (CUDA error %d)", memory.nbytes, code)
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # takes the error away, which the next kernel would be blamed for
        return
    # Memory that goes back to the system while it is locked is never free again; this holds it until then.
    weakref.finalize(owner, _unlock, memory)


def _unlock(memory: torch.Tensor) -> None:
    cuda: Any = torch.cuda
    cuda.cudart().cudaHostUnregister(memory.data_ptr())

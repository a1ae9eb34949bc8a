"""A device's memory: which device, how much of it is to be had, and host memory that it can copy from by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from inference.errors import MemoryBudgetError, SettingError

logger = logging.getLogger(__name__)

DeviceChoice = Literal["auto", "cpu", "cuda"]
# Of what is free: the rest is for the libraries' own workspaces, and for gaps between what is allocated.
SHARE = 0.9


def chosen_device(choice: str) -> torch.device | None:
    """The device to compute on; None: the processor, by the host's own kernels. "auto": CUDA where there is one.

    SettingError for a device that is not there, or of an unknown kind.
    """
    kind, _, number = choice.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
        raise SettingError("device", f"is {choice!r}; auto, cpu, cuda and cuda:N are known")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return None
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(number or 0)
    if index >= there:
        found = f"{there} CUDA devices are there" if there else "PyTorch finds no CUDA device"
        raise SettingError("device", f"is {choice!r}, and {found}; auto takes what there is")
    return torch.device("cuda", index)


def free_bytes(device: torch.device) -> int:
    """What may be allocated on a CUDA device: SHARE of what is free."""
    return int(torch.cuda.mem_get_info(device)[0] * SHARE)


def finish(device: torch.device) -> None:
    """Wait for what has been begun there, so that its time and its errors belong to the step at hand."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def allocating(device: torch.device | None) -> Iterator[None]:
    """MemoryBudgetError, with what would help, where the device has too little memory for what the block does."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise MemoryBudgetError(
            f"{device} has too little memory: {free} of {total} bytes are free. Allow it less, so that more of the "
            f"model stays in the host's memory, or a smaller max_batch, or free what other processes hold ({error})"
        ) from error

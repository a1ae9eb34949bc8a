"""What every call into the compiled library needs."""

from __future__ import annotations

import torch


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where it lies; None stands for null."""
    return None if tensor is None else tensor.data_ptr()


def threads() -> int:
    """That the call may use: PyTorch's setting, which the engine changes as the host's load does."""
    return torch.get_num_threads()

"""One step's work as flat tensors: rows of many sequences, one after the other, without padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from inference.cache.pages import PAGE_TOKENS
from inference.scheduler import Slice


@dataclass(frozen=True, slots=True)
class StepBatch:
    """M rows (tokens) in S segments (sequences); a segment's rows follow one another.

    token_ids: int64 [M]; positions: int32 [M], each token's place in its own sequence
    rotations: int32 [M], its row of the rotary tables: the position, or beyond max_context that of a long sequence
    slots: int64 [M], its place in the cache (page * PAGE_TOKENS + offset)
    segment_starts: int32 [S + 1], the first row of each segment, and M
    page_table: int32 [S, most pages of any], padded with -1
    logit_rows: int64 [L], the rows whose logits are wanted
    lengths: for each segment (rows, context tokens after the step)
    host: the same step in the host's memory, where these tensors lie on a device
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rotations: torch.Tensor
    slots: torch.Tensor
    segment_starts: torch.Tensor
    page_table: torch.Tensor
    logit_rows: torch.Tensor
    lengths: tuple[tuple[int, int], ...]
    host: StepBatch | None = None

    def on(self, device: torch.device) -> StepBatch:
        """The same step on that device, moved there in one piece; itself where it is there already."""
        if self.token_ids.device.type == device.type:
            return self
        if self.host is not None:
            return self.host.on(device)
        tensors = {name: getattr(self, name) for name in _TENSORS}
        moved: dict[str, Any] = dict(moved_together(tensors, device))
        return replace(self, host=self, **moved)


_TENSORS = ("token_ids", "positions", "rotations", "slots", "segment_starts", "page_table", "logit_rows")


def moved_together(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of whole numbers as int64 on a device, by one copy: many small ones would each cost as much."""
    packed = torch.cat([tensor.reshape(-1).long() for tensor in tensors.values()])
    if device.type == "cuda":
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    parts = torch.split(packed, [tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


def build_batch(slices: list[Slice]) -> StepBatch:
    """The slices as one step's rows, in their order."""
    sequences = [piece.sequence for piece in slices]
    first_positions = np.array([piece.start for piece in slices], dtype=np.int32)
    counts = np.array([piece.count for piece in slices], dtype=np.int32)
    starts = np.zeros(len(slices) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = int(starts[-1])
    if rows == len(slices):
        tokens = [piece.sequence.tokens[piece.start] for piece in slices]
    else:
        tokens = []
        for piece in slices:
            tokens += piece.sequence.tokens[piece.start : piece.start + piece.count]
    segment_of_row = np.repeat(np.arange(len(slices)), counts)
    positions = np.arange(rows, dtype=np.int32) + (first_positions - starts[:-1])[segment_of_row]
    held = np.array([len(sequence.pages) for sequence in sequences])
    table = np.full((len(slices), int(held.max())), -1, dtype=np.int32)
    table[np.arange(table.shape[1]) < held[:, None]] = list(
        itertools.chain.from_iterable(sequence.pages for sequence in sequences)
    )
    pages = table[segment_of_row, positions // PAGE_TOKENS].astype(np.int64)
    slots = pages * PAGE_TOKENS + positions % PAGE_TOKENS
    contexts = first_positions + counts
    yields = contexts == np.array([len(sequence.tokens) for sequence in sequences])
    logit_rows = starts[1:][yields].astype(np.int64) - 1
    rotations = positions
    if any(sequence.rotation_offset for sequence in sequences):
        offsets = np.array([sequence.rotation_offset for sequence in sequences], dtype=np.int32)
        rotations = positions + offsets[segment_of_row]
    return StepBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        rotations=torch.from_numpy(rotations),
        slots=torch.from_numpy(slots),
        segment_starts=torch.from_numpy(starts),
        page_table=torch.from_numpy(table),
        logit_rows=torch.from_numpy(logit_rows),
        lengths=tuple(zip(counts.tolist(), contexts.tolist(), strict=True)),
    )

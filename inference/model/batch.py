"""One step's work as flat tensors: rows of many sequences, one after the other, without padding."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rotations: torch.Tensor
    slots: torch.Tensor
    segment_starts: torch.Tensor
    page_table: torch.Tensor
    logit_rows: torch.Tensor
    lengths: tuple[tuple[int, int], ...]


def build_batch(slices: list[Slice]) -> StepBatch:
    counts = [piece.count for piece in slices]
    starts = np.zeros(len(slices) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    rows = int(starts[-1])
    token_ids = np.empty(rows, dtype=np.int64)
    positions = np.empty(rows, dtype=np.int32)
    width = max(len(piece.sequence.pages) for piece in slices)
    table = np.full((len(slices), width), -1, dtype=np.int32)
    logit_rows = []
    for index, piece in enumerate(slices):
        first, last = starts[index], starts[index + 1]
        sequence, stop = piece.sequence, piece.start + piece.count
        if piece.count == 1:
            token_ids[first] = sequence.tokens[piece.start]
            positions[first] = piece.start
        else:
            token_ids[first:last] = sequence.tokens[piece.start : stop]
            positions[first:last] = np.arange(piece.start, stop)
        table[index, : len(sequence.pages)] = sequence.pages
        if piece.yields_token:
            logit_rows.append(last - 1)
    segment_of_row = np.repeat(np.arange(len(slices)), counts)
    pages = table[segment_of_row, positions // PAGE_TOKENS].astype(np.int64)
    slots = pages * PAGE_TOKENS + positions % PAGE_TOKENS
    rotations = positions
    if any(piece.sequence.rotation_offset for piece in slices):
        offsets = np.array([piece.sequence.rotation_offset for piece in slices], dtype=np.int32)
        rotations = positions + offsets[segment_of_row]
    return StepBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        rotations=torch.from_numpy(rotations),
        slots=torch.from_numpy(slots),
        segment_starts=torch.from_numpy(starts),
        page_table=torch.from_numpy(table),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        lengths=tuple((piece.count, piece.start + piece.count) for piece in slices),
    )

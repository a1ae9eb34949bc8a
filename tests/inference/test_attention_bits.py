"""A row's attention has the same bits alone and in a tile with its neighbours, for every shape of heads and cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.kernels.base import KeyValueCache
from inference.kernels.native import NativeKernels
from inference.model.batch import StepBatch
from inference.weights.manifest import StoreManifest

PAGES = [7, 2, 9, 4, 11]
TOKENS = 130


def rows_of_one_sequence(first: int, count: int) -> StepBatch:
    positions = torch.arange(first, first + count, dtype=torch.int32)
    table = torch.tensor([PAGES], dtype=torch.int32)
    return StepBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=positions,
        rotations=positions,
        slots=table[0][positions.long() // 32].long() * 32 + positions.long() % 32,
        segment_starts=torch.tensor([0, count], dtype=torch.int32),
        page_table=table,
        logit_rows=torch.tensor([count - 1]),
        lengths=((count, first + count),),
    )


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16", "fp32"])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(32, 3, 3), (64, 2, 2), (32, 4, 2)])
def test_a_rows_attention_is_the_same_bits_alone_and_among_its_neighbours(
    head_dim: int, heads: int, kv_heads: int, kind: Any, tiny_store: Path
) -> None:
    tiny = StoreManifest.load(tiny_store).config
    config = replace(tiny, head_dim=head_dim, heads=heads, kv_heads=kv_heads, hidden_size=heads * head_dim)
    kernels = NativeKernels(config, "int8")
    if kind not in kernels.cache_kinds:
        pytest.skip("this processor has no dot products of bytes")
    layer = KeyValueCache(config, 12, kind).layers[0]
    y = torch.randn((TOKENS, (heads + 2 * kv_heads) * head_dim), generator=torch.Generator().manual_seed(3)) * 2
    queries = kernels.rotate_and_store(y, None, rows_of_one_sequence(0, TOKENS), layer)
    for window in (0, 40):
        together = kernels.attend(queries, rows_of_one_sequence(0, TOKENS), layer, window=window)
        assert together.scales is not None
        for row in range(TOKENS):
            alone = kernels.attend(queries[row : row + 1], rows_of_one_sequence(row, 1), layer, window=window)
            assert alone.scales is not None
            assert torch.equal(alone.values[0], together.values[row])
            assert torch.equal(alone.scales[0], together.scales[row])

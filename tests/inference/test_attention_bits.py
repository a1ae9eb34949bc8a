"""A row's attention has the same bits alone and in a tile with its neighbours, for every shape of heads and cache; and
whether a page is shared with other sequences or a copy of its own."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.kernels.base import KeyValueCache, Rows
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


def decoding(table: torch.Tensor, positions: list[int]) -> StepBatch:
    """One token of each sequence."""
    at = torch.tensor(positions, dtype=torch.int32)
    rows = torch.arange(len(positions))
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=at,
        rotations=at,
        slots=table[rows, at.long() // 32].long() * 32 + at.long() % 32,
        segment_starts=torch.arange(len(positions) + 1, dtype=torch.int32),
        page_table=table,
        logit_rows=rows,
        lengths=tuple((1, position + 1) for position in positions),
    )


# Two prefixes of three pages, in turn; sequences leave theirs after three, two, one or no pages. Where fewer pages are
# needed, -1 stands.
SHARING = torch.tensor(
    [
        [0, 1, 2, 6],
        [3, 4, 5, 7],
        [0, 1, 8, -1],
        [0, 1, 2, 9],
        [3, 10, -1, -1],
        [11, -1, -1, -1],
        [0, 1, 2, -1],
        [3, 4, 12, 13],
        [0, 1, 14, 15],
    ],
    dtype=torch.int32,
)
ENDS = [96, 127, 70, 100, 40, 5, 95, 110, 111]


def shared_and_copied(kernels: NativeKernels, config: Any, kind: Any, window: int) -> tuple[Rows, list[Rows]]:
    """All sequences in one step over shared pages; and each alone over pages that only it has."""
    sequences, width = SHARING.shape
    copies = torch.arange(16, 16 + sequences * width, dtype=torch.int32).reshape(sequences, width)
    layer = KeyValueCache(config, 16 + sequences * width, kind).layers[0]
    generator = torch.Generator().manual_seed(5)
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    for page in range(16):
        one = replace(
            rows_of_one_sequence(0, 32), slots=torch.arange(page * 32, page * 32 + 32), rotations=torch.arange(32).int()
        )
        kernels.rotate_and_store(torch.randn((32, heads), generator=generator) * 2, None, one, layer)
    for index in range(sequences):
        for place, page in enumerate(SHARING[index].tolist()):
            if page >= 0:
                layer.pages[copies[index, place]] = layer.pages[page]
    together = decoding(SHARING, ENDS)
    # The queries alone are wanted of this; what it stores goes where nobody looks.
    aside = KeyValueCache(config, 16, kind).layers[0]
    y = torch.randn((sequences, heads), generator=generator) * 2
    queries = kernels.rotate_and_store(y, None, together, aside)
    alone = [
        kernels.attend(queries[i : i + 1], decoding(copies[i : i + 1], ENDS[i : i + 1]), layer, window=window)
        for i in range(sequences)
    ]
    return kernels.attend(queries, together, layer, window=window), alone


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16", "fp32"])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(32, 3, 3), (64, 2, 2), (32, 4, 2)])
def test_a_page_shared_with_other_sequences_gives_the_same_bits_as_a_copy_of_its_own(
    head_dim: int, heads: int, kv_heads: int, kind: Any, tiny_store: Path
) -> None:
    tiny = StoreManifest.load(tiny_store).config
    config = replace(tiny, head_dim=head_dim, heads=heads, kv_heads=kv_heads, hidden_size=heads * head_dim)
    kernels = NativeKernels(config, "int8")
    if kind not in kernels.cache_kinds:
        pytest.skip("this processor has no dot products of bytes")
    for window in (0, 40):
        together, alone = shared_and_copied(kernels, config, kind, window)
        assert together.scales is not None
        for index, row in enumerate(alone):
            assert row.scales is not None
            assert torch.equal(row.values[0], together.values[index])
            assert torch.equal(row.scales[0], together.scales[index])


def test_tiles_and_dot_products_give_the_same_bits(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "amx_int8" not in Path("/proc/cpuinfo").read_text() or shutil.which("g++") is None:
        pytest.skip("needs a processor with tiles, and g++ to compile for one without")
    config = replace(StoreManifest.load(tiny_store).config, head_dim=32, heads=4, kv_heads=2, hidden_size=128)
    by_tiles = NativeKernels(config, "int8")
    compiler = tmp_path / "without-tiles"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -mno-amx-int8 -mno-amx-tile\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    by_dot_products = NativeKernels(config, "int8")
    first, _ = shared_and_copied(by_tiles, config, "int8", 0)
    second, _ = shared_and_copied(by_dot_products, config, "int8", 0)
    assert torch.equal(first.values, second.values)

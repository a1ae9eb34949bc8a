"""Keys and values that hold NaN or infinity reach the rows that see them, and change no bit of any other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_prompts import kernels_of

from inference.kernels.base import Kernels, KeyValueCache
from inference.model.batch import StepBatch
from inference.weights.manifest import StoreManifest

TOKENS = 130
BROKEN = [37, 38, 101]  # tokens
WINDOW = 24


def segments(*pieces: tuple[list[int], int, int]) -> StepBatch:
    """Rows of one step: (pages, first token, rows) of each sequence."""
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in pieces])
    slots = [
        torch.tensor(pages)[torch.arange(first, first + count) // 32] * 32 + torch.arange(first, first + count) % 32
        for pages, first, count in pieces
    ]
    counts = [count for _, _, count in pieces]
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions.int(),
        rotations=positions.int(),
        slots=torch.cat(slots),
        segment_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        page_table=torch.tensor([pages for pages, _, _ in pieces], dtype=torch.int32),
        logit_rows=torch.tensor([], dtype=torch.int64),
        lengths=tuple((count, first + count) for _, first, count in pieces),
    )


@pytest.fixture(params=["native fp32", "native bf16", "native int8", "native int4", "torch fp32", "torch bf16"])
def kernels_and_kind(request: pytest.FixtureRequest) -> tuple[str, Any]:
    name, kind = request.param.split()
    return name, kind


SHAPES = [(32, 3, 3), (64, 2, 2), (32, 4, 2), (32, 8, 1)]


def make(name: str, kind: Any, shape: tuple[int, int, int], store: Path, softcap: float) -> tuple[Kernels, Any]:
    head_dim, heads, kv_heads = shape
    config = replace(
        StoreManifest.load(store).config,
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        hidden_size=heads * head_dim,
        attention_softcap=softcap,
    )
    kernels = kernels_of(name, config, "fp32")  # so that a row's result can be looked at
    if kind not in kernels.cache_kinds:
        pytest.skip("this processor has no dot products of bytes")
    return kernels, KeyValueCache(config, 16, kind).layers[0]


def given(shape: tuple[int, int, int], rows: int) -> torch.Tensor:
    """Queries, keys and values as a product gives them."""
    head_dim, heads, kv_heads = shape
    return torch.randn((rows, (heads + 2 * kv_heads) * head_dim), generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_seen_does_no_harm(
    kernels_and_kind: tuple[str, Any], shape: tuple[int, int, int], softcap: float, tiny_store: Path
) -> None:
    kernels, layer = make(*kernels_and_kind, shape, tiny_store, softcap)
    head_dim, heads, kv_heads = shape
    whole = segments(([7, 2, 9, 4, 11], 0, TOKENS))
    group = heads // kv_heads * head_dim
    places = {"keys": heads * head_dim, "values": (heads + kv_heads) * head_dim}
    for window, wrong, part in itertools.product([0, WINDOW], [float("nan"), float("inf")], places):
        y = given(shape, TOKENS)
        sane = kernels.attend(kernels.rotate_and_store(y, None, whole, layer), whole, layer, window=window).values
        y[BROKEN, places[part] + 3] = wrong  # of one key-value head; the others' rows stay sane
        found = kernels.attend(kernels.rotate_and_store(y, None, whole, layer), whole, layer, window=window).values
        for row in range(TOKENS):
            if not any(token <= row and (not window or token > row - window) for token in BROKEN):
                assert torch.equal(found[row], sane[row]), (row, window, wrong, part)
                continue
            if part == "values" or wrong != wrong:  # a score of minus infinity is one of no weight
                assert not torch.isfinite(found[row, :group]).all(), (row, window, wrong, part)
            assert torch.equal(found[row, group:], sane[row, group:]), (row, window, wrong, part)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_page_may_hold_anything_behind_what_has_been_written(
    kernels_and_kind: tuple[str, Any], shape: tuple[int, int, int], tiny_store: Path
) -> None:
    kernels, layer = make(*kernels_and_kind, shape, tiny_store, 0.0)
    pages = [7, 2, 9, 4, 11]
    cases = [(pages, 0, 45), (pages, 45, 1), (pages, 46, 7)]
    y = given(shape, 53)

    def run() -> list[torch.Tensor]:
        made = []
        for _, first, count in cases:
            batch = segments((pages, first, count))
            queries = kernels.rotate_and_store(y[first : first + count].contiguous(), None, batch, layer)
            made.append(kernels.attend(queries, batch, layer).values)
        return made

    clean = run()
    stale = torch.full((160, y.shape[1]), torch.nan)
    kernels.rotate_and_store(stale, None, segments((pages, 0, 160)), layer)
    for before, after in zip(clean, run(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_that_share_pages_with_a_broken_one_keep_their_bits(
    kernels_and_kind: tuple[str, Any], shape: tuple[int, int, int], tiny_store: Path
) -> None:
    kernels, layer = make(*kernels_and_kind, shape, tiny_store, 0.0)
    y = given(shape, 200)
    kernels.rotate_and_store(y[:64].contiguous(), None, segments(([0, 1], 0, 64)), layer)
    # One goes on with a piece of its prompt, the others decode.
    step = segments(([0, 1, 2, 3], 64, 40), ([0, 1, 4, -1], 64, 1), ([0, 1, 5, -1], 64, 1), ([0, 1, 6, -1], 64, 1))
    rows = y[64:107].clone()
    queries = kernels.rotate_and_store(rows, None, step, layer)
    sane = kernels.attend(queries, step, layer).values
    rows[5] = torch.nan
    rows[41] = torch.nan
    queries = kernels.rotate_and_store(rows, None, step, layer)
    found = kernels.attend(queries, step, layer).values
    for row in range(43):
        if 5 <= row < 40 or row == 41:
            assert not torch.isfinite(found[row]).any(), row
        else:
            assert torch.equal(found[row], sane[row]), row

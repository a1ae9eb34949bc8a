"""Prompts put through a decoder without an engine: the logits of every position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inference.cache.pages import PagePool, pages_for
from inference.group import lone_sequence
from inference.kernels.base import CacheKind, Kernels, KeyValueCache
from inference.kernels.native import KernelsUnavailable, NativeKernels
from inference.kernels.reference import ReferenceKernels
from inference.model.batch import build_batch
from inference.model.config import DecoderConfig
from inference.model.decoder import Decoder
from inference.scheduler import Slice
from inference.sequence import Sequence

PAGES = 64


def kernels_of(kind: str, config: DecoderConfig, compute: Any) -> Kernels:
    """ "torch" or "native"; the test is skipped where the latter cannot be had."""
    if kind == "torch":
        return ReferenceKernels(config, compute)
    try:
        return NativeKernels(config, compute)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def sequences_of(prompts: list[list[int]], config: DecoderConfig) -> list[Sequence]:
    """With pages of their own, of the PAGES of a cache."""
    pages, sequences = PagePool(PAGES), []
    for prompt in prompts:
        sequence = lone_sequence(prompt)
        sequence.pages = [pages.take() for _ in range(pages_for(len(prompt)))]
        sequence.rotation_offset = config.rotation_offset(len(prompt))
        sequences.append(sequence)
    return sequences


def logits_of(
    decoder: Decoder, prompts: list[list[int]], cuts: int | list[int], cache: CacheKind | KeyValueCache = "fp32"
) -> list[torch.Tensor]:
    """Logits of every position of every prompt, [T, vocab] each, computed together in pieces of so many tokens.

    cuts: of all prompts, or of each. cache: its kind, or one of PAGES pages.
    """
    if isinstance(cache, str):
        cache = KeyValueCache(decoder.config, PAGES, cache)
    each = [cuts] * len(prompts) if isinstance(cuts, int) else cuts
    sequences = sequences_of(prompts, decoder.config)
    collected: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while owners := [index for index, prompt in enumerate(prompts) if done[index] < len(prompt)]:
        slices = [Slice(sequences[i], done[i], min(each[i], len(prompts[i]) - done[i])) for i in owners]
        batch = build_batch(slices)
        with torch.inference_mode():
            rows = decoder.forward(replace(batch, logit_rows=torch.arange(len(batch.token_ids))), cache)
        values = rows.values if rows.scales is None else rows.values * rows.scales[:, None]
        for index, piece, part in zip(owners, slices, values.split([piece.count for piece in slices]), strict=True):
            collected[index].append(part)
            done[index] += piece.count
    return [torch.cat(parts) for parts in collected]

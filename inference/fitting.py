"""How many pages a cache can have in the memory that is left, and what a step needs besides."""

from __future__ import annotations

from typing import Literal

from inference.cache.pages import pages_for
from inference.errors import MemoryBudgetError, SettingError
from inference.kernels.base import CacheKind, Kernels, page_head_bytes
from inference.model.config import DecoderConfig
from inference.scheduler import CHUNK_TOKENS

CacheChoice = Literal["auto", "fp32", "bf16", "int8", "int4"]


def cache_kind(choice: CacheChoice, kernels: Kernels) -> CacheKind:
    """The cache asked for, or the kernels' own choice; SettingError where they cannot read it."""
    if choice == "auto":
        return kernels.cache_kinds[0]
    if choice not in kernels.cache_kinds:
        raise SettingError("cache", f"is {choice!r}; the {kernels.name} kernels read {', '.join(kernels.cache_kinds)}")
    return choice


def workspace_bytes(config: DecoderConfig, max_batch: int, token_budget: int) -> int:
    """An upper bound of the activations of one step: float32 rows, several at a time, and the logits twice."""
    rows = max(token_budget, max_batch) + CHUNK_TOKENS
    widest = 2 * config.widest + 4 * config.hidden_size + config.query_size + 2 * config.kv_size
    return rows * widest * 4 * 2 + max_batch * config.vocab_size * 4 * 2


def cache_pages(config: DecoderConfig, kind: CacheKind, free_bytes: int, max_batch: int, token_budget: int) -> int:
    """`fitting_pages` of this model's cache of that kind."""
    page_bytes = config.layers * config.kv_heads * page_head_bytes(kind, config.head_dim)
    return fitting_pages(config, page_bytes, free_bytes, max_batch, token_budget)


def fitting_pages(config: DecoderConfig, page_bytes: int, free_bytes: int, max_batch: int, token_budget: int) -> int:
    """Pages that fit into the free bytes; never more than max_batch sequences of full length can use.

    MemoryBudgetError where not one does.
    """
    workspace = workspace_bytes(config, max_batch, token_budget)
    fitting = (free_bytes - workspace) // page_bytes
    if fitting < 1:
        raise MemoryBudgetError(
            f"the budget leaves no room for a cache: {max(0, free_bytes)} bytes are left beside the weights, for "
            f"{workspace} bytes of workspace and pages of {page_bytes}; allow more, or a smaller max_batch"
        )
    return int(min(fitting, max_batch * pages_for(config.max_context)))

"""What a model takes of a device's memory and of the host's, told before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from inference.cache.spilled.sizes import buffer_pages
from inference.device.cache import BUFFERS
from inference.fitting import workspace_bytes
from inference.kernels.base import CacheKind
from inference.memory.placement import Placement
from inference.planner.sizes import ModelSizes

# Attention gathers a layer's pages into one piece and turns keys and values the way it multiplies them.
GATHERED = 4


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes of a device's memory, of the host's memory, and of files."""

    device: int
    host: int
    disk: int


def tier_bytes(
    sizes: ModelSizes, placement: Placement, cache: CacheKind, pages: int, *, max_batch: int, token_budget: int
) -> TierBytes:
    """What lies where by a placement on a device, with a cache of so many pages."""
    config = sizes.config
    layers = set(range(config.layers))
    on_disk = layers - placement.pinned - placement.hosted
    page = sizes.page_of_layer(cache)
    hosted_cache = len(placement.hosted_cache)
    device = fixed_bytes(sizes, max_batch, token_budget) + (sizes.embedding if placement.embedding_pinned else 0)
    device += sum(sizes.layers[index] for index in placement.pinned) + (sizes.head if placement.head_pinned else 0)
    copied = [sizes.layers[index] for index in layers - placement.pinned]
    copied += [sizes.head] if placement.head_hosted else []
    device += placement.device_ring * max(copied, default=0)
    device += pages * page * (config.layers - hosted_cache + GATHERED)
    if hosted_cache:
        device += BUFFERS * buffer_pages(config, cache, pages) * page
    host = sum(sizes.layers[index] for index in placement.hosted) + (sizes.head if placement.head_hosted else 0)
    host += placement.ring * max((sizes.layers[index] for index in on_disk), default=0)
    host += hosted_cache * pages * page + (0 if placement.embedding_pinned else sizes.embedding // 8)
    image = sizes.weights if placement.streams(config.layers, head=config.has_head) else 0
    return TierBytes(device, host, image)


def fixed_bytes(sizes: ModelSizes, max_batch: int, token_budget: int) -> int:
    """Of the device: what no placement can change."""
    return sizes.small + workspace_bytes(sizes.config, max_batch, token_budget)

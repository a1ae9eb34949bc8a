"""Rotary position embedding (arXiv 2104.09864), half-rotation layout: element i pairs with i + rotated / 2."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from inference.model.config import DecoderConfig, RopeScaling


class RotaryTable(NamedTuple):
    """cos and sin, float32 [rows, rotated / 2]; row p is position p.

    Where frequencies depend on the sequence's length (longrope), row max_context + p is position p of a long one.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_tables(config: DecoderConfig) -> list[RotaryTable]:
    """Table 0, which most layers use, and table 1 for layers with a local theta, where the model has those."""
    tables = [_table(config, config.rope_theta, config.rope_scaling)]
    if config.local_rope_theta is not None:
        tables.append(_table(config, config.local_rope_theta, None))
    return tables


def _table(config: DecoderConfig, theta: float, scaling: RopeScaling | None) -> RotaryTable:
    exponents = torch.arange(0, config.rotated, 2, dtype=torch.float32) / config.rotated
    frequencies = 1.0 / (float(theta) ** exponents)  # [rotated / 2]
    positions = torch.arange(config.max_context, dtype=torch.float32)[:, None]
    if scaling is None:
        angles = positions * frequencies
        return RotaryTable(angles.cos(), angles.sin())
    choices = [scaling.short_factors, scaling.long_factors] if config.has_long_context else [scaling.short_factors]
    angles = torch.cat([positions * _stretched(frequencies, theta, scaling, factors) for factors in choices])
    return RotaryTable(angles.cos() * scaling.attention_factor, angles.sin() * scaling.attention_factor)


def _stretched(
    frequencies: torch.Tensor, theta: float, scaling: RopeScaling, factors: tuple[float, ...]
) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind in ("longrope", "factors"):
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    if scaling.kind == "yarn":
        return _yarn(frequencies, theta, scaling)
    # Llama 3.1: wavelengths longer than the low bound are stretched, shorter than the high bound kept, between blended.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_context / wavelengths) - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > scaling.original_max_context / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= scaling.original_max_context / low) & (wavelengths >= scaling.original_max_context / high)
    return torch.where(between, blended, stretched)


def _yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Frequencies that turn often within the original context are kept, slow ones stretched, between blended."""
    half = len(frequencies)

    def index_of(rotations: float) -> float:
        return half * math.log(scaling.original_max_context / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    share = ramp.clamp(0, 1)
    return frequencies / scaling.factor * share + frequencies * (1 - share)

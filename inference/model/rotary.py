"""Rotary position embedding (arXiv 2104.09864), half-rotation layout: element i pairs with i + head_dim / 2."""

from __future__ import annotations

import math

import torch

from inference.model.config import DecoderConfig, RopeScaling


def rotary_tables(config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_context, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)  # [head_dim / 2]
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.arange(config.max_context, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos().contiguous(), angles.sin().contiguous()


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: wavelengths longer than the low bound are stretched, shorter than the high bound kept, between blended.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_context / wavelengths) - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > scaling.original_max_context / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= scaling.original_max_context / low) & (wavelengths >= scaling.original_max_context / high)
    return torch.where(between, blended, stretched)

"""The token embedding, kept as it is stored: rows are dequantized as they are looked up."""

from __future__ import annotations

import numpy as np
import torch

from inference.quant.groupwise import GroupwiseTensor
from inference.quant.rotated import RotatedTensor, dequantize_rotated
from inference.weights.store import StoreReader


class Embedding:
    def __init__(self, reader: StoreReader) -> None:
        stored = reader.tensor("embedding")
        if isinstance(stored, RotatedTensor):
            stored = dequantize_rotated(stored)
        self._table: torch.Tensor | None = None
        if isinstance(stored, GroupwiseTensor):
            self._group = stored.group_size
            self._packed = stored.scheme == "int4"
            self._values = torch.from_numpy(stored.values.copy())
            self._scales = torch.from_numpy(stored.scales.astype(np.float32))
            minima = stored.minima
            self._minima = None if minima is None else torch.from_numpy(minima.astype(np.float32))
            self.nbytes = self._values.nbytes + self._scales.nbytes * (1 if minima is None else 2)
        elif stored.dtype == np.uint16:
            self._table = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
            self.nbytes = self._table.nbytes
        else:
            self._table = torch.from_numpy(stored.copy())
            self.nbytes = self._table.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [M] -> float32 [M, H]."""
        if self._table is not None:
            return self._table[token_ids].float()
        levels = self._values[token_ids]  # [M, H] or [M, H / 2]
        if self._packed:
            levels = torch.stack([levels & 0x0F, levels >> 4], dim=2).reshape(len(token_ids), -1)
        groups = levels.reshape(len(token_ids), -1, self._group).float()
        groups *= self._scales[token_ids][:, :, None]
        if self._minima is not None:
            groups += self._minima[token_ids][:, :, None]
        return groups.reshape(len(token_ids), -1)

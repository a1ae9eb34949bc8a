"""transformers' model built without weights, and filled from a store part by part."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inference.errors import StoreError
from inference.kernels.base import Compute
from inference.memory.direct import aligned
from inference.model.foreign_linear import linear_modules
from inference.weights.store import StoreReader

PROBE = (1, 2, 3, 4)
"""Tokens that a model is tried on."""
SETTINGS_NAME = "config.json"
_building = threading.Lock()


def maker_and_settings(store: Path) -> tuple[Any, Any]:
    """transformers' class for a store's model, and its configuration."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    values = json.loads((store / SETTINGS_NAME).read_text("utf-8"))
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    makers: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    return (makers[0] if isinstance(makers, tuple) else makers), settings


def dtype_of(compute: Compute) -> torch.dtype:
    return torch.bfloat16 if compute == "bf16" else torch.float32


class Shell:
    """`model`: all but its repeated blocks' weights is filled. `blocks`: those, the largest list of modules in it."""

    def __init__(self, reader: StoreReader, compute: Compute) -> None:
        """Raises StoreError: it has no blocks, lacks tensors, or transformers changes its tensors while loading."""
        maker, settings = maker_and_settings(reader.folder)
        dtype = dtype_of(compute)
        try:
            with _building, _parameters_on_meta():
                self.model: Any = maker._from_config(settings, dtype=dtype).eval()
        except MemoryError:
            raise
        except Exception as error:  # its code meets a configuration that nobody has checked
            raise StoreError(reader.folder, f"transformers cannot build it: {error}") from None
        self.folder = reader.folder
        self._reader = reader
        self._compute = compute
        lists = [(name, one) for name, one in self.model.named_modules() if isinstance(one, nn.ModuleList)]
        if not lists:
            raise StoreError(reader.folder, "has no list of layers, so none can be streamed; allow more memory")
        self._prefix, found = max(lists, key=lambda one: sum(part.numel() for part in one[1].parameters()))
        self.blocks: list[nn.Module] = list(found)
        self._empty: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        self._dtypes = {name: one.dtype for name, one in self._empty.items()}
        for pattern, kept in self.model._get_dtype_plan(dtype).items():
            self._dtypes.update({name: kept for name in self._empty if pattern in name})
        self._sources = self._found_sources()
        self._fill_the_rest()

    def block_tensors(self, index: int) -> list[str]:
        """Names of a block's parameters and kept buffers."""
        return [name for name in self._empty if name.startswith(f"{self.block_name(index)}.")]

    def block_name(self, index: int) -> str:
        return f"{self._prefix}.{index}"

    def is_streamed(self, name: str) -> bool:
        """Whether a block's tensor is a matrix; all else is small and stays in memory."""
        return self._empty[name].ndim >= 2 and isinstance(self._empty[name], nn.Parameter)

    def unit_nbytes(self, index: int) -> int:
        """Bytes of a block's file, nearly: its linear layers may turn out to be int8 or not."""
        linear = {f"{name}.weight" for name in linear_modules(self.blocks[index])} if self._compute == "int8" else set()
        total = 0
        for name in self.block_tensors(index):
            if self.is_streamed(name):
                empty = self._empty[name]
                inner = name.removeprefix(f"{self.block_name(index)}.")
                rows = max(empty.shape)
                width = empty.numel() if inner in linear else empty.numel() * self._dtypes[name].itemsize
                total += aligned(width) + (aligned(rows * 4) if inner in linear else 0)
        return total

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the model as the store has it, in the type that the model computes with. Raises StoreError."""
        values = torch.from_numpy(self._reader.float32(self._sources[name]).copy()).to(self._dtypes[name])
        if values.shape != self._empty[name].shape:
            raise StoreError(
                self._reader.folder, f"{name} is {list(values.shape)}, not {list(self._empty[name].shape)}"
            )
        return values

    def put(self, name: str, values: torch.Tensor) -> None:
        """Put values in the place of one of the model's tensors."""
        owner, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(owner)
        if attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(values, requires_grad=False)
        else:
            module._buffers[attribute] = values

    @contextmanager
    def filled(self, index: int) -> Iterator[None]:
        """A block with its matrices in memory."""
        names = [name for name in self.block_tensors(index) if self.is_streamed(name)]
        for name in names:
            self.put(name, self.tensor(name))
        try:
            yield
        finally:
            for name in names:
                self.put(name, self._empty[name])
            self._reader.forget_cached()

    @property
    def nbytes(self) -> int:
        """Bytes of what is in memory."""
        return sum(int(one.nbytes) for one in self.model.parameters() if one.device.type != "meta")

    def _found_sources(self) -> dict[str, str]:
        """The store's names of the model's tensors, by the model's own."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        steps: Any = get_model_conversion_mapping(self.model)
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        prefix, found = self.model.base_model_prefix, {}
        for entry in self._reader.manifest.tensors:
            name, converted = rename_source_key(entry.name, renamings, converters, prefix, self._empty)
            if name not in self._empty and entry.name in self._empty:
                name, converted = entry.name, None
            if converted is not None:
                raise StoreError(
                    self._reader.folder,
                    f"{entry.name} is converted when transformers loads it, so its layers cannot be streamed; "
                    "allow more memory",
                )
            if name in self._empty:
                found[name] = entry.name
        return found

    def _fill_the_rest(self) -> None:
        """Everything but the blocks' matrices. StoreError where the store lacks any of the model's tensors."""
        in_blocks = {name for index in range(len(self.blocks)) for name in self.block_tensors(index)}
        for name in self._sources:
            if name not in in_blocks or not self.is_streamed(name):
                self.put(name, self.tensor(name))
        self._reader.forget_cached()
        missing = {name for name, one in self._empty.items() if isinstance(one, nn.Parameter)} - set(self._sources)
        self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        lost = sorted(missing | self._unfilled(in_blocks))
        if lost:
            raise StoreError(self._reader.folder, f"lacks {len(lost)} of its model's tensors, {lost[0]!r} among them")

    def _unfilled(self, in_blocks: Iterable[str]) -> set[str]:
        streamed = {name for name in in_blocks if self.is_streamed(name)} & set(self._sources)
        now: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        return {name for name, one in now.items() if one.device.type == "meta"} - streamed


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes have parameters without memory. Buffers are made as ever."""
    register = nn.Module.register_parameter
    builder = threading.get_ident()

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta" and threading.get_ident() == builder:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

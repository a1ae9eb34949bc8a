"""The repeated blocks of transformers' models: in memory, or in an image of them on disk and streamed from there."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn

from inference.errors import StoreError
from inference.kernels.base import Compute
from inference.memory.image import ImageKey, LayerImage, UnitPlace, Views
from inference.memory.image_making import Matrix, Unit, image_for
from inference.memory.placement import Placement
from inference.memory.ring import LayerRing, StreamStats, read_units
from inference.model.foreign_lanes import OutOfTurnError, in_turns, wait_for_turn
from inference.model.foreign_linear import QuantizedLinear, called_among, int8_of, linear_modules, put_int8
from inference.model.foreign_shell import PROBE, Shell
from inference.model.layers import unit_name
from inference.model.linear import Int8Linear
from inference.weights.store import StoreReader

T = TypeVar("T")
_PLAIN = "parameter"
_HOUSE = Path(__file__).parents[1]
# What decides about the bytes of an image.
_LAYING_OUT = ("quant/*.py", "model/linear.py", "model/foreign_linear.py", "model/foreign_shell.py")


class Blocks(Protocol):
    nbytes: int
    """Bytes of memory that they hold."""
    bound_nbytes: int
    """Bytes of the model's tensors that are counted in those, or lie on disk."""

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """What the tasks return, each of which calls the model once. Raises StoreError."""
        ...

    def stream_stats(self) -> StreamStats | None:
        """None where nothing is streamed."""
        ...

    def close(self) -> None:
        """Read no more."""
        ...


class BlocksInMemory:
    nbytes = 0  # they are counted with the model
    bound_nbytes = 0

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        return [task() for task in tasks]

    def stream_stats(self) -> StreamStats | None:
        return None

    def close(self) -> None:
        pass


class StreamedBlocks:
    """What the placement pins is read once, here; the rest whenever a step comes to it, for all sequences at once."""

    def __init__(self, shell: Shell, image: LayerImage, placement: Placement) -> None:
        """Binds all blocks of the shell's model. Raises StoreError, MemoryError."""
        count = len(shell.blocks)
        self._where = image.folder
        self._units = [image.unit(unit_name(index)) for index in range(count)]
        pinned = [unit_name(index) for index in range(count) if index in placement.pinned]
        streamed = [unit_name(index) for index in range(count) if index not in placement.pinned]
        held = read_units(image, pinned, placement.readers)
        self._ring = LayerRing(image, streamed, ring=placement.ring, readers=placement.readers)
        weakref.finalize(self, self._ring.stop)
        self._streamed = frozenset(streamed)
        self._blocks = [_Bound(shell.blocks[index], self._units[index]) for index in range(count)]
        for index, (block, unit) in enumerate(zip(self._blocks, self._units, strict=True)):
            block.bind(held.get(unit.name) or self._ring.first_views(unit.name))
            shell.blocks[index].register_forward_pre_hook(lambda *_, index=index: wait_for_turn(index))
        self.nbytes = sum(image.unit(name).bytes for name in pinned) + self._ring.nbytes
        self.bound_nbytes = sum(block.nbytes for block in self._blocks)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        try:
            with self._ring.step(optional=False):
                return in_turns(tasks, len(self._blocks), self._ready)
        except OutOfTurnError as error:
            raise StoreError(self._where, f"cannot be streamed: {error}; allow more memory") from None

    def _ready(self, index: int) -> AbstractContextManager[None]:
        return self._from_ring(index) if self._units[index].name in self._streamed else nullcontext()

    @contextmanager
    def _from_ring(self, index: int) -> Iterator[None]:
        with self._ring.unit(self._units[index].name) as views:
            self._blocks[index].bind(views)
            yield

    def stream_stats(self) -> StreamStats | None:
        return self._ring.stats()

    def close(self) -> None:
        self._ring.close()


class _Bound:
    """A block whose matrices can be put over other memory."""

    def __init__(self, block: nn.Module, unit: UnitPlace) -> None:
        self._int8: dict[str, QuantizedLinear | None] = {}
        self._plain: dict[str, tuple[nn.Module, str]] = {}
        self._block = block
        for matrix in unit.matrices:
            if matrix.form == _PLAIN:
                owner, _, attribute = matrix.name.rpartition(".")
                self._plain[matrix.name] = (block.get_submodule(owner), attribute)
            else:
                self._int8[matrix.name] = None

    @property
    def nbytes(self) -> int:
        """Of the matrices, as the model's tensors tell it."""
        plain = sum(module.get_parameter(name).nbytes for module, name in self._plain.values())
        return plain + sum(layer.nbytes for layer in self._int8.values() if layer is not None)

    def bind(self, views: Views) -> None:
        for name, (module, attribute) in self._plain.items():
            module._parameters[attribute] = nn.Parameter(views[name]["weight"], requires_grad=False)
        for name, layer in self._int8.items():
            linear = Int8Linear(views[name]["levels"], views[name]["scales"])
            if layer is None:
                self._int8[name] = put_int8(self._block, name, linear)
            else:
                layer.linear = linear


def blocks_image(shell: Shell, reader: StoreReader, compute: Compute, folder: Path | None = None) -> LayerImage:
    """The image of a shell's blocks; made where there is none yet, a block at a time. Raises StoreError."""
    import transformers

    digest = hashlib.sha256()
    for path in sorted(path for pattern in _LAYING_OUT for path in _HOUSE.glob(pattern)):
        digest.update(path.read_bytes())
    layout = f"transformers {transformers.__version__} {digest.hexdigest()[:16]}"
    count = len(shell.blocks)
    return image_for(
        ImageKey(reader.manifest.digest, compute, layout),
        lambda: _units(shell, compute),
        total=count,
        expected_bytes=sum(shell.unit_nbytes(index) for index in range(count)),
        folder=folder,
    )


def _units(shell: Shell, compute: Compute) -> Iterator[Unit]:
    called = _called(shell) if compute == "int8" else frozenset()
    for index in range(len(shell.blocks)):
        with shell.filled(index):
            yield Unit(unit_name(index), _matrices(shell, index, called))


def _matrices(shell: Shell, index: int, called: frozenset[str]) -> Iterable[Matrix]:
    prefix = f"{shell.block_name(index)}."
    for name in shell.block_tensors(index):
        if not shell.is_streamed(name):
            continue
        module = name.rpartition(".")[0]
        if name.endswith(".weight") and module in called:
            linear = int8_of(name, shell.model.get_submodule(module))
            yield Matrix(module.removeprefix(prefix), linear.form, [linear.arrays()])
        else:
            weight = shell.model.get_parameter(name).detach()
            yield Matrix(name.removeprefix(prefix), _PLAIN, [{"weight": weight}])


def _called(shell: Shell) -> frozenset[str]:
    """Linear modules of the blocks that the model calls, found by computing a token, a block in memory at a time."""

    def run() -> None:
        with torch.inference_mode():
            ids = torch.tensor([PROBE]) % shell.model.config.get_text_config().vocab_size
            in_turns([lambda: shell.model(ids, use_cache=False)], len(shell.blocks), shell.filled)

    hooks = [
        block.register_forward_pre_hook(lambda *_, index=index: wait_for_turn(index))
        for index, block in enumerate(shell.blocks)
    ]
    try:
        modules = linear_modules(shell.model)
        inside = tuple(f"{shell.block_name(index)}." for index in range(len(shell.blocks)))
        return frozenset(called_among({name: one for name, one in modules.items() if name.startswith(inside)}, run))
    except OutOfTurnError as error:
        raise StoreError(shell.folder, f"cannot be streamed: {error}; allow more memory") from None
    finally:
        for hook in hooks:
            hook.remove()

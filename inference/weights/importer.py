"""From a model file to a weight store, one tensor at a time, so that memory stays small."""

from __future__ import annotations

import math
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from inference.errors import CalibrationError, StoreError
from inference.quant import groupwise
from inference.quant.groupwise import Array, GroupwiseTensor, check_finite, dequantize, fitting_group
from inference.quant.rotated import RotatedTensor, dequantize_rotated, quantize_rotated
from inference.quant.rotated import fits as rotated_fits
from inference.weights.manifest import StoreManifest
from inference.weights.sources import ModelSource, Weights, open_source, reading
from inference.weights.store import StoreWriter, bfloat16_to_float32, float32_to_bfloat16, write_manifest, writing_store

if TYPE_CHECKING:
    from inference.quant.calibration import Calibration

Quantize = Literal["keep", "int4", "int8", "bf16"]

GROUP_SIZES = (32, 64, 128)
# The vocabulary's two matrices touch every token; 4 bits there cost more quality than they save.
_VOCABULARY = ("embedding", "head")
# What they are called, in part, by models that keep their own names.
_VOCABULARY_ELSEWHERE = ("embed", "lm_head", ".wte.", ".wpe.")


def import_model(
    source: Path | str,
    store: Path | str,
    *,
    quantize: Quantize = "keep",
    group_size: int = 32,
    calibrate: Path | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoreManifest:
    """Import a GGUF file, a Hugging Face folder or another store into a new weight store.

    `keep` takes the source's precision as it is; `int4` and `int8` quantize what is wider (embedding and head at 8 bits
    at least), taking over without a second loss what is quantized so already; `bf16` widens or narrows to bfloat16.
    4 bits are chosen for the rotated weights (`quant.rotated`) where a row divides into blocks of 64, else for the
    weights as they are (`quant.groupwise`). Norms, biases and routers stay float32. A matrix whose rows do not divide
    into groups of that size gets the next smaller one that fits. `calibrate`: a text file by which `int4` or `int8`
    rounding is chosen to change the layers' outputs least (`quant.gptq`); it needs torch, memory for the model in
    float32, and room on disk for a copy of the source meanwhile. `progress` is called with (weights done, in all).

    Raises ModelFormatError (source), QuantizationError (NaN, infinity), StoreError (store exists, disk full). The store
    appears whole or not at all. CalibrationError where the text cannot be read, or does not serve, or where nothing is
    rounded by it, since all is quantized already.
    """
    if quantize not in ("keep", "int4", "int8", "bf16"):
        raise ValueError(f"quantize is {quantize!r}; keep, int4, int8 or bf16 is expected")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}; one of {GROUP_SIZES} is expected")
    if calibrate is not None and quantize not in ("int4", "int8"):
        raise CalibrationError(f"a calibration text serves int4 and int8; quantize is {quantize!r}")
    origin = open_source(Path(source))
    with _calibration(Path(source), Path(store), calibrate) as calibration, writing_store(Path(store)) as writer:
        _write_tensors(origin, writer, quantize, group_size, calibration, progress)
        if calibration is not None and not calibration.is_used:
            # Else the manifest would tell of a rounding that never took place.
            raise CalibrationError(
                f"no matrix would be rounded by {calibrate}: {origin.path.name} is quantized already, and is taken "
                "over as it is; import it without a calibration text"
            )
        with reading(Path(source)):
            tokenizer_files, model_files = origin.tokenizer_files(), origin.model_files()
        for name, content in (tokenizer_files | model_files).items():
            writer.text(name, content)
        facts = None if calibration is None else calibration.facts
        manifest = _manifest(origin, Path(source), writer, quantize, facts, tuple(tokenizer_files))
        write_manifest(writer, manifest)
    return StoreManifest.load(store)


@contextmanager
def _calibration(source: Path, store: Path, text: Path | str | None) -> Iterator[Calibration | None]:
    """The moments of the unquantized model, read from a store of it that lies beside the new one meanwhile."""
    if text is None:
        yield None
        return
    # Only a calibrated import computes with the model: all others go without torch.
    from inference.quant.calibration import Calibration

    if store.exists():
        raise StoreError(store, "exists already; remove it or name another folder")
    kept = store.parent / f".{store.name}.{uuid.uuid4().hex[:8]}.source.partial"
    try:
        import_model(source, kept)
        yield Calibration(kept, Path(text))
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def _write_tensors(
    origin: ModelSource,
    writer: StoreWriter,
    mode: Quantize,
    group_size: int,
    calibration: Calibration | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    plan = origin.plan()
    total, done = sum(math.prod(shape) for _, _, shape in plan), 0
    for file, entries in groupby(plan, key=lambda entry: entry[0]):
        with writer.file(file) as out:
            for _, name, shape in entries:
                with reading(origin.path):
                    weights = origin.load(name, shape)
                writer.add(out, name, _converted(name, weights, mode, group_size, calibration))
                done += math.prod(shape)
                if progress is not None:
                    progress(done, total)


def _converted(
    name: str, weights: Weights, mode: Quantize, group_size: int, calibration: Calibration | None
) -> Weights:
    if not isinstance(weights, GroupwiseTensor | RotatedTensor) and weights.ndim != 2:
        return _float32(weights) if weights.ndim == 1 else weights
    # A router's pick of experts is all or nothing, and its matrix is tiny.
    if name.endswith(".router"):
        return _float32(weights)
    if isinstance(weights, GroupwiseTensor):
        check_finite(name, weights)
    if mode == "keep":
        return weights
    if mode == "bf16":
        is_bf16 = not isinstance(weights, GroupwiseTensor | RotatedTensor) and weights.dtype == np.uint16
        return weights if is_bf16 else float32_to_bfloat16(_float32(weights))
    scheme: Literal["int4", "int8"] = "int8" if mode == "int8" or _is_vocabulary(name) else "int4"
    if isinstance(weights, RotatedTensor):
        return weights
    if isinstance(weights, GroupwiseTensor) and (weights.scheme == scheme or weights.scheme == "int4"):
        return weights
    group = fitting_group(weights.shape[1], group_size)
    if weights.shape[1] % group:
        return weights  # rows that divide into no groups stay as they are
    rotated = scheme == "int4" and rotated_fits(weights.shape[1], group)
    moments = None if calibration is None else calibration.moments(name)
    if moments is None:
        if rotated:
            return quantize_rotated(name, _float32(weights), group)
        return groupwise.quantize(name, _float32(weights), scheme, group)
    from inference.quant.gptq import quantize_by_moments, quantize_rotated_by_moments

    if rotated:
        return quantize_rotated_by_moments(name, _float32(weights), moments, group)
    return quantize_by_moments(name, _float32(weights), moments, scheme, group)


def _is_vocabulary(name: str) -> bool:
    return name in _VOCABULARY or any(part in name for part in _VOCABULARY_ELSEWHERE)


def _float32(weights: Weights) -> Array:
    if isinstance(weights, GroupwiseTensor):
        return dequantize(weights)
    if isinstance(weights, RotatedTensor):
        return dequantize_rotated(weights)
    if weights.dtype == np.uint16:
        return bfloat16_to_float32(weights)
    return weights.astype(np.float32)


def _manifest(
    origin: ModelSource,
    source: Path,
    writer: StoreWriter,
    mode: Quantize,
    calibration: dict[str, Any] | None,
    tokenizer_files: tuple[str, ...],
) -> StoreManifest:
    tensors = tuple(writer.tensors)
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    weights: Counter[str] = Counter()
    for tensor in matrices:
        label = f"{tensor.encoding} group {tensor.group_size}" if tensor.group_size else tensor.encoding
        weights[label] += math.prod(tensor.shape)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    stored = sum(part.bytes for tensor in tensors for part in tensor.parts)
    return StoreManifest(
        config=origin.config,
        files=tuple(writer.files),
        tensors=tensors,
        quantization={
            "requested": mode,
            "scheme": weights.most_common(1)[0][0],
            "weights_by_encoding": dict(sorted(weights.items())),
            "bits_per_weight": round(8 * stored / parameters, 3),
            **({} if calibration is None else {"calibration": calibration}),
        },
        source_name=source.resolve().name,
        source_format=origin.format,
        source_digest=origin.digest(),
        licence=origin.licence,
        model_name=origin.model_name,
        parameters=parameters,
        tokenizer_files=tokenizer_files,
        pooling=origin.pooling,
    )

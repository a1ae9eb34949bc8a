"""What can go wrong in the engine, one class a kind. Each says what, where, and what would be right."""

from __future__ import annotations

BROKEN = "the model produced NaN or infinity for this request; its weights may be damaged"


class InferenceError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidRequest(InferenceError):
    """A request that cannot run as it stands. `field` names the offending part."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ModelFormatError(InferenceError):
    """A model file that is truncated, malformed or of a kind that is not supported.

    `where` is a tensor, key or byte offset within `file`.
    """

    def __init__(self, file: object, where: str, message: str) -> None:
        super().__init__(f"{file}: {where}: {message}")
        self.file = str(file)
        self.where = where
        self.message = message


class StoreError(InferenceError):
    """A weight store that is missing, damaged, or could not be written. `file` names the culprit."""

    def __init__(self, file: object, message: str) -> None:
        super().__init__(f"{file}: {message}")
        self.file = str(file)
        self.message = message


class QuantizationError(InferenceError):
    """Weights that cannot be quantized, such as ones with NaN. `tensor` names them."""

    def __init__(self, tensor: str, message: str) -> None:
        super().__init__(f"{tensor}: {message}")
        self.tensor = tensor
        self.message = message


class MemoryBudgetError(InferenceError):
    """The memory allowed does not hold the model and a useful cache."""


class SettingError(InferenceError):
    """A setting of an engine that makes no sense, or not on this host. `setting` names it."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting
        self.message = message


class CalibrationError(InferenceError):
    """A calibration text that cannot be read or says nothing, or one given where nothing is to be rounded by it."""


class TemplateError(InferenceError):
    """A chat template that is missing, broken, or that refuses the messages given."""


class ConstraintFailed(InferenceError):
    """A constraint that cannot be followed any further: its limits are reached, or it allows no token at all."""

    def __init__(self, message: str) -> None:
        super().__init__(f"constraint: {message}")
        self.message = message


class SegmentsFailed(InferenceError):
    """A step that failed for some of its sequences; `segments` are these, by their place in it."""

    def __init__(self, message: str, segments: list[int]) -> None:
        super().__init__(message)
        self.segments = segments


class CacheLost(SegmentsFailed):
    """Keys and values that a disk did not take, or does not give back as they were written. `file` names it."""

    def __init__(self, file: object, message: str, segments: list[int]) -> None:
        super().__init__(f"the key-value cache: {file}: {message}", segments)
        self.file = str(file)
        self.message = message


class StatesBroken(SegmentsFailed):
    """NaN or infinity in the middle of prompts: what comes after it could only be more of the same."""

    def __init__(self, segments: list[int]) -> None:
        super().__init__(BROKEN, segments)


class EmbeddingFailed(InferenceError):
    """The model's states for a text hold NaN or infinity."""


class EmbeddingCancelled(InferenceError):
    """The caller wanted no more. compute_seconds: what its texts had taken by then."""

    def __init__(self, compute_seconds: float) -> None:
        self.compute_seconds = compute_seconds
        super().__init__("the texts were cancelled")

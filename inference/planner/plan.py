"""What was decided for a model on a host: where its parts lie, how many rows go together, and what that should give."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from inference.kernels.base import CacheKind, Compute
from inference.memory.placement import Placement
from inference.planner.workload import Workload

MOST_ROWS = 2**31 - 1  # of a step, and pages of a cache
MOST_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a plan should give, by the cost model.

    seconds: for the whole workload; prefill_seconds and decode_seconds: their parts of it, a step that holds both split
    by rows, as `RunReport` splits them. step_seconds: of a step in which the full batch decodes. peak_memory_bytes: by
    tier, "host", "disk", "device". bound_by: where most of the time goes, "disk", "arithmetic", "memory" or "copies".
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    output_tokens_per_s: float
    seconds: float
    prefill_seconds: float
    decode_seconds: float
    step_seconds: float
    longest_step_seconds: float
    steps: int
    peak_memory_bytes: dict[str, int]
    streamed_bytes_per_step: int
    bound_by: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Predicted:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another plan that was looked at, and what is wrong with it.

    difference: from the plan, in words; output_tokens_per_s: what it should give, None where it cannot work; why: it is
    worse.
    """

    difference: str
    output_tokens_per_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """memory_bytes: what the whole process may take; device_bytes: and that of a device's memory, None without one.

    cache_pages: of PAGE_TOKENS tokens, over all layers.

    max_batch: sequences at a time. token_budget: rows a step. hardware: the measured figures that it rests on, by name.
    workload, predicted: None where the plan was not made for one.
    """

    placement: Placement
    compute: Compute
    cache: CacheKind
    cache_pages: int
    max_batch: int
    token_budget: int
    memory_bytes: int
    workload: Workload | None = None
    predicted: Predicted | None = None
    hardware: dict[str, float] = field(default_factory=dict)
    neighbours: tuple[Neighbour, ...] = ()
    device_bytes: int | None = None

    def __post_init__(self) -> None:
        """ValueError, naming the field: plans come out of files."""
        for name, known in (("compute", get_args(Compute)), ("cache", get_args(CacheKind))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("cache_pages", "max_batch", "token_budget", "memory_bytes"):
            count, most = getattr(self, name), MOST_BYTES if name == "memory_bytes" else MOST_ROWS
            if type(count) is not int or not 1 <= count <= most:
                raise ValueError(f"{name}: must be a whole number from 1 to {most}, not {count!r}")
        given = self.device_bytes
        if given is not None and (type(given) is not int or not 1 <= given <= MOST_BYTES):
            raise ValueError(f"device_bytes: must be None or a whole number from 1 to {MOST_BYTES}, not {given!r}")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {
            "placement": self.placement.as_dict(),
            "workload": self.workload and self.workload.as_dict(),
            "predicted": self.predicted and self.predicted.as_dict(),
            "neighbours": [asdict(neighbour) for neighbour in self.neighbours],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Of `as_dict`. ValueError, TypeError or KeyError where it is not one."""
        return cls(
            **data
            | {
                "placement": Placement.from_dict(data["placement"]),
                "workload": Workload.from_dict(data["workload"]) if data["workload"] else None,
                "predicted": Predicted.from_dict(data["predicted"]) if data["predicted"] else None,
                "neighbours": tuple(Neighbour(**neighbour) for neighbour in data["neighbours"]),
            }
        )

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, sort_keys=True) + "\n"

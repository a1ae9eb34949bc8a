"""What is to be done: how many rows, how long their prompts and answers, and how long a step may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each row's prompt, or of each answer, as a distribution.

    mean: tokens; largest: of any row, and what has to fit.
    """

    mean: float
    largest: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 1 <= self.mean <= self.largest):
            raise ValueError(f"lengths: the mean must lie between 1 and the largest, {self.largest}, not {self.mean:g}")

    @classmethod
    def all(cls, tokens: int) -> Lengths:
        """Every one of that length."""
        return cls(float(tokens), tokens)

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Lengths:
        """Those of a list; ValueError where it is empty."""
        if not tokens:
            raise ValueError("lengths: the list is empty")
        return cls(sum(tokens) / len(tokens), max(tokens))


@dataclass(frozen=True, slots=True)
class Workload:
    """rows: requests, one sequence each. step_seconds: what a step may take at most, for tokens that someone waits for;
    None: as long as is best for throughput.
    """

    rows: int
    prompt: Lengths
    new: Lengths
    step_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows: at least 1, not {self.rows}")
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise ValueError(f"step_seconds: must be above 0, not {self.step_seconds:g}")

    @classmethod
    def uniform(cls, rows: int, prompt: int, new: int) -> Workload:
        """Rows that are all alike."""
        return cls(rows, Lengths.all(prompt), Lengths.all(new))

    @property
    def context(self) -> int:
        """Tokens of the longest row, prompt and answer."""
        return self.prompt.largest + self.new.largest

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        return cls(**data | {"prompt": Lengths(**data["prompt"]), "new": Lengths(**data["new"])})

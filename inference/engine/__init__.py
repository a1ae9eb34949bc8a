"""The engine: requests in from any thread, tokens and completions out, all of them in one running batch.

`engine` is what others call; `admission` says what cannot run; `intake` hands over between their threads and the one
that steps (`stepping`); `running` computes the steps; `accounts` counts and times them; `stats` is what it tells of
itself.
"""

from inference.engine.engine import DEFAULT_MAX_BATCH, DEFAULT_TOKEN_BUDGET, Engine
from inference.engine.stats import EngineStats

__all__ = ["DEFAULT_MAX_BATCH", "DEFAULT_TOKEN_BUDGET", "Engine", "EngineStats"]

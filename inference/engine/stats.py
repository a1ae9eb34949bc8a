"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done since it was loaded, and what it is at.

    busy_seconds: wall time within steps. mean_batch_size: sequences a step.
    prefill_tokens: of prompts, computed. prefix_hit_tokens: of prompts, found in the cache instead. recomputed_tokens:
    computed again after a preemption. preemptions, pauses: how often sequences had to give up pages, or their place.
    steps_within_steps: for urgent requests that came during a step.
    running, paused, waiting: sequences now.
    cache_pages_used: held by sequences now; _peak: at most so far; _idle: kept for prompts that begin alike.
    streamed_bytes: of weights, read from disk; streaming_seconds: in which at least one read was under way;
    stream_waited_seconds: in which computing waited for weights.
    cache_bytes_read, cache_bytes_written: of keys and values that lie on disk; cache_waited_seconds: in which computing
    waited for them.
    threads: at most; threads_now: fewer where other processes hold the processor.
    """

    steps: int
    busy_seconds: float
    prefill_tokens: int
    output_tokens: int
    mean_batch_size: float
    prefix_hit_tokens: int
    recomputed_tokens: int
    preemptions: int
    pauses: int
    steps_within_steps: int
    finished: int
    cancelled: int
    errors: int
    running: int
    paused: int
    waiting: int
    cache_pages_used: int
    cache_pages_peak: int
    cache_pages_idle: int
    cache_pages_total: int
    streamed_bytes: int
    streaming_seconds: float
    stream_waited_seconds: float
    cache_bytes_read: int
    cache_bytes_written: int
    cache_waited_seconds: float
    compute: str
    kernels: str
    threads: int
    threads_now: int

"""What steps did and how long they took: for the statistics, for the report, and for each request's bill."""

from __future__ import annotations

import time
from collections import Counter

from inference.cache.pages import PAGE_TOKENS
from inference.kernels.base import CacheTraffic
from inference.loading import LoadedModel
from inference.memory.ring import StreamStats
from inference.planner.meter import StepMeter
from inference.planner.work import WorkFormula
from inference.request import FinishReason
from inference.scheduler import Slice


class Accounts:
    """Counters since the engine was loaded.

    sequence_steps: sequences of each step, summed. ended: requests, by how they ended. steps_ahead: within other steps.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.steps = self.steps_ahead = self.sequence_steps = 0
        self.prefill_tokens = self.output_tokens = 0
        self.busy_seconds = 0.0
        self.ended: Counter[FinishReason] = Counter()
        self.meter = StepMeter()
        self._decoder = model.decoder
        self._cache = model.cache
        self.streamed = StreamStats()  # up to the last step
        self.cache_traffic = CacheTraffic()  # up to the last step
        self.work = WorkFormula.of(
            model.manifest.config,
            layer_bytes=model.decoder.layer_nbytes,
            head_bytes=model.decoder.head_nbytes,
            token_cache_bytes=model.cache.page_bytes / PAGE_TOKENS,
        )

    def record(self, slices: list[Slice], started: float, seconds: float, *, with_logits: bool = True) -> float:
        """A step that began at `started` (of perf_counter) and took so long itself, others within it not counted.

        with_logits: False where the head was left out. Returns the seconds in which it waited for a disk.
        """
        lengths = [(piece.count, piece.start + piece.count) for piece in slices]
        shape = self.work.shape(lengths, sum(piece.yields_token for piece in slices) if with_logits else 0)
        prefill_rows = decode_context = 0
        for piece in slices:
            piece.sequence.compute_seconds += seconds * piece.count / shape.rows
            of_prompt = min(piece.count, max(0, piece.sequence.prompt_tokens - piece.start))
            prefill_rows += of_prompt
            if not of_prompt:
                decode_context += piece.start + piece.count
        ended = time.perf_counter()
        before, self.streamed = self.streamed, self._decoder.stream_stats() or self.streamed
        since = self.streamed.since(before)
        cache_waited = -self.cache_traffic.waited_seconds
        self.cache_traffic = self._cache.traffic
        cache_waited += self.cache_traffic.waited_seconds
        self.meter.record(
            started,
            ended,
            seconds,
            shape,
            sequences=len(slices),
            prefill_rows=prefill_rows,
            decode_context=decode_context,
            streamed=since,
        )
        self.prefill_tokens += prefill_rows
        self.steps += 1
        self.sequence_steps += len(slices)
        self.busy_seconds += seconds
        return since.waited_seconds + cache_waited

    @property
    def mean_batch_size(self) -> float:
        """Sequences a step."""
        return self.sequence_steps / self.steps if self.steps else 0.0

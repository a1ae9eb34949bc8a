"""The running batch: step after step, from the scheduler's slices to tokens delivered."""

from __future__ import annotations

import logging
import threading
import time

import torch

from inference.engine.accounts import Accounts
from inference.engine.intake import Intake
from inference.engine.stats import EngineStats
from inference.errors import SegmentsFailed
from inference.group import RequestGroup
from inference.kernels.base import Between
from inference.loading import LoadedModel
from inference.model.batch import build_batch
from inference.parallelism import ThreadGovernor
from inference.request import FinishReason
from inference.sampling import Chosen, choose_tokens, chosen_of, takes_likeliest
from inference.scheduler import Scheduler, Slice
from inference.sequence import Sequence

logger = logging.getLogger(__name__)


class RunningBatch:
    """Whatever the model computes, by one thread at a time: the one that holds `stepping`."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler, intake: Intake, governor: ThreadGovernor) -> None:
        self.stepping = threading.Lock()
        self.accounts = Accounts(model)
        self.scheduler = scheduler
        self._model = model
        self._intake = intake
        self._governor = governor
        # Whole-number sums and row-wise kernels: only there does the number of threads change no bit.
        self._adapts = model.compute == "int8" and model.decoder.kernels.name == "native"
        self._nests = model.cache.nests and model.decoder.nests
        self._priority = 0  # of the least urgent sequence in the step at hand
        self._ahead_seconds = self._ahead_processor_seconds = 0.0  # spent on other steps within the step at hand

    def step(self) -> bool:
        """Compute one step in the calling thread; False where there was nothing to do."""
        with self.stepping:
            self._collect()
            torch.set_num_threads(self._governor.threads)
            slices = self.scheduler.schedule()
            if not slices:
                return False
            # The least urgent row decides: where a person already gets tokens in a batch's step, the next person must
            # not wait for the batch's rows either.
            self._priority = max(piece.sequence.request.priority for piece in slices)
            self._ahead_seconds = self._ahead_processor_seconds = 0.0
            started, processor_started = time.perf_counter(), time.thread_time()
            tokens = self._compute(slices, Between(self.step_ahead, self._intake.due) if self._nests else None)
            if tokens is None:
                return True
            seconds = time.perf_counter() - started - self._ahead_seconds
            processor_seconds = time.thread_time() - processor_started - self._ahead_processor_seconds
            waited = self.accounts.record(slices, started, seconds)
            if self._adapts:
                # Waiting for the disk is nobody else's doing.
                self._governor.observe(max(seconds - waited, 0.0), processor_seconds)
            self._deliver(slices, tokens)
            return True

    def step_ahead(self) -> None:
        """Between two layers of a step: compute the prompts of more urgent requests that have come meanwhile.

        The step at hand waits, so a request's first token is as near as on an idle engine, and no work is lost.
        """
        if not self._intake.waiting:
            return
        started, processor_started = time.perf_counter(), time.thread_time()
        self._take_in()
        while slices := self.scheduler.schedule_ahead(self._priority):
            part_started = time.perf_counter()
            self.accounts.steps_ahead += 1
            tokens = self._compute(slices)
            if tokens is not None:
                self.accounts.record(slices, part_started, time.perf_counter() - part_started)
                self._deliver(slices, tokens)
        self._ahead_seconds += time.perf_counter() - started
        self._ahead_processor_seconds += time.thread_time() - processor_started

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request, those too that nobody has taken in yet."""
        with self.stepping:
            self._collect()
            scheduler = self.scheduler
            for sequence in [*scheduler.running, *scheduler.paused, *scheduler.waiting]:
                self._finish(sequence, reason, error, spoiled=error is not None)

    def stats(self) -> EngineStats:
        accounts, scheduler, pages = self.accounts, self.scheduler, self._model.pages
        with self._intake.changed:
            return EngineStats(
                steps=accounts.steps,
                busy_seconds=accounts.busy_seconds,
                prefill_tokens=accounts.prefill_tokens,
                output_tokens=accounts.output_tokens,
                mean_batch_size=accounts.mean_batch_size,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
                recomputed_tokens=scheduler.recomputed_tokens,
                preemptions=scheduler.preemptions,
                pauses=scheduler.pauses,
                steps_within_steps=accounts.steps_ahead,
                finished=accounts.ended.total(),
                cancelled=accounts.ended["cancelled"],
                errors=accounts.ended["error"],
                running=len(scheduler.running),
                paused=len(scheduler.paused),
                waiting=self._intake.waiting + scheduler.waiting_count,
                cache_pages_used=pages.used,
                cache_pages_peak=pages.most_held,
                cache_pages_idle=pages.idle,
                cache_pages_total=pages.total,
                streamed_bytes=self.accounts.streamed.bytes,
                streaming_seconds=self.accounts.streamed.reading_seconds,
                stream_waited_seconds=self.accounts.streamed.waited_seconds,
                cache_bytes_read=accounts.cache_traffic.bytes_read,
                cache_bytes_written=accounts.cache_traffic.bytes_written,
                cache_waited_seconds=accounts.cache_traffic.waited_seconds,
                compute=self._model.compute,
                kernels=self._model.decoder.kernels.name,
                threads=self._governor.limit,
                threads_now=self._governor.threads,
            )

    def _collect(self) -> None:
        """Take in what was submitted and cancelled since the last step."""
        self._take_in()
        for sequence in self._intake.take_cancelled():
            if sequence.ended is None:
                self._finish(sequence, "cancelled")

    def _take_in(self) -> None:
        arrivals = self._intake.take()
        for group, reason in arrivals.rejected:
            for sequence in group.sequences:
                sequence.end("error", reason)
            self._report(group)
        for group in arrivals.accepted:
            for sequence in group.sequences:
                self.scheduler.add(sequence)

    def _compute(self, slices: list[Slice], between: Between | None = None) -> list[Chosen] | None:
        """The next token of each slice that yields one.

        No list if the step failed; the sequences that it failed for have then ended.
        """
        try:
            with torch.inference_mode():
                batch, decoder, cache = build_batch(slices), self._model.decoder, self._model.cache
                ready = [piece.sequence for piece in slices if piece.yields_token]
                if ready and decoder.picks and all(map(takes_likeliest, ready)):
                    return chosen_of(decoder.likeliest(batch, cache, between))
                logits = decoder.forward(batch, cache, between)
                return choose_tokens(logits.values, logits.scales, ready) if ready else []
        except SegmentsFailed as error:
            # The others' pages are whole: they are computed again in the next step.
            logger.error("%d of %d sequences end: %s", len(error.segments), len(slices), error)
            for segment in error.segments:
                self._finish(slices[segment].sequence, "error", str(error), spoiled=True)
            return None
        except Exception as error:
            # Whatever it was, it belongs to these requests and not to those that come after them.
            logger.exception("a step of %d sequences failed", len(slices))
            for piece in slices:
                reason = f"the step failed: {type(error).__name__}: {error}"
                self._finish(piece.sequence, "error", reason, spoiled=True)
            return None

    def _deliver(self, slices: list[Slice], tokens: list[Chosen]) -> None:
        chosen = iter(tokens)
        for piece in slices:
            sequence, yields = piece.sequence, piece.yields_token
            choice = next(chosen) if yields else None
            if choice is not None and choice.token is None:
                self._finish(sequence, "error", choice.error, spoiled=choice.broken)
                continue
            self.scheduler.complete(piece)
            if choice is None or choice.token is None:
                continue
            before = sequence.output_tokens
            ended, error = self._accepted(sequence, choice)
            self.accounts.output_tokens += sequence.output_tokens - before
            if ended is not None:
                self._finish(sequence, ended, error)

    def _accepted(self, sequence: Sequence, choice: Chosen) -> tuple[FinishReason | None, str | None]:
        """Add the chosen token: how the sequence has ended by it, and what went wrong."""
        assert choice.token is not None
        try:
            return sequence.accept(choice.token, choice.logprob), None
        except Exception as error:
            # Text, stop strings and constraint are its own: nobody else pays for them.
            logger.exception("token %d of request %s", choice.token, sequence.request.request_id)
            sequence.detokenizer = None
            return "error", f"token {choice.token} could not be added: {type(error).__name__}: {error}"

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, *, spoiled: bool = False
    ) -> None:
        """spoiled: nobody may go on from what its pages hold."""
        if spoiled:
            self._model.pages.spoil(sequence.pages)
        self.scheduler.remove(sequence)
        sequence.end(reason, error)
        group = sequence.group
        if group.has_ended:
            self._intake.forget(group)
            self._report(group)
        elif reason == "error":
            # One sample's trouble is the whole request's.
            self._intake.cancel_sequences(group.running)

    def _report(self, group: RequestGroup) -> None:
        completion = group.completion()
        self.accounts.ended[completion.finish_reason] += 1
        group.on_finish(completion)

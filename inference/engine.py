"""The engine: requests in from any thread, tokens and completions out, all of them in one running batch."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from inference.cache.pages import pages_for
from inference.errors import StoreError
from inference.loading import ComputeChoice, LoadedModel, load_model, workspace_bytes
from inference.model.batch import build_batch
from inference.parallelism import ThreadGovernor
from inference.request import Completion, FinishReason, GenerationRequest, InvalidRequest, SamplingParams, TokenEvent
from inference.sampling import choose_tokens
from inference.scheduler import Scheduler, Slice
from inference.sequence import Sequence, new_sequence
from inference.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

DEFAULT_MAX_BATCH = 256
DEFAULT_TOKEN_BUDGET = 512


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done since it was loaded, and what it is at.

    busy_seconds: wall time within steps. mean_batch_size: sequences a step. running, waiting: sequences now.
    threads: at most; threads_now: fewer where other processes hold the processor.
    """

    steps: int
    busy_seconds: float
    prefill_tokens: int
    output_tokens: int
    mean_batch_size: float
    running: int
    waiting: int
    cache_pages_used: int
    cache_pages_total: int
    compute: str
    kernels: str
    threads: int
    threads_now: int


class Engine:
    """A loaded model and its running batch.

    Either `start` a background thread and `submit` from anywhere, or just `generate`, which works both ways.
    """

    def __init__(self, model: LoadedModel, *, threads: int, max_batch: int, token_budget: int) -> None:
        self.manifest = model.manifest
        self.compute = model.compute
        self.max_context = model.manifest.config.max_context
        self._model = model
        self._governor = ThreadGovernor(threads)
        # Whole-number sums and row-wise kernels: only there does the number of threads change no bit.
        self._adapts = model.compute == "int8" and model.decoder.kernels.name == "native"
        self._scheduler = Scheduler(model.pages, max_batch, token_budget)
        self._arrivals = itertools.count()
        self._inbox: deque[Sequence] = deque()
        self._active: dict[str, Sequence] = {}
        self._changed = threading.Condition()  # guards _inbox, _active, _stopping
        self._stepping = threading.Lock()  # held by whoever runs a step
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._steps = self._prefill_tokens = self._output_tokens = self._sequence_steps = 0
        self._busy_seconds = 0.0

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        threads: int | None = None,
        compute: ComputeChoice = "auto",
        max_batch: int = DEFAULT_MAX_BATCH,
        memory_bytes: int | None = None,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
    ) -> Engine:
        """Load a weight store, a GGUF file, or a Hugging Face folder (the latter two are imported into a cache first).

        threads: of the processor, all by default. max_batch: sequences at a time. memory_bytes: for weights, cache and
        activations together; 60 % of what is available by default. token_budget: rows a step.
        Raises ModelFormatError, StoreError, QuantizationError, MemoryBudgetError.
        """
        count = threads or torch.get_num_threads()
        torch.set_num_threads(count)
        model = load_model(
            path, compute=compute, max_batch=max_batch, token_budget=token_budget, memory_bytes=memory_bytes
        )
        return cls(model, threads=count, max_batch=max_batch, token_budget=token_budget)

    @property
    def cache_page_bytes(self) -> int:
        """Bytes of one page of the key-value cache, over all layers."""
        return sum(layer[0].nbytes for layer in self._model.cache.layers)

    @property
    def memory_bytes_at_most(self) -> int:
        """What weights, a full cache and the largest step come to; less is in use until the cache has been filled."""
        scheduler, decoder = self._scheduler, self._model.decoder
        workspace = workspace_bytes(self.manifest.config, scheduler.max_batch, scheduler.token_budget)
        return decoder.nbytes + workspace + self.cache_page_bytes * self._model.pages.total

    @property
    def tokenizer(self) -> Tokenizer:
        """StoreError where the store has none."""
        if self._model.tokenizer is None:
            raise StoreError(self.manifest.source_name, "has no tokenizer; use token ids")
        return self._model.tokenizer

    def start(self) -> None:
        """Step in a background thread whenever there is work."""
        with self._changed:
            if self._thread is not None:
                return
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="inference-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop after the step at hand. Every request that has not ended ends as cancelled."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._stepping:
            self._collect()
            for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
                self._finish(sequence, "cancelled")

    def submit(
        self,
        request: GenerationRequest,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_finish: Callable[[Completion], None],
    ) -> None:
        """Queue a request; returns at once, from any thread.

        The callbacks run on the thread that steps and should return soon; what they raise is logged and goes no
        further. A request that cannot run (empty, too long, id in use) ends with finish_reason "error".
        """
        sequence = new_sequence(
            request,
            next(self._arrivals),
            min(request.sampling.max_tokens, max(1, self.max_context - len(request.prompt_token_ids))),
            self._model.tokenizer,
            _contained(on_token) if on_token is not None else None,
            _contained(on_finish),
        )
        with self._changed:
            self._inbox.append(sequence)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request before its next step, with what it has so far. Unknown and finished ids are ignored."""
        with self._changed:
            for sequence in (*self._inbox, *self._active.values()):
                if sequence.request.request_id == request_id:
                    sequence.cancelled = True
            self._changed.notify_all()

    def generate(
        self, prompts: Several[str | Several[int]], sampling: SamplingParams | Several[SamplingParams]
    ) -> list[Completion]:
        """Complete all prompts (texts or token ids) and return the completions in the same order.

        `sampling`: one for all, or one each. Raises InvalidRequest where their number differs.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise InvalidRequest("sampling", f"{len(each)} given for {len(prompts)} prompts; give one, or one each")
        results: list[Completion | None] = [None] * len(prompts)
        left = threading.Semaphore(0)
        call = uuid.uuid4().hex

        def receiver(index: int) -> Callable[[Completion], None]:
            def receive(completion: Completion) -> None:
                results[index] = completion
                left.release()

            return receive

        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self.submit(GenerationRequest(f"{call}-{index}", tuple(ids), one), on_finish=receiver(index))
        for _ in prompts:
            while not left.acquire(timeout=0 if self._thread is None else 0.5):
                if self._thread is None:
                    self.step()
        return [completion for completion in results if completion is not None]

    def stats(self) -> EngineStats:
        with self._changed:
            waiting = len(self._inbox) + len(self._scheduler.waiting)
            return EngineStats(
                steps=self._steps,
                busy_seconds=self._busy_seconds,
                prefill_tokens=self._prefill_tokens,
                output_tokens=self._output_tokens,
                mean_batch_size=self._sequence_steps / self._steps if self._steps else 0.0,
                running=len(self._scheduler.running),
                waiting=waiting,
                cache_pages_used=self._model.pages.used,
                cache_pages_total=self._model.pages.total,
                compute=self.compute,
                kernels=self._model.decoder.kernels.name,
                threads=self._governor.limit,
                threads_now=self._governor.threads,
            )

    def step(self) -> bool:
        """Compute one step of the running batch in the calling thread; False where there was nothing to do."""
        with self._stepping:
            self._collect()
            torch.set_num_threads(self._governor.threads)
            started, processor_started = time.perf_counter(), time.thread_time()
            slices = self._scheduler.schedule()
            if not slices:
                return False
            try:
                tokens = self._compute(slices)
            except Exception as error:
                # Whatever it was, it belongs to these requests and not to those that come after them.
                logger.exception("a step of %d sequences failed", len(slices))
                for piece in slices:
                    self._finish(piece.sequence, "error", f"the step failed: {type(error).__name__}: {error}")
                return True
            seconds = time.perf_counter() - started
            if self._adapts:
                self._governor.observe(seconds, time.thread_time() - processor_started)
            self._account(slices, seconds)
            self._deliver(slices, tokens)
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._inbox or self._scheduler.has_work):
                    self._changed.wait()
                if self._stopping:
                    return
            self.step()

    def _collect(self) -> None:
        """Take in what was submitted and cancelled since the last step."""
        with self._changed:
            arrived = list(self._inbox)
            self._inbox.clear()
            accepted: list[Sequence] = []
            rejected: list[tuple[Sequence, str]] = []
            for sequence in arrived:
                reason = self._reason_to_reject(sequence)
                if reason is None:
                    self._active[sequence.request.request_id] = sequence
                    accepted.append(sequence)
                else:
                    rejected.append((sequence, reason))
            cancelled = [sequence for sequence in self._active.values() if sequence.cancelled]
        for sequence, reason in rejected:
            sequence.on_finish(sequence.completion("error", reason))
        for sequence in accepted:
            self._scheduler.add(sequence)
        for sequence in cancelled:
            self._finish(sequence, "cancelled")

    def _reason_to_reject(self, sequence: Sequence) -> str | None:
        config = self.manifest.config
        request, count = sequence.request, sequence.prompt_tokens
        if request.request_id in self._active:
            return f"request_id: {request.request_id!r} is in use by a request that has not ended"
        if count == 0:
            return "prompt: is empty; at least one token is needed"
        if count >= self.max_context:
            return f"prompt: has {count} tokens; this model takes at most {self.max_context - 1} and one to answer with"
        wrong = next((token for token in request.prompt_token_ids if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            return f"prompt: token id {wrong} is not in the vocabulary of {config.vocab_size}"
        need, total = pages_for(count + sequence.max_tokens), self._model.pages.total
        if need > total:
            return (
                f"prompt: {count} tokens and {sequence.max_tokens} to generate need {need} cache pages; the engine's "
                f"memory holds {total}; ask for fewer tokens or give the engine more memory"
            )
        return None

    def _compute(self, slices: list[Slice]) -> list[int | None]:
        with torch.inference_mode():
            batch = build_batch(slices)
            logits = self._model.decoder.forward(batch, self._model.cache)
            ready = [piece.sequence for piece in slices if piece.yields_token]
            return choose_tokens(logits.values, logits.scales, ready) if ready else []

    def _account(self, slices: list[Slice], seconds: float) -> None:
        rows = sum(piece.count for piece in slices)
        for piece in slices:
            piece.sequence.compute_seconds += seconds * piece.count / rows
            prompt_left = max(0, piece.sequence.prompt_tokens - piece.start)
            self._prefill_tokens += min(piece.count, prompt_left)
        self._steps += 1
        self._sequence_steps += len(slices)
        self._busy_seconds += seconds

    def _deliver(self, slices: list[Slice], tokens: list[int | None]) -> None:
        chosen = iter(tokens)
        for piece in slices:
            sequence, yields = piece.sequence, piece.yields_token
            sequence.computed = piece.start + piece.count
            if not yields:
                continue
            token = next(chosen)
            if token is None:
                self._finish(sequence, "error", "the model produced NaN for this request; its weights may be damaged")
                continue
            self._output_tokens += 1
            ended = sequence.accept(token)
            if ended is not None:
                self._finish(sequence, ended)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if reason == "error":
            # Its pages may hold NaN, which would pass even through masked attention to their next holder.
            self._model.cache.clear(sequence.pages)
        self._scheduler.remove(sequence)
        with self._changed:
            self._active.pop(sequence.request.request_id, None)
        sequence.on_finish(sequence.completion(reason, error))


def _contained(callback: Callable[[Value], None]) -> Callable[[Value], None]:
    def call(value: Value) -> None:
        try:
            callback(value)
        except Exception:
            logger.exception("a request's callback failed")

    return call

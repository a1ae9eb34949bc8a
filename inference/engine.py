"""The engine: requests in from any thread, tokens and completions out, all of them in one running batch."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from inference.cache.pages import PAGE_TOKENS, pages_for
from inference.constrain import ConstraintCompiler
from inference.embedding import Embedder, Pooling
from inference.errors import StoreError
from inference.group import RequestGroup, new_group
from inference.loading import CacheChoice, ComputeChoice, LoadedModel, load_model, workspace_bytes
from inference.model.batch import build_batch
from inference.parallelism import ThreadGovernor
from inference.planner.meter import RunReport, StepMeter
from inference.planner.peaks import HostPeaks, host_peaks
from inference.planner.work import WorkFormula, model_matrices
from inference.request import Completion, FinishReason, GenerationRequest, InvalidRequest, SamplingParams, TokenEvent
from inference.sampling import Chosen, choose_tokens, chosen_of, takes_likeliest
from inference.scheduler import CHUNK_TOKENS, Scheduler, Slice
from inference.sequence import Sequence
from inference.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

DEFAULT_MAX_BATCH = 256
DEFAULT_TOKEN_BUDGET = 512


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done since it was loaded, and what it is at.

    busy_seconds: wall time within steps. mean_batch_size: sequences a step.
    prefill_tokens: of prompts, computed. prefix_hit_tokens: of prompts, found in the cache instead. recomputed_tokens:
    computed again after a preemption. preemptions, pauses: how often sequences had to give up pages, or their place.
    steps_within_steps: for urgent requests that came during a step.
    running, paused, waiting: sequences now.
    cache_pages_used: held by sequences now; _peak: at most so far; _idle: kept for prompts that begin alike.
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
    compute: str
    kernels: str
    threads: int
    threads_now: int


class Engine:
    """A loaded model and its running batch.

    Either `start` a background thread and `submit` from anywhere, or just `generate`, which works both ways.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        threads: int,
        max_batch: int,
        token_budget: int,
        chunk_tokens: int = CHUNK_TOKENS,
        share_prefixes: bool = True,
    ) -> None:
        self.manifest = model.manifest
        self.compute = model.compute
        self.max_context = model.manifest.config.max_context
        self._model = model
        self._governor = ThreadGovernor(threads)
        # Whole-number sums and row-wise kernels: only there does the number of threads change no bit.
        self._adapts = model.compute == "int8" and model.decoder.kernels.name == "native"
        self._scheduler = Scheduler(
            model.pages, max_batch, token_budget, chunk_tokens=chunk_tokens, share_prefixes=share_prefixes
        )
        self._arrivals = itertools.count()
        self._inbox: deque[RequestGroup] = deque()
        self._active: dict[str, RequestGroup] = {}
        self._cancelled: list[Sequence] = []
        tokenizer = model.tokenizer
        self._constraints = ConstraintCompiler(tokenizer, model.manifest.config.vocab_size) if tokenizer else None
        self._changed = threading.Condition()  # guards _inbox, _active, _cancelled, _stopping
        self._stepping = threading.Lock()  # held by whoever runs a step
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._steps = self._prefill_tokens = self._output_tokens = self._sequence_steps = 0
        self._busy_seconds = 0.0
        self._ended: Counter[FinishReason] = Counter()
        self._steps_ahead = 0
        self._step_priority = 0  # of the least urgent sequence in the step at hand
        self._ahead_seconds = self._ahead_processor_seconds = 0.0  # spent on other steps within the step at hand
        self._meter = StepMeter()
        self._work = WorkFormula.of(
            model.manifest.config,
            layer_bytes=model.decoder.layer_nbytes,
            head_bytes=model.decoder.head_nbytes,
            token_cache_bytes=self.cache_page_bytes / PAGE_TOKENS,
        )
        self._peaks: HostPeaks | None = None

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        threads: int | None = None,
        compute: ComputeChoice = "auto",
        cache: CacheChoice = "auto",
        max_batch: int = DEFAULT_MAX_BATCH,
        memory_bytes: int | None = None,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        share_prefixes: bool = True,
    ) -> Engine:
        """Load a weight store, a GGUF file, or a Hugging Face folder (the latter two are imported into a cache first).

        threads: of the processor, all by default. max_batch: sequences at a time. memory_bytes: for weights, cache and
        activations together; 60 % of what is available by default. token_budget: rows a step. share_prefixes: compute
        what prompts have in common at their beginnings only once; results are the same either way.
        Raises ModelFormatError, StoreError, QuantizationError, MemoryBudgetError.
        """
        count = threads or torch.get_num_threads()
        torch.set_num_threads(count)
        model = load_model(
            path,
            compute=compute,
            cache=cache,
            max_batch=max_batch,
            token_budget=token_budget,
            memory_bytes=memory_bytes,
        )
        return cls(model, threads=count, max_batch=max_batch, token_budget=token_budget, share_prefixes=share_prefixes)

    @property
    def cache_page_bytes(self) -> int:
        """Bytes of one page of the key-value cache, over all layers."""
        return self._model.cache.page_bytes

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
            scheduler = self._scheduler
            for sequence in [*scheduler.running, *scheduler.paused, *scheduler.waiting]:
                self._finish(sequence, "cancelled")

    def forget_prefixes(self) -> None:
        """Free the pages kept for prompts that begin alike; those that sequences hold stay."""
        with self._stepping:
            self._model.pages.forget_idle()

    def submit(
        self,
        request: GenerationRequest,
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_finish: Callable[[Completion], None],
    ) -> None:
        """Queue a request; returns at once, from any thread.

        The callbacks run on the thread that steps and should return soon; what they raise is logged and goes no
        further. A request that cannot run (empty, too long, id in use, a constraint that makes no sense) ends with
        finish_reason "error". A constraint is compiled here, in the calling thread, which may take a second.
        """
        sampling = request.sampling
        constraint, refused = None, None
        if sampling.constraint is not None:
            try:
                if self._constraints is None:
                    raise InvalidRequest("constraint", "this model has no tokenizer, so no output can be constrained")
                constraint = self._constraints.compile(sampling.constraint)
            except InvalidRequest as error:
                refused = str(error)
        group = new_group(
            request,
            self._arrivals,
            min(sampling.max_tokens, max(1, self.max_context - len(request.prompt_token_ids))),
            self._model.tokenizer,
            constraint,
            _contained(on_token) if on_token is not None else None,
            _contained(on_finish),
        )
        group.refused = refused
        for sequence in group.sequences:
            longest = sequence.prompt_tokens + sequence.max_tokens
            sequence.rotation_offset = self.manifest.config.rotation_offset(longest)
        with self._changed:
            self._inbox.append(group)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request before its next step, with what it has so far. Unknown and finished ids are ignored."""
        with self._changed:
            active = self._active.get(request_id)
            if active is not None:
                self._cancelled += active.running
            for group in self._inbox:
                if group.request.request_id == request_id:
                    group.cancelled = True
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

    def embed(
        self, prompts: Several[str | Several[int]], *, pooling: Pooling = "mean", normalize: bool = True
    ) -> list[list[float]]:
        """A vector of hidden_size numbers for each prompt (text or token ids): its last hidden states, pooled.

        pooling: the mean over all tokens, or the last token's state. normalize: to length 1. From any thread; running
        requests go on between the steps. Raises InvalidRequest naming the prompt that is empty or too long, and
        EmbeddingFailed where the model's weights are damaged.
        """
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        torch.set_num_threads(self._governor.threads)
        embedder = Embedder(self._model, self._scheduler.token_budget, self._stepping, self.step)
        return embedder.embed(ids, pooling, normalize)

    def stats(self) -> EngineStats:
        with self._changed:
            scheduler, pages = self._scheduler, self._model.pages
            return EngineStats(
                steps=self._steps,
                busy_seconds=self._busy_seconds,
                prefill_tokens=self._prefill_tokens,
                output_tokens=self._output_tokens,
                mean_batch_size=self._sequence_steps / self._steps if self._steps else 0.0,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
                recomputed_tokens=scheduler.recomputed_tokens,
                preemptions=scheduler.preemptions,
                pauses=scheduler.pauses,
                steps_within_steps=self._steps_ahead,
                finished=self._ended.total(),
                cancelled=self._ended["cancelled"],
                errors=self._ended["error"],
                running=len(scheduler.running),
                paused=len(scheduler.paused),
                waiting=len(self._inbox) + scheduler.waiting_count,
                cache_pages_used=pages.used,
                cache_pages_peak=pages.most_held,
                cache_pages_idle=pages.idle,
                cache_pages_total=pages.total,
                compute=self.compute,
                kernels=self._model.decoder.kernels.name,
                threads=self._governor.limit,
                threads_now=self._governor.threads,
            )

    def peaks(self, *, measure: bool = True, again: bool = False) -> HostPeaks | None:
        """What this host reaches at most in the engine's arithmetic: kept from before, else measured in some seconds.

        measure=False: None instead of measuring. again: measure anew. Steps wait meanwhile.
        """
        if self._peaks is None or again:
            model, threads = self._model, self._governor.limit
            config, kernels, cache = model.decoder.config, model.decoder.kernels, model.cache.kind
            with self._stepping:
                self._peaks = host_peaks(
                    config, model.compute, kernels, cache, threads=threads, measure=measure, again=again
                )
        return self._peaks

    def report(self, *, since: int = 0) -> RunReport:
        """The steps from number `since` (an earlier `stats().steps`) on, against the host's limit.

        Measures nothing: what needs the host's peaks is None until `peaks` has been called once on this host.
        """
        config = self._model.decoder.config
        return self._meter.report(self._work, self.peaks(measure=False), model_matrices(config), since=since)

    def operations(self, prompt_tokens: int, output_tokens: int) -> int:
        """Arithmetic operations of one request that is computed from its first token to its last."""
        rows = prompt_tokens + output_tokens - 1
        return self._work.operations(self._work.shape([(rows, rows)], output_tokens))

    def step(self) -> bool:
        """Compute one step of the running batch in the calling thread; False where there was nothing to do."""
        with self._stepping:
            self._collect()
            torch.set_num_threads(self._governor.threads)
            slices = self._scheduler.schedule()
            if not slices:
                return False
            # The least urgent row decides: where a person already gets tokens in a batch's step, the next person must
            # not wait for the batch's rows either.
            self._step_priority = max(piece.sequence.request.priority for piece in slices)
            self._ahead_seconds = self._ahead_processor_seconds = 0.0
            started, processor_started = time.perf_counter(), time.thread_time()
            tokens = self._compute(slices, self._step_ahead)
            if tokens is None:
                return True
            seconds = time.perf_counter() - started - self._ahead_seconds
            processor_seconds = time.thread_time() - processor_started - self._ahead_processor_seconds
            if self._adapts:
                self._governor.observe(seconds, processor_seconds)
            self._account(slices, started, seconds)
            self._deliver(slices, tokens)
            return True

    def _step_ahead(self) -> None:
        """Between two layers of a step: compute the prompts of more urgent requests that have come meanwhile.

        The step at hand waits, so a request's first token is as near as on an idle engine, and no work is lost.
        """
        if not self._inbox:
            return
        started, processor_started = time.perf_counter(), time.thread_time()
        self._take_in()
        while slices := self._scheduler.schedule_ahead(self._step_priority):
            part_started = time.perf_counter()
            self._steps_ahead += 1
            tokens = self._compute(slices)
            if tokens is not None:
                self._account(slices, part_started, time.perf_counter() - part_started)
                self._deliver(slices, tokens)
        self._ahead_seconds += time.perf_counter() - started
        self._ahead_processor_seconds += time.thread_time() - processor_started

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
        self._take_in()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
        for sequence in cancelled:
            if sequence.ended is None:
                self._finish(sequence, "cancelled")

    def _take_in(self) -> None:
        with self._changed:
            arrived = list(self._inbox)
            self._inbox.clear()
            accepted: list[RequestGroup] = []
            rejected: list[tuple[RequestGroup, str]] = []
            for group in arrived:
                reason = self._reason_to_reject(group)
                if reason is None:
                    self._active[group.request.request_id] = group
                    accepted.append(group)
                    if group.cancelled:
                        self._cancelled += group.running
                else:
                    rejected.append((group, reason))
        for group, reason in rejected:
            for sequence in group.sequences:
                sequence.end("error", reason)
            self._report(group)
        for group in accepted:
            for sequence in group.sequences:
                self._scheduler.add(sequence)

    def _reason_to_reject(self, group: RequestGroup) -> str | None:
        config = self.manifest.config
        request, count = group.request, len(group.request.prompt_token_ids)
        if group.refused is not None:
            return group.refused
        if request.request_id in self._active:
            return f"request_id: {request.request_id!r} is in use by a request that has not ended"
        if not config.has_head:
            return "model: has no head; it gives embeddings and generates no tokens"
        if count == 0:
            return "prompt: is empty; at least one token is needed"
        if count >= self.max_context:
            return f"prompt: has {count} tokens; this model takes at most {self.max_context - 1} and one to answer with"
        wrong = next((token for token in request.prompt_token_ids if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            return f"prompt: token id {wrong} is not in the vocabulary of {config.vocab_size}"
        for field, tokens in (
            ("logit_bias", [token for token, _ in request.sampling.logit_bias]),
            ("stop_token_ids", request.sampling.stop_token_ids),
        ):
            wrong = next((token for token in tokens if token >= config.vocab_size), None)
            if wrong is not None:
                return f"{field}: token id {wrong} is not in the vocabulary of {config.vocab_size}"
        most = group.sequences[0].max_tokens
        need, total = pages_for(count + most), self._model.pages.total
        if need > total:
            return (
                f"prompt: {count} tokens and {most} to generate need {need} cache pages; the engine's "
                f"memory holds {total}; ask for fewer tokens or give the engine more memory"
            )
        return None

    def _compute(self, slices: list[Slice], between_layers: Callable[[], None] | None = None) -> list[Chosen] | None:
        """The next token of each slice that yields one.

        No list if the step failed; its sequences have then ended.
        """
        try:
            with torch.inference_mode():
                batch, decoder, cache = build_batch(slices), self._model.decoder, self._model.cache
                ready = [piece.sequence for piece in slices if piece.yields_token]
                if ready and decoder.picks and all(map(takes_likeliest, ready)):
                    return chosen_of(decoder.likeliest(batch, cache, between_layers))
                logits = decoder.forward(batch, cache, between_layers)
                return choose_tokens(logits.values, logits.scales, ready) if ready else []
        except Exception as error:
            # Whatever it was, it belongs to these requests and not to those that come after them.
            logger.exception("a step of %d sequences failed", len(slices))
            for piece in slices:
                self._finish(piece.sequence, "error", f"the step failed: {type(error).__name__}: {error}")
            return None

    def _account(self, slices: list[Slice], started: float, seconds: float) -> None:
        lengths = [(piece.count, piece.start + piece.count) for piece in slices]
        shape = self._work.shape(lengths, sum(piece.yields_token for piece in slices))
        prefill_rows = 0
        for piece in slices:
            piece.sequence.compute_seconds += seconds * piece.count / shape.rows
            prefill_rows += min(piece.count, max(0, piece.sequence.prompt_tokens - piece.start))
        ended = time.perf_counter()
        self._meter.record(started, ended, seconds, shape, sequences=len(slices), prefill_rows=prefill_rows)
        self._prefill_tokens += prefill_rows
        self._steps += 1
        self._sequence_steps += len(slices)
        self._busy_seconds += seconds

    def _deliver(self, slices: list[Slice], tokens: list[Chosen]) -> None:
        chosen = iter(tokens)
        for piece in slices:
            sequence, yields = piece.sequence, piece.yields_token
            choice = next(chosen) if yields else None
            if choice is not None and choice.token is None:
                self._finish(sequence, "error", choice.error)
                continue
            self._scheduler.complete(piece)
            if choice is None or choice.token is None:
                continue
            before = sequence.output_tokens
            ended = sequence.accept(choice.token, choice.logprob)
            self._output_tokens += sequence.output_tokens - before
            if ended is not None:
                self._finish(sequence, ended)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        if reason == "error":
            self._model.pages.spoil(sequence.pages)
        self._scheduler.remove(sequence)
        sequence.end(reason, error)
        group = sequence.group
        if group.has_ended:
            with self._changed:
                self._active.pop(group.request.request_id, None)
            self._report(group)
        elif reason == "error":
            # One sample's trouble is the whole request's.
            with self._changed:
                self._cancelled += group.running

    def _report(self, group: RequestGroup) -> None:
        completion = group.completion()
        self._ended[completion.finish_reason] += 1
        group.on_finish(completion)


def _contained(callback: Callable[[Value], None]) -> Callable[[Value], None]:
    def call(value: Value) -> None:
        try:
            callback(value)
        except Exception:
            logger.exception("a request's callback failed")

    return call

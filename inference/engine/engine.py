"""The engine as others see it: load, submit, cancel, generate, and what it tells of itself."""

from __future__ import annotations

import operator
import threading
import uuid
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from pathlib import Path

import torch

from inference.embedding import Embedder, Embedding
from inference.engine.admission import Admission
from inference.engine.intake import Intake
from inference.engine.predicting import step_cost
from inference.engine.running import RunningBatch
from inference.engine.stats import EngineStats
from inference.engine.stepping import StepThread
from inference.errors import SettingError, StoreError
from inference.fitting import CacheChoice, workspace_bytes
from inference.loading import ComputeChoice, LoadedModel, load_model
from inference.parallelism import ThreadGovernor
from inference.planner.cost import StepCost
from inference.planner.meter import RunReport, StepWork
from inference.planner.peaks import HostPeaks, host_peaks
from inference.planner.plan import Plan
from inference.planner.work import model_matrices
from inference.request import Completion, GenerationRequest, InvalidRequest, SamplingParams, TokenEvent
from inference.scheduler import CHUNK_TOKENS, Scheduler
from inference.tokenizer import Tokenizer
from inference.weights.manifest import Pooling

DEFAULT_MAX_BATCH = 256
DEFAULT_TOKEN_BUDGET = 512


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
        scheduler = Scheduler(
            model.pages, max_batch, token_budget, chunk_tokens=chunk_tokens, share_prefixes=share_prefixes
        )
        self._intake = Intake()
        self._batch = RunningBatch(model, scheduler, self._intake, self._governor)
        self._admission = Admission(model)
        self._thread = StepThread(self._batch, self._intake)
        self._peaks: HostPeaks | None = None
        self._cost: StepCost | None = None

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
        plan: Plan | None = None,
        device: str = "auto",
        device_bytes: int | None = None,
    ) -> Engine:
        """Load a weight store, a GGUF file, or a Hugging Face folder (the latter two are imported into a cache first).

        threads: of the processor, all by default. max_batch: sequences at a time. memory_bytes: for weights, cache and
        activations together; 60 % of what is available by default. token_budget: rows a step. share_prefixes: compute
        what prompts have in common at their beginnings only once; results are the same either way. plan: where the
        model's parts lie; it decides about all but threads and share_prefixes. Without one, a model that memory_bytes
        does not hold is planned for (see `load_model`). device: "auto" takes CUDA where there is one, "cpu" the
        processor; "cuda" and "cuda:N" name one. device_bytes: of its memory, by default most of what is free.
        Raises SettingError, ModelFormatError, StoreError, QuantizationError, MemoryBudgetError.
        """
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise SettingError("threads", f"must be a whole number of at least 1, not {threads!r}")
        count = threads or torch.get_num_threads()
        torch.set_num_threads(count)
        model = load_model(
            path,
            compute=compute,
            cache=cache,
            max_batch=max_batch,
            token_budget=token_budget,
            memory_bytes=memory_bytes,
            plan=plan,
            device=device,
            device_bytes=device_bytes,
        )
        if model.plan is not None:
            max_batch, token_budget = model.plan.max_batch, model.plan.token_budget
        return cls(model, threads=count, max_batch=max_batch, token_budget=token_budget, share_prefixes=share_prefixes)

    @property
    def plan(self) -> Plan | None:
        """Where the model's parts lie; None where all of it was loaded without asking."""
        return self._model.plan

    @property
    def cache_page_bytes(self) -> int:
        """Bytes of one page of the key-value cache, over all layers."""
        return self._model.cache.page_bytes

    @property
    def memory_bytes_at_most(self) -> int:
        """What weights, a full cache and the largest step come to; less is in use until the cache has been filled.

        Of a plan, that it keeps to what it was made for: it knows the largest step better than the bound used here.
        """
        scheduler, decoder = self._batch.scheduler, self._model.decoder
        workspace = workspace_bytes(self.manifest.config, scheduler.max_batch, scheduler.token_budget)
        most = decoder.nbytes + workspace + self._model.cache.nbytes
        return most if self.plan is None else min(most, self.plan.memory_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """StoreError where the store has none."""
        if self._model.tokenizer is None:
            raise StoreError(self.manifest.source_name, "has no tokenizer; use token ids")
        return self._model.tokenizer

    def start(self) -> None:
        """Step in a background thread whenever there is work."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step at hand. Every request that has not ended ends as cancelled."""
        self._thread.stop()

    def forget_prefixes(self) -> None:
        """Free the pages kept for prompts that begin alike; those that sequences hold stay."""
        with self._batch.stepping:
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
        finish_reason "error". All of that is looked at here, in the calling thread; a constraint may take a second.
        """
        self._intake.submit(self._admission.group(request, on_token, on_finish))

    def cancel(self, request_id: str) -> None:
        """End a request before its next step, with what it has so far. Unknown and finished ids are ignored."""
        self._intake.cancel(request_id)

    def generate(
        self, prompts: Several[str | Several[int]], sampling: SamplingParams | Several[SamplingParams]
    ) -> list[Completion]:
        """Complete all prompts (texts or token ids) and return the completions in the same order.

        `sampling`: one for all, or one each. Raises InvalidRequest where their number differs, or where one of the
        prompts is of another kind; nothing has been computed then. What interrupts it cancels all of them.
        """
        ids = self._token_ids(prompts)
        if not isinstance(sampling, Iterable):
            sampling = [sampling] * len(ids)
        each = list(sampling)
        if len(each) != len(ids):
            raise InvalidRequest("sampling", f"{len(each)} given for {len(ids)} prompts; give one, or one each")
        call = uuid.uuid4().hex
        requests = [
            GenerationRequest(f"{call}-{index}", tokens, one)
            for index, (tokens, one) in enumerate(zip(ids, each, strict=True))
        ]
        results: list[Completion | None] = [None] * len(requests)
        left = threading.Semaphore(0)

        def receiver(index: int) -> Callable[[Completion], None]:
            def receive(completion: Completion) -> None:
                results[index] = completion
                left.release()

            return receive

        try:
            for index, request in enumerate(requests):
                self.submit(request, on_finish=receiver(index))
            for _ in requests:
                while not left.acquire(timeout=0.5 if self._thread.is_running else 0):
                    if not self._thread.is_running:
                        self.step()
        except BaseException:
            for request in requests:
                self.cancel(request.request_id)
            raise
        return [completion for completion in results if completion is not None]

    def embed(
        self, prompts: Several[str | Several[int]], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> list[list[float]]:
        """A vector of hidden_size numbers for each prompt (text or token ids): its last hidden states, pooled.

        pooling: the mean over all tokens, or the last token's state; by default what the model was made for, mean where
        its source did not say. normalize: to length 1. From any thread; running requests go on between the steps.
        Raises InvalidRequest naming the prompt that is empty or too long, and EmbeddingFailed where the model's weights
        are damaged.
        """
        return [embedding.vector.tolist() for embedding in self.embeddings(prompts, pooling, normalize)]

    def embeddings(
        self,
        prompts: Several[str | Several[int]],
        pooling: Pooling | None = None,
        normalize: bool = True,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Embedding]:
        """As `embed`, with each text's share of the engine's time.

        cancelled: asked between steps, in the calling thread; once it is true, raises EmbeddingCancelled.
        """
        ids = self._token_ids(prompts)
        torch.set_num_threads(self._governor.threads)
        batch = self._batch
        embedder = Embedder(self._model, batch.scheduler.token_budget, batch.stepping, self.step, batch.accounts)
        return embedder.embed(ids, pooling or self.manifest.pooling or "mean", normalize, cancelled)

    def _token_ids(self, prompts: Several[str | Several[int]]) -> list[tuple[int, ...]]:
        """Each prompt's tokens. Raises InvalidRequest, naming the prompt that is none."""
        if isinstance(prompts, str | bytes):
            raise InvalidRequest("prompts", "must be a list of prompts, not a single one")
        found: list[tuple[int, ...]] = []
        for index, prompt in enumerate(prompts):
            try:
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                found.append(tuple(map(operator.index, ids)))
            except InvalidRequest as error:
                raise InvalidRequest(f"prompts[{index}]", error.message) from None
            except TypeError:
                raise InvalidRequest(
                    f"prompts[{index}]", "must be a text, or whole numbers that are token ids"
                ) from None
        return found

    def stats(self) -> EngineStats:
        return self._batch.stats()

    def peaks(self, *, measure: bool = True, again: bool = False) -> HostPeaks | None:
        """What this host reaches at most in the engine's arithmetic: kept from before, else measured in some seconds.

        measure=False: None instead of measuring. again: measure anew. Steps wait meanwhile.
        """
        if self._model.decoder.kernels.device.type != "cpu":
            return None  # the host's peaks say nothing of a device's
        if self._peaks is None or again:
            model, threads = self._model, self._governor.limit
            config, kernels, cache = model.decoder.config, model.decoder.kernels, model.cache.kind
            with self._batch.stepping:
                self._peaks = host_peaks(
                    config, model.compute, kernels, cache, threads=threads, measure=measure, again=again
                )
        return self._peaks

    def learn_rates(self) -> bool:
        """From now on `report` predicts what its steps should have taken; False for a model that has no prediction.

        By how long this host takes for a layer: measured before for such a model, else now, in some seconds. Steps wait
        meanwhile. Raises StoreError, QuantizationError.
        """
        with self._batch.stepping:
            self._cost = step_cost(self._model, threads=self._governor.limit)
        return self._cost is not None

    def report(self, *, since: int = 0) -> RunReport:
        """The steps from number `since` (an earlier `stats().steps`) on, against the host's limit.

        Measures nothing: what needs the host's peaks is None until `peaks` has been called once on this host, and what
        the steps should have taken is None until `learn_rates` has been called.
        """
        accounts, config = self._batch.accounts, self._model.decoder.config
        peaks, matrices = self.peaks(measure=False), model_matrices(config)
        return accounts.meter.report(accounts.work, peaks, matrices, cost=self._cost, since=since)

    def step_work(self, *, since: int = 0) -> StepWork:
        """What each of those steps computed and read from disk."""
        return self._batch.accounts.meter.work(self._batch.accounts.work, since=since)

    def operations(self, prompt_tokens: int, output_tokens: int) -> int:
        """Arithmetic operations of one request that is computed from its first token to its last."""
        rows, work = prompt_tokens + output_tokens - 1, self._batch.accounts.work
        return work.operations(work.shape([(rows, rows)], output_tokens))

    def step(self) -> bool:
        """Compute one step of the running batch in the calling thread; False where there was nothing to do."""
        return self._batch.step()

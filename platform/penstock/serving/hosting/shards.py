"""Running a shard: its requests go to the engine, its results to the database, a small flush at a time."""

import itertools
import logging
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from django.db import InterfaceError, OperationalError, connection
from django.utils import timezone
from django.utils.translation import gettext as _

from inference.errors import InferenceError
from inference.request import Completion, GenerationRequest
from penstock.config import config
from penstock.registry.models import LatencyClass, ModelRelease
from penstock.serving import dispatch, leases
from penstock.serving.bodies import EMBEDDINGS
from penstock.serving.completion import LeaseLost, Result, contract_of, record_results, unfinished
from penstock.serving.hosting.embedding import Texts, embed
from penstock.serving.hosting.engines import EngineUnavailable
from penstock.serving.hosting.host import EngineHostProcess
from penstock.serving.hosting.runs import tie_shard
from penstock.serving.models import Batch, Request, Shard
from penstock.serving.prompts import PRIORITIES, bound_sampling_of, embedding_inputs, prompt_token_ids, tokenizer_of
from penstock.serving.rejection import Rejected
from penstock.serving.results import embedded_result, failed, never_ran, result_of

if TYPE_CHECKING:
    from inference.engine import Engine

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
CHECK_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
GIVE_UP_SECONDS = 5.0  # how long a stopping worker waits for a database that is away


class DatabaseAway(Exception):
    """The database did not come back while the worker was stopping; the results at hand are lost, not the requests."""


def run_shard(shard_id: int, *, host: EngineHostProcess) -> None:
    """Claims a shard and runs it to its end, then goes on with the next of its class that waits.

    Going on matters where messages were turned away because every slot was taken.
    """
    latency_class = Shard.objects.filter(pk=shard_id).values_list("batch__latency_class", flat=True).first()
    if latency_class is None:
        return
    with host.slot(latency_class) as free:
        if not free:
            return
        following: int | None = shard_id
        while following is not None and not host.stopping.is_set():
            claim = leases.claim(following, owner=host.owner)
            if claim is not None and not ShardRun(claim, host).run():
                return
            following = next_waiting(latency_class)


def next_waiting(latency_class: str) -> int | None:
    """The waiting shard of a class whose batch ends soonest; one that failed to load lately is left out."""
    return (
        Shard.objects.filter(
            status=Shard.Status.QUEUED,
            batch__latency_class=latency_class,
            batch__status=Batch.Status.IN_PROGRESS,
            batch__expires_at__gt=timezone.now(),
            attempts=0,
        )
        .order_by("batch__expires_at", "batch_id", "number")
        .values_list("pk", flat=True)
        .first()
    )


@dataclass(slots=True)
class ShardRun:
    """One claim of a shard. `run` blocks the calling thread, which does nothing but wait and write."""

    claim: leases.Claim
    host: EngineHostProcess
    done: "queue.SimpleQueue[Ended]" = field(default_factory=queue.SimpleQueue)
    running: dict[str, Request] = field(default_factory=dict)
    ending_as: Request.Status | None = None
    checked_at: float = 0.0

    def run(self) -> bool:
        """Whether the thread may go on with another shard."""
        shard = self.claim.shard
        release = shard.batch.model_release
        try:
            with self.host.engines.use(release) as engine, self._tied(release, engine):
                try:
                    if shard.batch.endpoint == EMBEDDINGS:
                        self._embed(engine)
                    else:
                        self._feed(engine)
                        self._collect(engine)
                finally:
                    self._cancel(engine)  # whatever ended this run, no request of it stays behind in the engine
        except EngineUnavailable as error:
            return self._set_back(error)
        except LeaseLost as error:
            logger.warning("dropped late results: %s", error)
        except DatabaseAway as error:
            logger.error("shard %s: %s", shard.pk, error)
            return False
        if self.host.stopping.is_set():
            leases.release(self.claim.lease)
            return False
        if not unfinished(shard.batch_id):
            dispatch.wake_finalize(shard.batch_id)
        return True

    @contextmanager
    def _tied(self, release: ModelRelease, engine: "Engine") -> Iterator[None]:
        """Remembers which engine computes the shard, and has what it does meanwhile counted for the batch."""
        shard, run_id = self.claim.shard, self.host.engines.run_id(release)
        if run_id is None:
            yield
            return
        tie_shard(shard_id=shard.pk, fence=self.claim.lease.fence, run_id=run_id)
        with self.host.batch_runs.holding(shard.batch_id, run_id, engine):
            yield

    def _embed(self, engine: "Engine") -> None:
        """Requests for embeddings, some at a time; those that are left when the batch ends, end with it."""
        tokenizer = tokenizer_of(self.claim.shard.batch.model_release)
        left = {request.pk: request for request in self.claim.requests}
        texts, refused = [], []
        for request in self.claim.requests:
            try:
                texts.append(Texts(request.pk, embedding_inputs(tokenizer, request.body)))
            except InferenceError as error:
                refused.append(failed(request, "invalid_request", str(error), http_status=400))
        for group in itertools.chain([refused], self._embedded(engine, texts)):
            if group:
                self._flush(group)
            for result in group:
                del left[result.request_id]
        if self.ending_as is not None and left:
            self._flush([never_ran(request, self.ending_as) for request in left.values()])

    def _embedded(self, engine: "Engine", texts: list[Texts]) -> Iterator[list[Result]]:
        for group in embed(engine, texts, stopped=self._is_over):
            yield [
                embedded_result(one, finished_at=timezone.now(), cancelled_as=self.ending_as)
                for one in group
                # What this host gives up because it stops is another's to compute.
                if not one.cancelled or self.ending_as is not None
            ]

    def _is_over(self) -> bool:
        if self.host.stopping.is_set():
            return True
        self._look_at_batch()
        return self.ending_as is not None

    def _feed(self, engine: "Engine") -> None:
        tokenizer = tokenizer_of(self.claim.shard.batch.model_release)
        refused = []
        for request in self.claim.requests:
            if self.host.stopping.is_set():
                return
            try:
                generation = GenerationRequest(
                    request_id=self._engine_id(request),
                    prompt_token_ids=prompt_token_ids(tokenizer, request.body),
                    sampling=bound_sampling_of(
                        request.body, request.pk, contract_of(request.task_id, request.task_version)
                    ),
                    priority=PRIORITIES[LatencyClass(request.latency_class)],
                )
            except (InferenceError, Rejected) as error:  # intake accepted it: the release's tokenizer must have changed
                refused.append(failed(request, "invalid_request", str(error), http_status=400))
                continue
            self.running[request.pk] = request
            engine.submit(generation, on_finish=_Receiver(request.pk, self.done))
        if refused:
            self._flush(refused)

    def _engine_id(self, request: Request) -> str:
        # With the fence: a lease lost and won again on this host must not meet its own earlier requests.
        return f"{request.pk}:{self.claim.lease.fence}"

    def _collect(self, engine: "Engine") -> None:
        """Takes results as they come and writes them, some rows or a second at a time, until none is left."""
        pending: list[Result] = []
        flush_at = time.monotonic() + FLUSH_SECONDS
        while self.running:
            if self.ending_as is None and not self.host.stopping.is_set():
                self._look_at_batch()
            if self.ending_as is not None or self.host.stopping.is_set():
                self._cancel(engine)
            try:
                ended = self.done.get(timeout=0.2)
            except queue.Empty:
                pass
            else:
                self.running.pop(ended.request_id, None)
                result = self._result(ended)
                if result is not None:
                    if not pending:
                        flush_at = time.monotonic() + FLUSH_SECONDS
                    pending.append(result)
            if pending and (len(pending) >= config().flush_rows or time.monotonic() >= flush_at):
                self._flush(pending)
                pending = []
        if pending:
            self._flush(pending)

    def _cancel(self, engine: "Engine") -> None:
        for request in self.running.values():
            engine.cancel(self._engine_id(request))

    def _look_at_batch(self) -> None:
        """Once a second: is the batch cancelled, or its window over?"""
        now = time.monotonic()
        if now - self.checked_at < CHECK_SECONDS:
            return
        self.checked_at = now
        try:
            status, expires_at = Batch.objects.values_list("status", "expires_at").get(pk=self.claim.shard.batch_id)
        except (OperationalError, InterfaceError):
            connection.close()
            return
        if status == Batch.Status.CANCELLING:
            self.ending_as = Request.Status.CANCELLED
        elif expires_at <= timezone.now():
            self.ending_as = Request.Status.EXPIRED

    def _result(self, ended: "Ended") -> Result | None:
        """The result to record; None for a request that this host gave up because it stops."""
        if ended.completion.finish_reason == "cancelled" and self.ending_as is None:
            return None
        return result_of(ended.request_id, ended.completion, finished_at=ended.finished_at, cancelled_as=self.ending_as)

    def _flush(self, results: list[Result]) -> None:
        """Records results; waits for a database that is away. Raises LeaseLost, DatabaseAway."""
        pause, stop_waiting_at = FIRST_PAUSE_SECONDS, None
        while True:
            try:
                record_results(results, lease=self.claim.lease)
                return
            except LeaseLost:
                raise
            except (OperationalError, InterfaceError) as error:
                # Whether or not the transaction was committed: the next try leaves out what is finished.
                connection.close()
                now = time.monotonic()
                if self.host.stopping.is_set():
                    stop_waiting_at = stop_waiting_at or now + GIVE_UP_SECONDS
                    if now >= stop_waiting_at:
                        raise DatabaseAway(str(error)) from error
                logger.warning("the database is away, %d results wait: %s", len(results), error)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            except Exception:
                if len(results) == 1:
                    logger.exception("the result of %s cannot be recorded", results[0].request_id)
                    self._record_failure(results[0])
                    return
                logger.exception("%d results cannot be recorded together; each is tried alone", len(results))
                for result in results:
                    self._flush([result])
                return

    def _record_failure(self, result: Result) -> None:
        message = _("The output was made, but could not be recorded; the worker's log tells why.")
        failure = Result(
            request_id=result.request_id,
            status=Request.Status.FAILED,
            finished_at=result.finished_at,
            http_status=500,
            error_code="result_unrecordable",
            error_message=message,
        )
        record_results([failure], lease=self.claim.lease)

    def _set_back(self, error: EngineUnavailable) -> bool:
        """Hands the shard back until the engine can be had; a release that keeps failing to load fails its requests."""
        logger.error("shard %s: %s", self.claim.shard.pk, error)
        if error.passing:
            leases.release(self.claim.lease, again_in_a_while=True)
        elif self.claim.shard.attempts < leases.MAX_ATTEMPTS:
            leases.release(self.claim.lease, again_in_a_while=True, attempt_counts=True)
        else:
            self._flush(
                [failed(request, "model_unavailable", str(error), http_status=503) for request in self.claim.requests]
            )
        return False


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion, and when the engine handed it over: writing it may have to wait."""

    request_id: str
    completion: Completion
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Called on the engine's thread: hands the completion over and returns."""

    request_id: str
    done: "queue.SimpleQueue[Ended]"

    def __call__(self, completion: Completion) -> None:
        self.done.put(Ended(self.request_id, completion, timezone.now()))

"""Single requests: admitted, streamed from an engine host, recorded as a batch's rows are.

A caller who hangs up cancels the request. The host's stream is read by a task of its own until the host has told how
the request ended, so that what was computed is recorded, whoever still listens.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import httpx
from asgiref.sync import sync_to_async
from django.db import InterfaceError, OperationalError, close_old_connections, connection
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _
from pydantic import TypeAdapter

from inference.errors import InferenceError
from inference.request import Completion, SamplingParams, TokenEvent
from penstock.accounts.access import require_role
from penstock.accounts.models import ApiKey, Role, Team, User
from penstock.registry.models import LatencyClass
from penstock.serving.admission import admit
from penstock.serving.bodies import CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS
from penstock.serving.completion import Result, contract_of, record_results
from penstock.serving.digests import prompt_digest
from penstock.serving.identifiers import new_chat_completion_id, new_completion_id, new_embedding_id, new_salt
from penstock.serving.models import EngineHost, Request
from penstock.serving.prompts import PRIORITIES, bound_sampling_of, embedding_inputs, prompt_token_ids, tokenizer_of
from penstock.serving.rejection import Rejected
from penstock.serving.results import (
    EMBEDDED,
    Embedded,
    embedded_result,
    failed,
    logprob_item,
    result_of,
    storable,
)
from penstock.settings import secret

__all__ = ["Finished", "LiveEvent", "TextDelta", "run", "submit"]

logger = logging.getLogger(__name__)

RUNNERS = (Role.OPERATOR, Role.TASK_OWNER, Role.PILOT_MANAGER)
HOST_FRESH = timedelta(seconds=20)
CONNECT_SECONDS = 5.0
CANCEL_SECONDS = 10.0
DATABASE_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
INTERNAL_TOKEN = "internal-token"  # noqa: S105 - the name of the file that holds it

SAMPLING = TypeAdapter(SamplingParams)
EVENTS = TypeAdapter(TokenEvent)
COMPLETION = TypeAdapter(Completion)

NEW_IDS = {
    CHAT_COMPLETIONS: new_chat_completion_id,
    COMPLETIONS: new_completion_id,
    EMBEDDINGS: new_embedding_id,
}

T = TypeVar("T")
P = ParamSpec("P")

_carrying: set[asyncio.Task[None]] = set()  # an event loop holds its tasks only weakly


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of the output `index` that became certain, how many tokens brought it, and their log-probabilities, where
    asked for, as OpenAI's chat tells them."""

    text: str
    tokens: int
    index: int = 0
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event: the request as recorded, succeeded, failed or cancelled."""

    request: Request


LiveEvent = TextDelta | Finished


class HostFailed(Exception):
    """The engine host refused the request, or fell silent in the middle of it."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


def submit(
    *, user: User, team: Team, api_key: ApiKey | None, body: object, endpoint: str = CHAT_COMPLETIONS
) -> Request:
    """Admits a single request and makes its row; `run` must follow. Raises PermissionDenied; Rejected."""
    require_role(user, team, *RUNNERS)
    admitted = admit(team=team, api_key=api_key, body=body, endpoint=endpoint)
    if freshest_host(admitted.release.name) is None:
        raise Rejected(
            http_status=503,
            code="no_engine_host",
            message=_("No engine host is running. Start one with `penstock up`, or try again in a moment."),
        )
    salt = new_salt()
    return Request.objects.create(
        id=NEW_IDS[endpoint](),
        team=team,
        task=admitted.task,
        task_version=admitted.task.version,
        model_release=admitted.release,
        latency_class=admitted.task.latency_class,
        api_key=api_key,
        created_by=user.username,
        endpoint=endpoint,
        body=admitted.body,
        groups=admitted.groups,
        salt=salt,
        prompt_digest=prompt_digest(salt, admitted.body),
        status=Request.Status.LEASED,
        created_at=timezone.now(),
    )


async def run(*, request: Request) -> AsyncIterator[LiveEvent]:
    """The request's events: text as it comes, and `Finished` once it is recorded. Closing this cancels the request.

    What goes wrong at the engine host is told by the finished request (`failed`, with `error_code`), not raised.
    """
    carriage = Carriage(request)
    task = asyncio.create_task(carriage.carry())
    _carrying.add(task)
    task.add_done_callback(_carrying.discard)
    ended = False
    try:
        while not ended:
            event = await carriage.events.get()
            if isinstance(event, Exception):
                raise event
            ended = isinstance(event, Finished)
            yield event
    finally:
        if not ended:
            carriage.hang_up()


def freshest_host(release_name: str) -> EngineHost | None:
    """The engine host to ask: one that beats and is not leaving, by preference with the release loaded."""
    hosts = [
        host
        for host in EngineHost.objects.filter(heartbeat_at__gt=Now() - HOST_FRESH).order_by("-heartbeat_at")
        if host.state.get("status") == "running"
    ]
    loaded = [host for host in hosts if release_name in host.state.get("releases", ())]
    return next(iter(loaded or hosts), None)


def _delta(event: TokenEvent) -> TextDelta:
    logprobs = None if event.logprobs is None else [logprob_item(one) for one in event.logprobs]
    return TextDelta(event.text, len(event.token_ids), event.index, logprobs)


async def _in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs database work on a pool's thread.

    Not on the request's own thread, which Django gives up when the view has returned or its caller is gone; a carriage
    lives longer than either. A pool's thread ends no request, so its connection is given back here.
    """

    def run() -> T:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return await sync_to_async(run, thread_sensitive=False)()


@dataclass(slots=True)
class Carriage:
    """One request on its way through an engine host."""

    request: Request
    events: "asyncio.Queue[LiveEvent | Exception]" = field(default_factory=asyncio.Queue)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    text: list[str] = field(default_factory=list)
    tokens: int = 0

    def hang_up(self) -> None:
        """The caller is gone."""
        self.hung_up.set()

    async def carry(self) -> None:
        """Reads the host's stream to its end and records the result, then tells it."""
        try:
            result = await self._result()
            self.events.put_nowait(Finished(await _in_thread(self._record, result)))
        except Exception as error:
            logger.exception("request %s could not be recorded", self.request.pk)
            self.events.put_nowait(error)

    async def _result(self) -> Result:
        try:
            completion = await self._completion()
        except (HostFailed, InferenceError, httpx.HTTPError, OSError, ValueError) as error:
            if self.hung_up.is_set():
                return self._cancelled()
            code = error.code if isinstance(error, HostFailed) else "engine_host_failed"
            logger.warning("request %s: %s", self.request.pk, error)
            message = _("The engine host could not carry this request to its end: %(why)s") % {
                "why": str(error) or type(error).__name__
            }
            return failed(self.request, code, message, http_status=503 if code == "model_unavailable" else 502)
        if isinstance(completion, Embedded):
            stopped = completion.cancelled
        else:
            stopped = completion.finish_reason == "cancelled"
        if stopped and not self.hung_up.is_set():
            message = _("The engine host stopped while it ran this request.")
            return failed(self.request, "interrupted", message, http_status=503)
        if isinstance(completion, Embedded):
            return embedded_result(completion, finished_at=timezone.now())
        return result_of(self.request.pk, completion, finished_at=timezone.now())

    async def _completion(self) -> Completion | Embedded:
        """Raises HostFailed, InferenceError, httpx.HTTPError, OSError, ValueError."""
        host, order = await _in_thread(self._order)
        if host is None:
            raise HostFailed("no_engine_host", _("No engine host is running."))
        headers = {"Authorization": f"Bearer {secret(INTERNAL_TOKEN)}"}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # loading a model and a long answer both take time
        async with httpx.AsyncClient(base_url=host.url, headers=headers, timeout=timeout, trust_env=False) as client:
            reading = asyncio.create_task(self._read(client, order))
            leaving = asyncio.create_task(self.hung_up.wait())
            try:
                await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    await client.post(f"/cancel/{self.request.pk}", timeout=CANCEL_SECONDS)
                    await asyncio.wait({reading}, timeout=CANCEL_SECONDS)
                if not reading.done():
                    raise HostFailed("cancelled", "the host did not end the request in time")
                return reading.result()
            finally:
                reading.cancel()
                leaving.cancel()

    async def _read(self, client: httpx.AsyncClient, order: dict[str, Any]) -> Completion | Embedded:
        path = "/embed" if self.request.endpoint == EMBEDDINGS else "/generate"
        async with client.stream("POST", path, json=order) as response:
            if response.status_code != httpx.codes.OK:
                told = json.loads(await response.aread())["error"]
                raise HostFailed(told["code"], told["message"])
            async for line in response.aiter_lines():
                news = json.loads(line)
                if "error" in news:
                    raise HostFailed(news["error"]["code"], news["error"]["message"])
                if "embedded" in news:
                    return EMBEDDED.validate_json(json.dumps(news["embedded"]))
                if "completion" in news:
                    return COMPLETION.validate_python(news["completion"])
                event = EVENTS.validate_python(news["event"])
                if event.index == 0:
                    self.text.append(event.text)
                self.tokens += len(event.token_ids)
                self.events.put_nowait(_delta(event))
        raise HostFailed("interrupted", _("The engine host fell silent."))

    def _order(self) -> tuple[EngineHost | None, dict[str, Any]]:
        request = self.request
        if request.endpoint == EMBEDDINGS:
            return freshest_host(request.model_release.name), {
                "request_id": request.pk,
                "release_id": request.model_release_id,
                "inputs": embedding_inputs(tokenizer_of(request.model_release), request.body),
            }
        contract = contract_of(request.task_id, request.task_version)
        sampling = bound_sampling_of(request.body, request.pk, contract)
        return freshest_host(request.model_release.name), {
            "request_id": request.pk,
            "release_id": request.model_release_id,
            "prompt_token_ids": prompt_token_ids(tokenizer_of(request.model_release), request.body),
            "sampling": SAMPLING.dump_python(sampling, mode="json"),
            "priority": PRIORITIES[LatencyClass(request.latency_class)],
        }

    def _cancelled(self) -> Result:
        """What is known of a request whose caller left and whose host did not tell the end."""
        return Result(
            request_id=self.request.pk,
            status=Request.Status.CANCELLED,
            finished_at=timezone.now(),
            output_text=storable("".join(self.text)),
            finish_reason="cancelled",
            error_code="cancelled",
            error_message=_("The caller hung up."),
            output_tokens=self.tokens,
        )

    def _record(self, result: Result) -> Request:
        """The request as it stands in the end: a sweep may have finished it before.

        Waits a while for a database that is away; raises its error when it does not come back.
        """
        pause, give_up_at = FIRST_PAUSE_SECONDS, time.monotonic() + DATABASE_SECONDS
        while True:
            try:
                record_results([result])
                return Request.objects.select_related("task", "team", "model_release", "embedding").get(
                    pk=self.request.pk
                )
            except (OperationalError, InterfaceError) as error:
                connection.close()
                if time.monotonic() > give_up_at:
                    raise
                logger.warning("the database is away, the result of %s waits: %s", self.request.pk, error)
                time.sleep(pause)
                pause *= 2

"""The host's inner door: single requests from the web process, on the loopback interface, behind a token.

`POST /generate` takes token ids and answers with a line of JSON a piece of news: `{"event": {…}}` as tokens come, at
last `{"completion": {…}}` or `{"error": {…}}`. `POST /embed` takes the token ids of texts and answers with one line,
`{"embedded": {…}}` or `{"error": {…}}`. Whoever hangs up cancels. `POST /cancel/{id}` cancels and lets the
stream end with what there is. `GET /health` needs no token and tells nothing but that the host is there.
"""

import asyncio
import hmac
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import uvicorn
from django.db import close_old_connections
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from inference.errors import InvalidRequest
from inference.json_lines import json_line
from inference.request import Completion, GenerationRequest, SamplingParams, TokenEvent
from penstock.registry.models import ModelRelease
from penstock.serving.hosting.embedding import Texts
from penstock.serving.hosting.embedding import embed as embed_texts
from penstock.serving.hosting.engines import EngineUnavailable
from penstock.serving.hosting.host import EngineHostProcess
from penstock.serving.results import EMBEDDED, Embedded
from penstock.settings import secret

if TYPE_CHECKING:
    from inference.engine import Engine

logger = logging.getLogger(__name__)

TOKEN_NAME = "internal-token"  # noqa: S105 - the name of the file that holds it
START_SECONDS = 20.0
EVENTS = TypeAdapter(TokenEvent)
COMPLETIONS = TypeAdapter(Completion)


class Order(BaseModel):
    """What `POST /generate` takes."""

    model_config = ConfigDict(extra="forbid")

    request_id: str
    release_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0

    def generation(self) -> GenerationRequest:
        return GenerationRequest(self.request_id, tuple(self.prompt_token_ids), self.sampling, self.priority)


class EmbeddingOrder(BaseModel):
    """What `POST /embed` takes."""

    model_config = ConfigDict(extra="forbid")

    request_id: str
    release_id: int
    inputs: list[tuple[int, ...]]


def make_app(host: EngineHostProcess, token: str) -> Starlette:
    running: dict[str, Callable[[], None]] = {}

    async def health(_request: HttpRequest) -> Response:
        return JSONResponse({"status": "stopping" if host.stopping.is_set() else "running"})

    async def generate(request: HttpRequest) -> Response:
        try:
            order = Order.model_validate_json(await request.body())
            generation = order.generation()
        except (ValidationError, InvalidRequest) as error:
            return _error(400, "invalid_request", str(error))
        if host.stopping.is_set():
            return _error(503, "stopping", "this engine host is stopping")
        return StreamingResponse(_carry(host, order, generation, running), media_type="application/x-ndjson")

    async def embed(request: HttpRequest) -> Response:
        try:
            order = EmbeddingOrder.model_validate_json(await request.body())
        except ValidationError as error:
            return _error(400, "invalid_request", str(error))
        if host.stopping.is_set():
            return _error(503, "stopping", "this engine host is stopping")
        return StreamingResponse(_carry_embedding(host, order, running), media_type="application/x-ndjson")

    async def cancel(request: HttpRequest) -> Response:
        stop = running.get(request.path_params["request_id"])
        if stop is not None:
            stop()
        return JSONResponse({"cancelled": stop is not None})

    guarded = _guard(token)
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/generate", guarded(generate), methods=["POST"]),
            Route("/embed", guarded(embed), methods=["POST"]),
            Route("/cancel/{request_id}", guarded(cancel), methods=["POST"]),
        ]
    )


async def _carry(
    host: EngineHostProcess, order: Order, generation: GenerationRequest, running: dict[str, Callable[[], None]]
) -> AsyncIterator[bytes]:
    """The lines of one answer. Closing this generator cancels the request."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[TokenEvent | Completion] = asyncio.Queue()

    def tell(event: TokenEvent | Completion) -> None:
        # Called on the engine's thread; the loop may be closed already when the host stops.
        try:
            loop.call_soon_threadsafe(news.put_nowait, event)
        except RuntimeError:
            logger.info("nobody waits for %s any more", order.request_id)

    with ExitStack() as stack:
        stack.enter_context(host.live(order.request_id))
        try:
            engine = await _engine(host, order.release_id, stack)
        except _NoEngine as refusal:
            yield json_line({"error": refusal.error})
            return
        # On a thread: a constraint that this engine has not seen yet takes a while to be compiled.
        await run_in_threadpool(engine.submit, generation, on_token=tell, on_finish=tell)
        running[order.request_id] = lambda: engine.cancel(order.request_id)
        try:
            while True:
                event = await news.get()
                if isinstance(event, TokenEvent):
                    yield json_line({"event": EVENTS.dump_python(event, mode="json")})
                else:
                    yield json_line({"completion": COMPLETIONS.dump_python(event, mode="json")})
                    return
        finally:
            running.pop(order.request_id, None)
            engine.cancel(order.request_id)


async def _carry_embedding(
    host: EngineHostProcess, order: EmbeddingOrder, running: dict[str, Callable[[], None]]
) -> AsyncIterator[bytes]:
    """The one line of an answer. Closing this generator cancels the request."""
    cancelled = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(host.live(order.request_id))
        try:
            engine = await _engine(host, order.release_id, stack)
        except _NoEngine as refusal:
            yield json_line({"error": refusal.error})
            return
        texts = [Texts(order.request_id, order.inputs)]

        def run() -> list[Embedded]:
            (answer,) = embed_texts(engine, texts, stopped=lambda: cancelled.is_set() or host.stopping.is_set())
            return answer

        running[order.request_id] = cancelled.set
        computing = asyncio.ensure_future(run_in_threadpool(run))
        try:
            (embedded,) = await asyncio.shield(computing)
            yield json_line({"embedded": EMBEDDED.dump_python(embedded, mode="json")})
        finally:
            running.pop(order.request_id, None)
            cancelled.set()
            # The engine stays in use until its thread has left it, which is a step away.
            with anyio.CancelScope(shield=True):
                await asyncio.wait([computing])


class _NoEngine(Exception):
    def __init__(self, code: str, message: str) -> None:
        self.error = {"code": code, "message": message}
        super().__init__(message)


async def _engine(host: EngineHostProcess, release_id: int, stack: ExitStack) -> "Engine":
    """The release's engine, in use until the stack is closed. Raises _NoEngine."""
    try:
        using = host.engines.use(await run_in_threadpool(_release, release_id))
        return await run_in_threadpool(stack.enter_context, using)
    except EngineUnavailable as error:
        raise _NoEngine("model_unavailable", str(error)) from error
    except ModelRelease.DoesNotExist as error:
        raise _NoEngine("model_not_found", "there is no such model release") from error


def _release(release_id: int) -> ModelRelease:
    close_old_connections()
    try:
        return ModelRelease.objects.get(pk=release_id)
    finally:
        close_old_connections()


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)


Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def _guard(token: str) -> Callable[[Endpoint], Endpoint]:
    expected = f"Bearer {token}".encode()

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def checked(request: HttpRequest) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                return _error(401, "unauthorized", "the internal token is missing or wrong")
            return await endpoint(request)

        return checked

    return guarded


@dataclass(slots=True)
class Listener:
    """The listener in a thread, on a free port of the loopback interface."""

    host: EngineHostProcess
    url: str = ""
    server: uvicorn.Server | None = None
    thread: threading.Thread | None = None

    def start(self) -> str:
        """Returns its address. Raises RuntimeError if it does not come up."""
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind(("127.0.0.1", 0))
        app = make_app(self.host, secret(TOKEN_NAME))
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=3
        )
        self.server = uvicorn.Server(settings)
        started = threading.Event()
        server = self.server

        def serve() -> None:
            async def run() -> None:
                serving = asyncio.ensure_future(server.serve(sockets=[listening]))
                while not server.started and not serving.done():
                    await asyncio.sleep(0.01)
                started.set()
                await serving

            asyncio.run(run())

        self.thread = threading.Thread(target=serve, name="listener", daemon=True)
        self.thread.start()
        if not started.wait(START_SECONDS) or not server.started:
            raise RuntimeError("the engine host's listener did not start")
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        return self.url

    def stop(self) -> None:
        if self.server is not None and self.thread is not None:
            self.server.should_exit = True
            self.thread.join(timeout=5)

"""The real server, the real client, the real weights."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest


@dataclass(frozen=True, slots=True)
class Server:
    url: str

    def client(self, token: str, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, timeout=120, **{"max_retries": 0, **options})


@pytest.fixture(scope="session")
def starter_store(starter_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starter model's weight store, imported once."""
    from inference.weights import import_model

    store = tmp_path_factory.mktemp("models") / "smollm2"
    import_model(starter_gguf, store)
    return store


@pytest.fixture
def release(transactional_db: None, starter_store: Path) -> Any:
    from django.utils import timezone

    from inference.weights import StoreManifest
    from penstock.registry.models import ModelRelease

    manifest = StoreManifest.load(starter_store)
    return ModelRelease.objects.create(
        name="smollm2",
        status="approved",
        digest=manifest.digest,
        architecture=manifest.config.architecture,
        parameters=manifest.parameters,
        size_bytes=manifest.total_bytes,
        context_tokens=manifest.config.max_context,
        quantization="int4 group 32",
        tokenizer_digest="0" * 64,
        supplier="Hugging Face",
        store_path=str(starter_store),
        imported_by="admin",
        approved_at=timezone.now(),
    )


@pytest.fixture
def server(transactional_db: None, home: Path) -> Iterator[Server]:
    """uvicorn with the ASGI application, in a thread, on the test's database."""
    import uvicorn

    from penstock.asgi import application

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    web = uvicorn.Server(
        uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=lambda: asyncio.run(web.serve(sockets=[listening])), daemon=True)
    thread.start()
    while not web.started and thread.is_alive():
        thread.join(0.01)
    assert web.started
    yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
    web.should_exit = True
    thread.join()


@pytest.fixture
def token_of(people: Any) -> Callable[..., str]:
    """Makes a key for a person: of the outsider in her own team, of the others in theirs."""
    from penstock.accounts.models import Team
    from penstock.accounts.services import create_key

    def make(person: Any, **fields: Any) -> str:
        team = Team.objects.get(memberships__user=person) if person == people.outsider else people.team
        return create_key(user=person, team=team, name="test", **fields)[1]

    return make


@pytest.fixture
def client(server: Server, people: Any, token_of: Callable[..., str]) -> openai.OpenAI:
    return server.client(token_of(people.operator))


@pytest.fixture
def outsider(server: Server, people: Any, token_of: Callable[..., str]) -> openai.OpenAI:
    return server.client(token_of(people.outsider))


@pytest.fixture(scope="session")
def engine_process(django_db_blocker: Any) -> Iterator[Any]:
    """An engine host with its inner listener, in this process; its engine stays loaded from test to test."""
    from penstock.serving.hosting.host import EngineHostProcess
    from penstock.serving.hosting.listener import Listener

    host = EngineHostProcess(name="test-host")
    # Whatever this process has taken for the tests before: what it leaves of a budget is not their affair.
    host.engines._budget_bytes = 2 * 1024**3
    listener = Listener(host)
    listener.start()
    yield host, listener.url
    host.stopping.set()
    with django_db_blocker.unblock():
        host.engines.close()
    listener.stop()


@pytest.fixture
def engine_host(engine_process: Any, transactional_db: None) -> Iterator[Any]:
    """The engine host, beating as a worker's does."""
    from penstock.serving.hosting.heartbeat import Heartbeat

    host, url = engine_process
    heartbeat = Heartbeat(host, url=url, facts={})
    heartbeat.beat()
    heartbeat.start()
    yield host
    heartbeat.stop()

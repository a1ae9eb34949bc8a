"""A real model release, tasks on it, and batches made of lines."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

GIB = 2**30


@pytest.fixture(scope="session")
def starter_store(starter_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starter model's weight store, imported once."""
    from inference.weights.importer import import_model

    store = tmp_path_factory.mktemp("models") / "smollm2"
    import_model(starter_gguf, store)
    return store


@pytest.fixture
def release(db: None, starter_store: Path) -> Any:
    from django.utils import timezone

    from inference.weights.manifest import StoreManifest
    from penstock.registry.models import ModelRelease

    manifest = StoreManifest.load(starter_store)
    return ModelRelease.objects.create(
        name="smollm2-135m",
        status="approved",
        digest=manifest.digest,
        architecture=manifest.config.architecture,
        parameters=manifest.parameters,
        size_bytes=manifest.total_bytes,
        context_tokens=manifest.config.max_context,
        quantization="q4_1",
        tokenizer_digest=manifest.digest,
        store_path=str(starter_store),
        imported_by="admin",
        approved_at=timezone.now(),
    )


@pytest.fixture
def make_task(people: Any, release: Any) -> Callable[..., Any]:
    from penstock.registry.services import create_task
    from penstock.registry.services.tasks import activate_task, submit_task

    def make(name: str, latency_class: str = "batch", **fields: Any) -> Any:
        task = create_task(
            user=people.task_owner,
            team=people.team,
            name=name,
            title=name.title(),
            purpose="Writes one line about a product, for a person to check.",
            latency_class=latency_class,
            model_release=release,
            **fields,
        )
        submit_task(user=people.task_owner, task=task)
        return activate_task(user=people.approver, task=task)

    return make


@pytest.fixture
def task(make_task: Callable[..., Any]) -> Any:
    return make_task("descriptions", max_output_tokens=64)


def chat_line(custom_id: str, text: str = "Say hello.", **body: Any) -> dict[str, Any]:
    """A good line of a batch file; `body` changes or adds parameters."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "descriptions",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 6,
            "temperature": 0,
            **body,
        },
    }


@pytest.fixture
def line() -> Callable[..., dict[str, Any]]:
    return chat_line


@pytest.fixture
def upload(people: Any, home: Path) -> Callable[..., Any]:
    """Stores lines (objects, or bytes as they stand) as a batch's input file."""
    from penstock.serving.services import create_file

    def store(lines: Iterable[dict[str, Any] | bytes]) -> Any:
        raw = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in lines]
        return create_file(
            user=people.operator,
            team=people.team,
            filename="input.jsonl",
            purpose="batch",
            chunks=[one + b"\n" for one in raw],
        )

    return store


@pytest.fixture
def submit(people: Any, upload: Callable[..., Any], task: Any) -> Callable[..., Any]:
    """A batch of these lines, as it waits for intake."""
    from penstock.serving.services import create_batch

    def make(lines: Iterable[dict[str, Any] | bytes], **fields: Any) -> Any:
        return create_batch(
            user=people.operator,
            team=people.team,
            input_file=upload(lines),
            endpoint="/v1/chat/completions",
            **fields,
        )

    return make


@pytest.fixture
def taken_in(submit: Callable[..., Any]) -> Callable[..., Any]:
    """A batch of these lines after intake, with its shards waiting."""
    from penstock.serving.intake import intake

    def make(lines: Iterable[dict[str, Any] | bytes], **fields: Any) -> Any:
        batch = submit(lines, **fields)
        intake(batch.pk)
        batch.refresh_from_db()
        assert batch.status == "in_progress", batch.errors
        return batch

    return make


@pytest.fixture(scope="session")
def engine_pool(django_db_blocker: Any) -> Iterator[Any]:
    """Engines stay loaded for all tests of this folder."""
    from penstock.config import config
    from penstock.serving.hosting.engines import EnginePool

    config().memory_budget_bytes = 2 * GIB
    config().threads = 2
    config().max_running_requests = 16
    pool = EnginePool()
    # Whatever this process has taken for the tests before: what it leaves of a budget is not their affair.
    pool._budget_bytes = 2 * GIB
    yield pool
    with django_db_blocker.unblock():
        pool.close()


@pytest.fixture
def host(engine_pool: Any) -> Any:
    """An engine host of this test's own, around the shared engines."""
    from penstock.serving.hosting.host import EngineHostProcess

    return EngineHostProcess(name="test-host", engines=engine_pool)


@pytest.fixture
def answer() -> Callable[..., Any]:
    """A result as an engine would bring it, for tests that need none."""
    from django.utils import timezone

    from penstock.serving.completion import Result
    from penstock.serving.models import Request

    def make(request: Any, text: str = "Hello.", **fields: Any) -> Result:
        values: dict[str, Any] = {
            "request_id": request.pk,
            "status": Request.Status.SUCCEEDED,
            "finished_at": timezone.now(),
            "started_at": timezone.now(),
            "output_text": text,
            "finish_reason": "stop",
            "http_status": 200,
            "prompt_tokens": 30,
            "output_tokens": 3,
            "queued_seconds": 0.25,
            "ttft_seconds": 0.5,
            "duration_seconds": 1.0,
            "compute_seconds": 0.125,
        }
        return Result(**{**values, **fields})

    return make


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, str]]:
    """What would have gone to the broker: (task, subject, queue). The broker's own part is tested with a real one."""
    from penstock.serving import dispatch

    messages: list[tuple[str, Any, str]] = []

    def send(name: str, subject: Any, *, queue: str) -> bool:
        messages.append((name, subject, queue))
        return True

    monkeypatch.setattr(dispatch, "_send", send)
    return messages

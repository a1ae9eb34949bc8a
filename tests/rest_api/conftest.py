from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient


@pytest.fixture
def release(db: None) -> Any:
    from penstock.registry.models import ModelRelease

    return ModelRelease.objects.create(
        name="small-model",
        status="approved",
        digest="a" * 64,
        architecture="llama",
        parameters=1000,
        size_bytes=4000,
        context_tokens=2048,
        quantization="int4 group 32",
        tokenizer_digest="0" * 64,
        store_path="/nowhere/small-model",
        imported_by="admin",
        approved_at=timezone.now(),
    )


@pytest.fixture
def task(people: Any, release: Any) -> Any:
    from penstock.registry.services import create_task

    return create_task(
        user=people.operator,
        team=people.team,
        name="descriptions",
        title="Product descriptions",
        purpose="Writes product descriptions for a person to check.",
        latency_class="batch",
        model_release=release,
        objectives=[{"metric": "error_rate", "target": "0.5"}],
    )


@pytest.fixture
def batch(people: Any, task: Any) -> Any:
    """A batch of five whose third request failed: written as rows, for this room only reads them."""
    from penstock.serving.models import Batch, File, Request

    now = timezone.now()
    file = File.objects.create(
        id="file-1",
        team=people.team,
        filename="items.jsonl",
        purpose="batch",
        size_bytes=1,
        sha256="b" * 64,
        created_at=now,
        created_by="operator",
    )
    batch = Batch.objects.create(
        id="batch_1",
        team=people.team,
        task=task,
        task_version=1,
        model_release=task.model_release,
        latency_class="batch",
        created_by="operator",
        input_file=file,
        endpoint="/v1/chat/completions",
        status="in_progress",
        total=5,
        created_at=now,
        in_progress_at=now,
        expires_at=now + timedelta(hours=24),
    )
    for line in range(1, 6):
        failed = line == 3
        Request.objects.create(
            id=f"batch_req_{9 - line}",
            batch=batch,
            line=line,
            custom_id=f"row-{line}",
            team=people.team,
            task=task,
            task_version=1,
            model_release=task.model_release,
            latency_class="batch",
            created_by="operator",
            endpoint="/v1/chat/completions",
            body={"model": "small-model", "messages": [{"role": "user", "content": f"secret prompt {line}"}]},
            salt="0" * 32,
            prompt_digest="c" * 64,
            status="failed" if failed else "succeeded",
            created_at=now,
            started_at=now,
            finished_at=now + timedelta(seconds=line),
            output_text="" if failed else "a fine cup",
            error_code="interrupted" if failed else "",
            prompt_tokens=10,
            output_tokens=0 if failed else 20,
            ttft_seconds=0.5,
            duration_seconds=float(line),
            compute_seconds=0.1,
        )
    return batch


@pytest.fixture
def signed_in() -> Callable[[Any], APIClient]:
    def sign_in(person: Any) -> APIClient:
        client = APIClient(enforce_csrf_checks=False)
        client.force_login(person)
        return client

    return sign_in


@pytest.fixture
def by_key(people: Any) -> Callable[..., APIClient]:
    def make(person: Any, team: Any = None) -> APIClient:
        from penstock.accounts.services import create_key

        _key, token = create_key(user=person, team=team or people.team, name="test")
        client = APIClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {token}")
        return client

    return make

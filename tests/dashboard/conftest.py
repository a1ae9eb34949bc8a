"""A team's world as the pages show it: a release, a task, batches with finished requests, evidence, a pilot."""

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def static_files() -> Path:
    """Style sheets and scripts, collected as an installation does it."""
    from django.conf import settings
    from django.core.management import call_command

    call_command("collectstatic", verbosity=0, interactive=False)
    return Path(settings.STATIC_ROOT)


@pytest.fixture(autouse=True)
def _fresh_static_manifest(static_files: Path) -> Iterator[None]:
    """The storage read its manifest when it was made; it may have been made before the files were collected."""
    from django.contrib.staticfiles.storage import staticfiles_storage

    staticfiles_storage.hashed_files, staticfiles_storage.manifest_hash = staticfiles_storage.load_manifest()
    yield


@dataclass(frozen=True, slots=True)
class World:
    """Everything belongs to the team Shop but `foreign_task`, which is the outsider's."""

    release: Any
    task: Any
    draft: Any
    foreign_task: Any
    done: Any
    running: Any
    failed: Any
    request: Any
    failed_request: Any
    file: Any
    pilot: Any
    key: Any


@pytest.fixture
def make_release(db: None) -> Callable[..., Any]:
    def make(name: str = "tiny-4bit", **fields: Any) -> Any:
        from django.utils import timezone

        from penstock.registry.models import ModelRelease

        number = ModelRelease.objects.count()
        values = {
            "status": "approved",
            "approved_at": timezone.now(),
            "approved_by": "approver",
            "digest": f"{number:02x}" * 32,
            "architecture": "llama",
            "parameters": 134_515_008,
            "size_bytes": 90_000_000,
            "context_tokens": 2048,
            "quantization": "int4 group 32",
            "tokenizer_digest": "bb" * 32,
            "licence": "Apache-2.0",
            "store_path": f"/nowhere/{name}",
            "source_path": "/nowhere/model.gguf",
            "imported_by": "admin",
            "manifest": {"files": [{"name": "embedding.bin", "bytes": 10, "sha256": "cc" * 32}]},
        }
        return ModelRelease.objects.create(name=name, **{**values, **fields})

    return make


@pytest.fixture
def make_batch(people: Any) -> Callable[..., Any]:
    """A batch of `rows` queued requests, half of them in each of two languages."""

    def make(task: Any, name: str, *, rows: int, status: str = "in_progress", **fields: Any) -> Any:
        from django.utils import timezone

        from penstock.serving.digests import prompt_digest
        from penstock.serving.models import Batch, File, Request

        now = timezone.now()
        file = File.objects.create(
            id=f"file-{name}",
            team=task.team,
            filename=f"{name}.jsonl",
            purpose="batch",
            size_bytes=10,
            sha256="dd" * 32,
            created_at=now,
            created_by="operator",
        )
        batch = Batch.objects.create(
            id=f"batch_{name}",
            team=task.team,
            task=task,
            task_version=task.version,
            model_release=task.model_release,
            latency_class=task.latency_class,
            created_by="operator",
            input_file=file,
            endpoint="/v1/chat/completions",
            status=status,
            total=rows,
            created_at=now,
            in_progress_at=now - dt.timedelta(seconds=10),
            expires_at=now + dt.timedelta(hours=24),
            **fields,
        )
        for line in range(1, rows + 1):
            messages = [{"role": "user", "content": f"Describe product {line} <b>"}]
            body = {"model": task.name, "messages": messages, "max_tokens": 32, "temperature": 0}
            salt = f"{line:032x}"
            Request.objects.create(
                id=f"batch_req_{name}_{line:04d}",
                batch=batch,
                line=line,
                custom_id=f"row-{line}",
                team=task.team,
                task=task,
                task_version=task.version,
                model_release=task.model_release,
                latency_class=task.latency_class,
                created_by="operator",
                endpoint=batch.endpoint,
                body=body,
                groups={"language": "en" if line % 2 else "zh-Hant"},
                salt=salt,
                prompt_digest=prompt_digest(salt, body),
                created_at=now,
            )
        return batch

    return make


@pytest.fixture
def finish(db: None) -> Callable[..., None]:
    """Ends the batch's first requests: those on `failing` lines with an error, the rest with a text."""

    def end(batch: Any, *, upto: int | None = None, failing: tuple[int, ...] = ()) -> None:
        from django.utils import timezone

        from penstock.serving.completion import Result, record_results

        now = timezone.now()
        results = []
        for row in batch.requests.order_by("line")[:upto]:
            if row.line in failing:
                results.append(
                    Result(
                        request_id=row.pk,
                        status="failed",
                        finished_at=now,
                        error_code="prompt_too_long",
                        error_message="The prompt has 3,000 tokens.",
                        http_status=400,
                    )
                )
                continue
            results.append(
                Result(
                    request_id=row.pk,
                    status="succeeded",
                    started_at=now - dt.timedelta(seconds=4),
                    finished_at=now - dt.timedelta(seconds=row.line % 3),
                    output_text="A light oolong from high gardens, with a floral aroma and a clean finish.",
                    finish_reason="stop",
                    http_status=200,
                    prompt_tokens=40,
                    output_tokens=20,
                    queued_seconds=0.5,
                    ttft_seconds=0.75,
                    duration_seconds=2.0,
                    compute_seconds=0.1,
                )
            )
        record_results(results)

    return end


@pytest.fixture
def world(people: Any, home: Path, make_release: Any, make_batch: Any, finish: Any) -> World:
    from django.utils import timezone

    from governance.ledger.services import drain_and_sign, ledger_key
    from penstock.accounts.models import Team
    from penstock.accounts.services import create_key
    from penstock.pilots.models import Pilot
    from penstock.registry.services import activate_task, create_task, submit_task
    from penstock.telemetry.rates import current_rate_card

    release = make_release()

    def register(name: str, user: Any, team: Any, **fields: Any) -> Any:
        return create_task(
            user=user,
            team=team,
            name=name,
            title=f"The {name}",
            purpose=f"Purpose of {name}.",
            latency_class="batch",
            model_release=release,
            **fields,
        )

    task = register(
        "descriptions",
        people.operator,
        people.team,
        output_contract={"language_from": "language", "min_characters": 20},
        objectives=[{"metric": "error_rate", "target": "0.01"}],
        fairness_plan={"group": "language", "min_count": 2, "min_events": 1},
    )
    submit_task(user=people.operator, task=task)
    task = activate_task(user=people.approver, task=task)
    draft = register("draft-task", people.operator, people.team)
    foreign = register("foreign-task", people.outsider, Team.objects.get(slug="elsewhere"))
    done = make_batch(task, "done", rows=8)
    finish(done, failing=(3,))
    now = timezone.now()
    type(done).objects.filter(pk=done.pk).update(status="completed", finalizing_at=now, completed_at=now)
    running = make_batch(task, "running", rows=4)
    finish(running, upto=1)
    failed = make_batch(
        task,
        "failed",
        rows=0,
        status="failed",
        failed_at=now,
        errors={
            "object": "list",
            "data": [{"code": "invalid_json_line", "message": "Line 2 is not JSON.", "param": None, "line": 2}],
        },
    )
    drain_and_sign(key=ledger_key())
    done.refresh_from_db()
    pilot = Pilot.objects.create(
        name="ninety-days",
        title="Ninety days",
        task=task,
        items_file=done.input_file,
        sample_items=4,
        rate_card=current_rate_card(),
        introduction_cost=Decimal("1000"),
        starts_on=dt.date(2026, 11, 1),
        created_by="pilot",
    )
    key, _secret = create_key(user=people.operator, team=people.team, name="Exporter")
    return World(
        release=release,
        task=task,
        draft=draft,
        foreign_task=foreign,
        done=done,
        running=running,
        failed=failed,
        request=done.requests.get(line=1),
        failed_request=done.requests.get(line=3),
        file=done.input_file,
        pilot=pilot,
        key=key,
    )


@pytest.fixture
def as_person(db: None) -> Callable[[Any], Any]:
    """A client for a person who is signed in."""
    from django.test import Client

    def sign_in(person: Any) -> Any:
        client = Client()
        client.force_login(person)
        return client

    return sign_in

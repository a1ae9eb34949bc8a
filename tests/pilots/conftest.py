"""A task on real weights, a pilot of it, and measurements whose figures a reader can work out by hand."""

import datetime as dt
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

START = dt.datetime(2026, 11, 2, 9, 0, tzinfo=dt.UTC)


@pytest.fixture(autouse=True, scope="session")
def _broker(broker_url: str) -> None:
    """Messages go to a broker that nobody listens to: the tests call what a worker would."""
    from penstock.celery import app

    app.conf.broker_url = broker_url


@pytest.fixture(scope="session")
def starter_store(starter_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from inference.weights.importer import import_model

    store = tmp_path_factory.mktemp("models") / "smollm2"
    import_model(starter_gguf, store)
    return store


@pytest.fixture
def release(db: None, starter_store: Path, starter_gguf: Path) -> Any:
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
        source=manifest.source_name,
        source_digest=manifest.source_digest,
        store_path=str(starter_store),
        source_path=str(starter_gguf),
        imported_by="admin",
        approved_at=START,
    )


@pytest.fixture
def task(people: Any, release: Any) -> Any:
    from penstock.registry.services import activate_task, create_task, submit_task

    task = create_task(
        user=people.task_owner,
        team=people.team,
        name="descriptions",
        title="Descriptions",
        purpose="Writes one line about a product, for a person to check.",
        latency_class="batch",
        model_release=release,
        max_output_tokens=64,
        output_contract={"min_characters": 5},
    )
    submit_task(user=people.task_owner, task=task)
    return activate_task(user=people.approver, task=task)


def request_line(number: int, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": f"item-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "descriptions",
            "messages": [{"role": "user", "content": f"Name product number {number}."}],
            "max_tokens": 6,
            **body,
        },
    }


@pytest.fixture
def item_line() -> Callable[..., dict[str, Any]]:
    """A good line of a file of items; further arguments change or add parameters of the body."""
    return request_line


@pytest.fixture
def upload(people: Any, home: Path) -> Callable[..., Any]:
    from penstock.serving.services import create_file

    def store(lines: Sequence[dict[str, Any] | bytes], user: Any = None, team: Any = None) -> Any:
        raw = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in lines]
        return create_file(
            user=user or people.operator,
            team=team or people.team,
            filename="items.jsonl",
            purpose="batch",
            chunks=[one + b"\n" for one in raw],
        )

    return store


@pytest.fixture
def card(people: Any) -> Any:
    """A second of this host costs exactly 0.0102 TWD: 0.01 for hardware, 0.0002 for 180 W at 4 TWD a kWh.

    315,576 TWD over one year (31,557,600 s), all hours in use, is 0.01 a second; 0.18 kW x 4 / 3600 is 0.0002.
    """
    from penstock.telemetry.rates import set_rate_card

    return set_rate_card(
        user=people.pilot_manager,
        name="Test rates",
        currency="TWD",
        hardware_price=Decimal("315576"),
        lifetime_years=Decimal("1"),
        utilization=Decimal("1"),
        power_watts=Decimal("180"),
        electricity_price_per_kwh=Decimal("4"),
        carbon_kg_per_kwh=Decimal("0.5"),
    )


@pytest.fixture
def make_pilot(people: Any, task: Any, upload: Callable[..., Any], card: Any) -> Callable[..., Any]:
    from penstock.pilots.services import create_pilot

    def make(name: str = "shop-pilot", items: int = 4, **fields: Any) -> Any:
        values: dict[str, Any] = {
            "user": people.pilot_manager,
            "task": task,
            "items_file": upload([request_line(number) for number in range(1, items + 3)]),
            "name": name,
            "title": "Shop pilot",
            "sample_items": items,
            "items_per_month": 100_000,
            "introduction_cost": Decimal("5000"),
        }
        return create_pilot(**{**values, **fields})

    return make


@pytest.fixture
def baseline_of(people: Any) -> Callable[..., Any]:
    """A completed baseline run with these durations, one item a row."""
    from penstock.pilots.models import BaselineItem, BaselineRun
    from penstock.pilots.services import start_baseline

    def measured(
        pilot: Any,
        durations: Sequence[float],
        *,
        tokens: Sequence[int] | None = None,
        valid: Sequence[bool | None] | None = None,
        text: str = "A fine product.",
    ) -> Any:
        run = start_baseline(user=people.pilot_manager, pilot=pilot)
        moment = START
        for number, duration in enumerate(durations, start=1):
            ended = moment + dt.timedelta(seconds=duration)
            BaselineItem.objects.create(
                run=run,
                custom_id=f"item-{number}",
                started_at=moment,
                finished_at=ended,
                finish_reason="length",
                prompt_tokens=30,
                output_tokens=tokens[number - 1] if tokens else 6,
                duration_seconds=duration,
                output_text=text,
                output_digest="0" * 64,
                valid=valid[number - 1] if valid else True,
            )
            moment = ended
        run.status = BaselineRun.Status.COMPLETED
        run.started_at, run.finished_at = START, moment
        run.method = {
            "dtype": "float32",
            "threads": 2,
            "source_digest": pilot.task.model_release.source_digest,
            "warm_up_tokens": 4,
            "libraries": {"transformers": "5.0.0", "torch": "2.13.0"},
            "host": {"processor": "Example 3000", "cores": 2, "memory_bytes": 8 * 10**9, "system": "Linux 6"},
            "items_digest": "a" * 64,
            "prompts_digest": "b" * 64,
        }
        run.save()
        return run

    return measured


@pytest.fixture
def trial_of(people: Any) -> Callable[..., Any]:
    """A completed trial: item k starts at once and ends after `ends[k]` seconds with that share of busy time."""
    from penstock.pilots.services import start_trial
    from penstock.serving.completion import Result, record_results
    from penstock.serving.intake import intake
    from penstock.serving.models import Batch, Request

    def measured(
        pilot: Any,
        ends: Sequence[float],
        *,
        tokens: Sequence[int] | None = None,
        texts: Sequence[str] | None = None,
        failed: Sequence[int] = (),
    ) -> Any:
        batch = start_trial(user=people.pilot_manager, pilot=pilot)
        intake(batch.pk)
        start = START + dt.timedelta(hours=1)
        results = []
        for position, request in enumerate(batch.requests.order_by("line")):
            gave_up = position + 1 in failed
            results.append(
                Result(
                    request_id=request.pk,
                    status=Request.Status.FAILED if gave_up else Request.Status.SUCCEEDED,
                    started_at=start,
                    finished_at=start + dt.timedelta(seconds=ends[position]),
                    output_text="" if gave_up else (texts[position] if texts else "A fine product."),
                    finish_reason="" if gave_up else "length",
                    http_status=500 if gave_up else 200,
                    error_code="server_error" if gave_up else "",
                    prompt_tokens=30,
                    output_tokens=0 if gave_up else (tokens[position] if tokens else 6),
                    queued_seconds=0.0,
                    ttft_seconds=0.1,
                    duration_seconds=ends[position],
                    compute_seconds=max(ends) / len(ends),
                )
            )
        record_results(results)
        Batch.objects.filter(pk=batch.pk).update(status=Batch.Status.COMPLETED, completed_at=start)
        batch.refresh_from_db()
        pilot.refresh_from_db()
        return batch

    return measured

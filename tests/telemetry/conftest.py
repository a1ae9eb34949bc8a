"""Requests and their usage, laid down row by row so that every figure can be worked out by hand."""

import datetime as dt
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest

from penstock.accounts.models import Team, User
from penstock.registry.models import ModelRelease, Task, TaskVersion
from penstock.serving.models import Batch, File, Request
from penstock.telemetry.models import RateCard

NOON = dt.datetime(2026, 11, 2, 12, 0, tzinfo=dt.UTC)


@dataclass
class Floor:
    """One team's task, its release and a batch, to lay requests on."""

    team: Team
    owner: User
    release: ModelRelease
    task: Task
    batch: Batch
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def request(
        self,
        *,
        status: str = "succeeded",
        start: float | None = 0.0,
        seconds: float = 1.0,
        origin: dt.datetime = NOON,
        batch: Batch | None = None,
        single: bool = False,
        **fields: Any,
    ) -> Request:
        """A request that started `start` seconds after `origin` and ran for `seconds`."""
        number = next(self.numbers)
        started_at = None if start is None else origin + dt.timedelta(seconds=start)
        over = status in Request.FINISHED
        finished_at = (started_at or origin) + dt.timedelta(seconds=seconds) if over else None
        if status == "succeeded":
            fields.setdefault("duration_seconds", seconds)
        task = fields.pop("task", self.task)
        return Request.objects.create(
            id=f"req_{task.pk}_{number}",
            batch=None if single else batch or self.batch,
            line=None if single else number,
            custom_id=f"row-{number}",
            team=task.team,
            task=task,
            task_version=task.version,
            model_release=self.release,
            latency_class=task.latency_class,
            created_by="operator",
            endpoint="/v1/chat/completions",
            body={"prompt": "p", "max_tokens": 16},
            salt="00" * 16,
            prompt_digest="11" * 32,
            status=status,
            created_at=origin,
            started_at=started_at,
            finished_at=finished_at,
            **fields,
        )

    def requests(self) -> Any:
        return Request.objects.filter(task=self.task)


def lay_floor(team: Team, owner: User, name: str) -> Floor:
    release, _ = ModelRelease.objects.get_or_create(
        name="tiny-4bit",
        defaults={
            "status": "approved",
            "approved_at": NOON,
            "approved_by": "approver",
            "digest": "aa" * 32,
            "architecture": "llama",
            "parameters": 1,
            "size_bytes": 1,
            "context_tokens": 2048,
            "quantization": "q4_1",
            "tokenizer_digest": "bb" * 32,
            "licence": "Apache-2.0",
            "store_path": "/nowhere",
        },
    )
    task = Task.objects.create(
        name=name,
        title=name.title(),
        purpose="p",
        owner=owner,
        team=team,
        latency_class="batch",
        model_release=release,
        status="active",
    )
    TaskVersion.objects.create(task=task, version=1, content={"name": name}, digest="cc" * 32, created_by="owner")
    file = File.objects.create(
        id=f"file-{name}",
        team=team,
        filename="in.jsonl",
        purpose="batch",
        size_bytes=1,
        sha256="dd" * 32,
        created_at=NOON,
        created_by="operator",
    )
    batch = Batch.objects.create(
        id=f"batch_{name}",
        team=team,
        task=task,
        task_version=1,
        model_release=release,
        latency_class="batch",
        created_by="operator",
        input_file=file,
        endpoint="/v1/chat/completions",
        status="completed",
        created_at=NOON,
        expires_at=NOON + dt.timedelta(hours=24),
        completed_at=NOON + dt.timedelta(minutes=5),
    )
    return Floor(team=team, owner=owner, release=release, task=task, batch=batch)


@pytest.fixture
def floor(people: Any) -> Floor:
    return lay_floor(people.team, people.task_owner, "descriptions")


@pytest.fixture
def next_door(people: Any) -> Floor:
    """The outsider's team has a task of its own."""
    return lay_floor(Team.objects.get(slug="elsewhere"), people.outsider, "next-door")


@pytest.fixture
def round_card(db: None) -> RateCard:
    """Rates that make figures easy by hand: hardware 0.001 a busy second, power 0.0005, so 0.0015 TWD a second."""
    return RateCard.objects.create(
        name="Round",
        currency="TWD",
        hardware_price=Decimal("15778.80"),
        lifetime_years=Decimal("1"),
        utilization=Decimal("0.5"),
        power_watts=Decimal("360"),
        electricity_price_per_kwh=Decimal("5"),
        carbon_kg_per_kwh=Decimal("0.5"),
        current=True,
        created_by="operator",
    )


def total(values: Iterable[Decimal]) -> Decimal:
    return sum(values, Decimal(0))

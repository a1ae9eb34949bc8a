"""From the message to the files through a real broker and a real Celery worker."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.celery import app
from penstock.serving.dispatch import SHARD_QUEUES
from penstock.serving.hosting.host import EngineHostProcess, set_current_host
from penstock.serving.models import Batch


@pytest.fixture
def celery_worker(broker_url: str, host: EngineHostProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Control and engine host in threads of this process."""
    from celery.contrib.testing.worker import start_worker

    before = app.conf.broker_url
    app.conf.broker_url = broker_url
    # The pools that hold connections to the broker of before.
    monkeypatch.setattr(app, "_pool", None)
    monkeypatch.setattr(app.amqp, "_producer_pool", None)
    set_current_host(host)
    with start_worker(app, pool="threads", concurrency=4, queues=["control", *SHARD_QUEUES], perform_ping_check=False):
        yield
    set_current_host(None)
    app.conf.broker_url = before


@pytest.mark.django_db(transaction=True)
def test_a_batch_goes_through_celery(celery_worker: None, submit: Callable[..., Any], line: Any) -> None:
    batch = submit([line("a"), line("b")])

    deadline = time.monotonic() + 120
    while batch.status not in Batch.TERMINAL and time.monotonic() < deadline:
        time.sleep(0.2)
        batch.refresh_from_db()

    assert batch.status == Batch.Status.COMPLETED, batch.errors
    assert batch.requests.filter(status="succeeded").count() == 2

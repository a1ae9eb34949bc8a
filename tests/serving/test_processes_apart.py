"""What each process may load, what a host tells of itself, and when heads are signed."""

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from governance.ledger.models import Checkpoint, Leaf
from governance.ledger.services import record
from penstock.config import config
from penstock.serving.hosting.facts import host_facts
from penstock.serving.hosting.heartbeat import Heartbeat
from penstock.serving.hosting.host import EngineHostProcess
from penstock.serving.models import EngineHost
from penstock.serving.selectors import is_alive
from penstock.serving.sequencing import sequence_and_sign


def test_the_web_and_control_processes_load_no_torch() -> None:
    """All of serving that they import, in a process of its own: this one has torch by now."""
    code = (
        "import sys, django; django.setup()\n"
        "import penstock.serving.tasks, penstock.serving.live, penstock.serving.services, penstock.serving.selectors\n"
        "import penstock.serving.hosting.listener, penstock.serving.worker\n"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "penstock.settings"}
    environment["PYTHONPATH"] = ":".join(path for path in sys.path if path)

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.django_db
def test_a_host_tells_what_it_is_and_what_it_is_at(host: EngineHostProcess) -> None:
    heartbeat = Heartbeat(host, url="http://127.0.0.1:1", facts=host_facts())

    with host.live("chatcmpl-1"), host.slot("batch"):
        heartbeat.beat()

    row = EngineHost.objects.get(name="test-host")
    assert row.state["status"] == "running"
    assert row.state["live_requests"] == ["chatcmpl-1"]
    assert row.state["shards"] == 1
    assert row.facts["torch"].startswith("2.")
    assert row.facts["memory_bytes"] > 0
    assert is_alive(row)

    host.stopping.set()
    heartbeat.beat()
    row.refresh_from_db()
    assert row.state["status"] == "stopping"
    assert not is_alive(row)


@pytest.mark.django_db
def test_a_silent_host_is_not_alive(host: EngineHostProcess) -> None:
    Heartbeat(host, url="http://127.0.0.1:1", facts={}).beat()
    EngineHost.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=1))

    assert not is_alive(EngineHost.objects.get())


@pytest.mark.django_db
def test_a_head_is_signed_for_enough_leaves_or_enough_time(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config(), "checkpoint_leaves", 3)
    monkeypatch.setattr(config(), "checkpoint_seconds", 3600)

    def happen(count: int) -> None:
        for number in range(count):
            record(kind="batch.created", subject=f"batch_{number}", payload={})

    assert not sequence_and_sign()  # nothing happened
    happen(1)
    assert sequence_and_sign()  # the first head comes at once
    happen(2)
    assert not sequence_and_sign()
    assert Leaf.objects.count() == 3
    happen(1)
    assert sequence_and_sign()  # three leaves since
    happen(1)
    monkeypatch.setattr(config(), "checkpoint_seconds", 0)
    assert sequence_and_sign()  # time is up

    assert list(Checkpoint.objects.order_by("size").values_list("size", flat=True)) == [1, 4, 5]

"""Measuring a baseline: once each item, through death and take-over, with the method on record."""

import datetime as dt
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from governance.ledger.models import OutboxEntry
from penstock.pilots import measuring
from penstock.pilots.models import BaselineItem, BaselineRun
from penstock.pilots.naive import Generated
from penstock.pilots.services import start_baseline

# The heartbeat has a thread, and so a connection, of its own.
pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parents[2]


class CountingGenerator:
    """Answers at once; `on_call` may raise, or move the world on, before the answer to a call is given."""

    dtype, threads, libraries = "float32", 1, {"transformers": "none", "torch": "none"}

    def __init__(self, on_call: Any = None) -> None:
        self.prompts: list[str] = []
        self._on_call = on_call

    def generate(self, admitted: Any, *, max_tokens: int) -> Generated:
        if max_tokens != measuring.WARM_UP_TOKENS:
            self.prompts.append(admitted.body["messages"][-1]["content"])
            if self._on_call is not None:
                self._on_call(len(self.prompts))
        return Generated("A fine product.", len(admitted.prompt_token_ids), max_tokens, "length", 0.1, 0.5)


@pytest.fixture
def run(make_pilot: Any, people: Any) -> Any:
    return start_baseline(user=people.pilot_manager, pilot=make_pilot())


def die(run: Any) -> None:
    """What a killed worker leaves: a run that says it is running, and a heartbeat that grows old."""
    BaselineRun.objects.filter(pk=run.pk).update(heartbeat_at=timezone.now() - 2 * measuring.DEAD_AFTER)


def test_each_item_is_run_once_and_the_method_is_kept(run: Any) -> None:
    generator = CountingGenerator()
    assert measuring.measure(run.pk, load=lambda release: generator)
    run.refresh_from_db()
    assert run.status == BaselineRun.Status.COMPLETED
    assert generator.prompts == [f"Name product number {number}." for number in range(1, 5)]
    assert list(run.items.order_by("pk").values_list("custom_id", flat=True)) == [f"item-{n}" for n in range(1, 5)]
    assert all(run.items.values_list("valid", flat=True))
    assert run.method["dtype"] == "float32"
    assert run.method["host"]["cores"] >= 1
    assert run.method["source_digest"] == run.pilot.task.model_release.source_digest
    assert (run.method["interruptions"], run.method["work_meanwhile"]) == (0, 0)
    entry = OutboxEntry.objects.get(kind="pilot.baseline_measured")
    lines = "".join(
        f"{item.custom_id}\t{hashlib.sha256(item.output_text.encode()).hexdigest()}\t6\t0.5\n"
        for item in run.items.order_by("custom_id")
    )
    assert entry.payload["method"]["items_digest"] == hashlib.sha256(lines.encode()).hexdigest()
    assert entry.payload["duration_seconds"] == 2.0
    assert not measuring.measure(run.pk, load=lambda release: generator)


def test_a_run_goes_on_where_a_dead_worker_left_it(run: Any) -> None:
    def killed(call: int) -> None:
        if call == 3:
            raise KeyboardInterrupt

    first = CountingGenerator(killed)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(run.pk, load=lambda release: first)
    assert run.items.count() == 2
    second = CountingGenerator()
    assert not measuring.measure(run.pk, load=lambda release: second), "its heartbeat is fresh"
    die(run)
    assert measuring.measure(run.pk, load=lambda release: second)
    assert second.prompts == ["Name product number 3.", "Name product number 4."]
    run.refresh_from_db()
    assert (run.items.count(), run.method["interruptions"]) == (4, 1)


def test_a_worker_that_stops_hands_the_run_back(run: Any) -> None:
    stopping = threading.Event()
    first = CountingGenerator(lambda call: stopping.set() if call == 2 else None)
    assert not measuring.measure(run.pk, load=lambda release: first, stopping=stopping)
    run.refresh_from_db()
    assert (run.status, run.items.count()) == ("queued", 2)
    second = CountingGenerator()
    assert measuring.measure(run.pk, load=lambda release: second)
    assert len(second.prompts) == 2


def test_a_late_workers_item_is_dropped(run: Any) -> None:
    other = CountingGenerator()

    def taken_over(call: int) -> None:
        if call == 2:
            die(run)
            assert measuring.measure(run.pk, load=lambda release: other)

    late = CountingGenerator(taken_over)
    assert not measuring.measure(run.pk, load=lambda release: late)
    run.refresh_from_db()
    assert run.status == BaselineRun.Status.COMPLETED
    assert len(other.prompts) == 3
    assert BaselineItem.objects.filter(run=run).count() == 4


def test_a_fault_fails_the_run_and_says_why(run: Any) -> None:
    def broken(call: int) -> None:
        raise RuntimeError("no memory left")

    assert not measuring.measure(run.pk, load=lambda release: CountingGenerator(broken))
    run.refresh_from_db()
    assert (run.status, run.error_message) == ("failed", "no memory left")
    assert OutboxEntry.objects.filter(kind="pilot.baseline_failed").exists()


def test_other_weights_than_the_releases_are_refused(run: Any, tmp_path: Path) -> None:
    release = run.pilot.task.model_release
    type(release).objects.filter(pk=release.pk).update(source_digest="0" * 64)
    assert not measuring.measure(run.pk, load=lambda release: CountingGenerator())
    run.refresh_from_db()
    assert "are not those" in run.error_message


def test_missing_weights_are_told_with_their_place(run: Any, tmp_path: Path) -> None:
    release = run.pilot.task.model_release
    type(release).objects.filter(pk=release.pk).update(source_path=str(tmp_path / "gone.gguf"))
    assert not measuring.measure(run.pk, load=lambda release: CountingGenerator())
    run.refresh_from_db()
    assert "gone.gguf" in run.error_message


def test_other_requests_meanwhile_are_counted(run: Any, make_pilot: Any, baseline_of: Any, trial_of: Any) -> None:
    from penstock.serving.models import Request

    other = make_pilot(name="other-pilot")
    baseline_of(other, [1.0] * 4)
    batch = trial_of(other, [1.0] * 4)

    def overlap(call: int) -> None:
        if call == 4:
            now = timezone.now()
            ids = list(batch.requests.order_by("line").values_list("pk", flat=True)[:3])
            Request.objects.filter(pk__in=ids).update(started_at=now, finished_at=now + dt.timedelta(seconds=1))

    assert measuring.measure(run.pk, load=lambda release: CountingGenerator(overlap))
    run.refresh_from_db()
    assert run.method["work_meanwhile"] == 3


def test_the_sweep_wakes_what_waits_or_died_and_gives_up_in_the_end(run: Any) -> None:
    woken: list[int] = []

    def wake(run_id: int) -> bool:
        woken.append(run_id)
        return True

    assert measuring.sweep(wake) == [], "it was asked for just now"
    BaselineRun.objects.filter(pk=run.pk).update(created_at=timezone.now() - dt.timedelta(minutes=1))
    assert measuring.sweep(wake) == [run.pk]
    BaselineRun.objects.filter(pk=run.pk).update(status="running", attempts=3, heartbeat_at=timezone.now())
    assert measuring.sweep(wake) == []
    die(run)
    assert measuring.sweep(wake) == [run.pk]
    BaselineRun.objects.filter(pk=run.pk).update(attempts=measuring.MAX_ATTEMPTS)
    assert measuring.sweep(wake) == []
    run.refresh_from_db()
    assert run.status == BaselineRun.Status.FAILED


WORKER = """
import sys
import django
django.setup()
assert "torch" not in sys.modules
from penstock.pilots.tasks import measure_baseline
assert "torch" not in sys.modules
measure_baseline(int(sys.argv[1]))
"""


def start_worker(run: Any, home: Path) -> subprocess.Popen[bytes]:
    at = connection.settings_dict
    url = f"postgresql://{at['USER']}@/{at['NAME']}?host={at['HOST']}" + (f"&port={at['PORT']}" if at["PORT"] else "")
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(run.pk)],
        cwd=ROOT,
        env={
            **os.environ,
            "DATABASE_URL": url,
            "PENSTOCK_HOME": str(home),
            "PENSTOCK_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "DJANGO_SETTINGS_MODULE": "penstock.settings",
            "PYTHONPATH": f"{ROOT / 'platform'}{os.pathsep}{ROOT}",
        },
    )


@pytest.fixture
def tiny_source(starter_store: Path, tmp_path: Path) -> Path:
    """A Llama of two thin layers that never ends by itself, with the starter model's tokenizer: loads in no time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=None))
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text((starter_store / "tokenizer.json").read_text())
    template = json.loads((starter_store / "tokenizer_settings.json").read_text())["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_a_killed_worker_repeats_no_finished_item(
    make_pilot: Any, people: Any, upload: Any, item_line: Any, home: Path, tiny_source: Path
) -> None:
    """Through transformers, in worker processes of their own, the first of them ended by SIGKILL."""
    from inference.weights.sources import open_source

    count = 12
    lines = [item_line(number, max_tokens=64) for number in range(1, count + 1)]
    pilot = make_pilot(items=count, items_file=upload(lines))
    release = pilot.task.model_release
    release.source_path, release.source_digest = str(tiny_source), open_source(tiny_source).digest()
    release.save()
    run = start_baseline(user=people.pilot_manager, pilot=pilot)
    worker = start_worker(run, home)
    while not run.items.exists():
        assert worker.poll() is None, "the worker ended before it could be killed"
        time.sleep(0.01)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    finished = dict(run.items.values_list("custom_id", "duration_seconds"))
    assert 0 < len(finished) < count
    die(run)
    assert start_worker(run, home).wait() == 0
    run.refresh_from_db()
    assert run.status == BaselineRun.Status.COMPLETED, run.error_message
    after = dict(run.items.values_list("custom_id", "duration_seconds"))
    assert len(after) == count
    assert finished.items() <= after.items()
    assert run.method["interruptions"] == 1
    assert all(seconds > 0 for seconds in after.values())
    assert set(run.items.values_list("output_tokens", flat=True)) == {64}
    assert run.method["libraries"]["torch"].startswith("2.")

"""How a batch ran, on its page, its host's page and through REST: prediction beside what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from inference.memory.placement import Placement
from inference.planner.plan import Plan, Predicted
from inference.planner.workload import Workload
from penstock.serving.models import Batch, EngineHost, EngineRun, Shard

pytestmark = pytest.mark.django_db

PREDICTED = Predicted(
    prefill_tokens_per_s=400.0,
    decode_tokens_per_s=100.0,
    output_tokens_per_s=50.0,
    seconds=10.0,
    prefill_seconds=5.0,
    decode_seconds=5.0,
    step_seconds=1.0,
    longest_step_seconds=2.0,
    steps=10,
    peak_memory_bytes={"host": 10**9, "disk": 2 * 10**9},
    streamed_bytes_per_step=10**9,
    bound_by="disk",
)
PLAN = Plan(
    placement=Placement(frozenset({0, 2}), ring=3, readers=2, spilled=frozenset({1})),
    compute="int8",
    cache="int8",
    cache_pages=64,
    max_batch=8,
    token_budget=512,
    memory_bytes=10**9,
    workload=Workload.uniform(100, 64, 16),
    predicted=PREDICTED,
)


@pytest.fixture
def run(world: Any) -> EngineRun:
    now = timezone.now()
    EngineHost.objects.create(
        name="night-host",
        url="http://127.0.0.1:1",
        facts={"processor": "A processor", "cores": 2, "threads": 2, "memory_bytes": 24 * 10**9, "devices": []},
        state={"status": "running", "engines": []},
        started_at=now,
        heartbeat_at=now,
    )
    made = EngineRun.objects.create(
        host="night-host",
        model_release=world.done.model_release,
        loaded_at=now,
        load_seconds=2.5,
        memory_bytes=10**9,
        plan=PLAN.as_dict(),
        measured={
            "steps": 10,
            "busy_seconds": 10.0,
            "output_tokens": 450,
            "output_tokens_per_s": 45.0,
            "prefill_tokens_per_s": 420.0,
            "decode_tokens_per_s": 80.0,
            "mean_batch_size": 7.5,
            "streamed_bytes": 9 * 10**9,
            "streamed_bytes_per_s": 1.2 * 10**9,
            "waited_seconds": 6.0,
            "fraction_of_limit": None,
            "bound_by": "disk",
        },
    )
    Shard.objects.create(batch=world.done, number=77, engine_run=made)
    return made


def text_of(response: Any) -> str:
    """The page's words, one blank between them."""
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


def test_a_batchs_page_sets_what_was_predicted_beside_what_came(
    run: EngineRun, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    page = text_of(as_person(people.operator).get(f"/batches/{world.done.pk}/"))
    assert "2 layers stay in memory, the others are read from disk in each step." in page
    assert "The cache of 1 layer lies on disk." in page
    assert re.search(r"Output, while decoding 100 80\.0 80%", page)
    assert "The disk: the engine waited for weights" in page
    assert "9.00 GB" in page and "60%" in page
    assert "Planned for prompts of 64 tokens and answers of 16, 8 sequences at a time" in page


def test_a_model_that_fits_whole_shows_what_its_steps_should_have_taken(
    run: EngineRun, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    predicted = {
        "busy_seconds": 8.0,
        "output_tokens_per_s": 56.25,
        "prefill_tokens_per_s": 400.0,
        "decode_tokens_per_s": 160.0,
    }
    EngineRun.objects.update(plan=None, measured={**run.measured, "predicted": predicted}, ended_at=timezone.now())
    client = as_person(people.operator)
    page = text_of(client.get(f"/batches/{world.done.pk}/"))
    assert re.search(r"Predicted for these steps Measured Measured / predicted Prompts 400 420 105%", page)
    assert re.search(r"Output, while decoding 160 80\.0 50%", page)
    assert re.search(r"Predicted for these steps 8\.00 s ?, from how long .* they took 10\.0 s", page)
    client.post("/language/", {"language": "zh-hant"})
    assert "對這些步驟的預測" in text_of(client.get(f"/batches/{world.done.pk}/"))


def test_a_model_that_fits_whole_shows_no_prediction_that_nobody_made(
    run: EngineRun, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    EngineRun.objects.update(plan=None)
    page = text_of(as_person(people.operator).get(f"/batches/{world.done.pk}/"))
    assert "It fits whole, so no plan was needed." in page and "for these steps" not in page
    assert "Predicted by the plan" not in page
    assert re.search(r"Tokens a second Measured so far Prompts 420 Output, while decoding 80\.0", page)


def test_a_batchs_page_shows_its_own_time_on_the_engine_with_charts(
    run: EngineRun, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    now = timezone.now()
    world.done.runs.create(
        engine_run=run,
        first_step=7,
        began_at=now,
        ended_at=now,
        measured={
            **run.measured,
            "decode_tokens_per_s": 110.0,
            "bound_by": "overhead",
            "steps_left_out": 0,
            "shares": {"disk": 0.25, "memory": 0.5, "arithmetic": 0.125, "idle": 0.0, "other": 0.125},
            "batch_size_over_time": [[0.0, 8.0], [1.5, 4.0]],
        },
    )
    client = as_person(people.operator)
    page = client.get(f"/batches/{world.done.pk}/").content.decode()
    text = text_of(client.get(f"/batches/{world.done.pk}/"))
    assert re.search(r"Output, while decoding 100 110 110%", text)
    assert "while it held rows of this batch" in text and "since it was loaded" not in text
    assert "Overhead: the work between the large products" in text
    assert re.search(r"From, s Sequences a step 0\.00 8\.00 1\.50 4\.00", text)
    assert re.search(r"waiting for the disk 25\S*% reading memory 50\S*% arithmetic 12\.5\S*%", text)
    figures = {
        key: json.loads(value)
        for key, value in re.findall(r'<script id="(chart-[a-z-]+)-\d+" type="application/json">(.*?)</script>', page)
    }
    assert figures["chart-batch-size"]["data"][0]["y"] == [8.0, 4.0]
    assert sum(part["x"][0] for part in figures["chart-time"]["data"]) == 100
    client.post("/language/", {"language": "zh-hant"})
    assert "時間花在哪裡？" in text_of(client.get(f"/batches/{world.done.pk}/"))
    (told,) = client.get(f"/api/batches/{world.done.pk}/").json()["runs"]
    assert (told["engine_run"], told["measured"]["decode_tokens_per_s"]) == (run.pk, 110.0)


def test_the_hosts_page_shows_the_machine_and_its_engines_in_both_languages(
    run: EngineRun, people: Any, as_person: Callable[[Any], Any]
) -> None:
    client = as_person(people.auditor)
    page = text_of(client.get("/hosts/night-host/"))
    assert "A processor" in page and "24.0 GB" in page and "45.0" in page
    client.post("/language/", {"language": "zh-hant"})
    assert "2 層留在記憶體中" in text_of(client.get("/hosts/night-host/"))
    assert client.get("/hosts/no-such-host/").status_code == 404


def test_a_batch_that_waits_for_its_model_says_which_host_loads_it(
    run: EngineRun, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    Batch.objects.filter(pk=world.done.pk).update(status="in_progress", completed_at=None)
    client = as_person(people.operator)
    page = f"/batches/{world.done.pk}/live/"
    assert "is loading" not in text_of(client.get(page))
    loading = {"status": "running", "engines": [], "loading": world.release.name, "memory_budget_bytes": 3 * 10**9}
    EngineHost.objects.update(state=loading)
    assert f"night-host is loading {world.release.name}." in text_of(client.get(page))
    shown = text_of(client.get("/hosts/night-host/"))
    assert f"loading {world.release.name} …" in shown and "3.00 GB of memory, all together" in shown
    assert f"loading {world.release.name} …" in text_of(client.get("/"))


def test_a_batch_whose_model_no_host_can_load_says_why(
    run: EngineRun, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    Batch.objects.filter(pk=world.done.pk).update(status="in_progress", completed_at=None)
    why = "28 bytes do not hold it; allow 56 bytes"
    EngineHost.objects.update(state={"status": "running", "engines": [], "trouble": {world.release.name: why}})
    client = as_person(people.operator)
    page = text_of(client.get(f"/batches/{world.done.pk}/live/"))
    assert f"night-host cannot load {world.release.name}: {why}." in page and "PENSTOCK_MEMORY_BUDGET" in page
    assert why in text_of(client.get("/hosts/night-host/"))
    Batch.objects.filter(pk=world.done.pk).update(status="completed")
    assert why not in text_of(client.get(f"/batches/{world.done.pk}/live/"))


def test_rest_gives_a_batchs_engine_runs_with_their_plans(
    run: EngineRun, world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    data = as_person(people.operator).get(f"/api/batches/{world.done.pk}/").json()
    (given,) = data["engine_runs"]
    assert Plan.from_dict(given["plan"]) == PLAN
    assert given["measured"]["decode_tokens_per_s"] == 80.0


def test_all_outputs_of_a_request_are_shown_on_its_page_and_through_rest(
    world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    row = world.request
    first = row.output_text
    row.choices = [
        {"index": 0, "text": first, "finish_reason": "stop"},
        {"index": 1, "text": "Another tea altogether.", "finish_reason": "length"},
    ]
    row.save()
    client = as_person(people.operator)
    page = text_of(client.get(f"/requests/{row.pk}/"))
    assert "Output 2 · length Another tea altogether." in page
    data = client.get(f"/api/requests/{row.pk}/").json()
    assert data["output_texts"] == [first, "Another tea altogether."]

"""A batch's page: while it runs, after it, what went wrong in it, and its evidence."""

import io
import re
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse

LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'


@pytest.fixture
def client(people: Any, as_person: Callable[[Any], Any]) -> Any:
    return as_person(people.operator)


def page_of(client: Any, batch: Any, name: str = "batch") -> Any:
    return client.get(reverse(f"dashboard:{name}", args=[batch.pk]))


def test_a_running_batch_asks_again_every_two_seconds(world: Any, client: Any) -> None:
    for name in ("batch", "batch-live"):
        answer = page_of(client, world.running, name)
        text = answer.content.decode()
        assert answer.status_code == 200
        assert f'hx-get="{reverse("dashboard:batch-live", args=[world.running.pk])}"' in text
        assert 'hx-trigger="every 2s"' in text
        assert 'aria-valuenow="1"' in text and 'aria-valuemax="4"' in text


def test_asking_stops_when_the_batch_is_over(world: Any, client: Any) -> None:
    answer = page_of(client, world.done, "batch-live")
    assert answer.status_code == 286  # htmx's word for: stop polling
    assert answer["HX-Refresh"] == "true"
    assert "hx-trigger" not in answer.content.decode()
    charts = page_of(client, world.done, "batch-charts")
    assert charts.status_code == 286
    assert "hx-trigger" not in charts.content.decode()
    assert 'hx-trigger="every' not in page_of(client, world.done).content.decode()


def test_the_news_for_a_screen_reader_changes_at_tenths_only(world: Any, client: Any) -> None:
    assert 'data-announce="20% done."' in page_of(client, world.running, "batch-live").content.decode()
    page = page_of(client, world.running).content.decode()
    assert 'id="announcement" class="visually-hidden" role="status" aria-live="polite"' in page


def test_errors_are_listed_by_row(world: Any, client: Any) -> None:
    page = page_of(client, world.done)
    text = page.content.decode()
    assert "prompt_too_long" in text
    assert "The prompt has 3,000 tokens." in text
    assert [row.line for row in page.context["row_errors"]] == [3]
    assert f"batch={world.done.pk}&amp;error_code=prompt_too_long" in text


def test_a_refused_file_lists_its_lines(world: Any, client: Any) -> None:
    text = page_of(client, world.failed).content.decode()
    assert "Why it did not start" in text
    assert "Line 2 is not JSON." in text
    assert "invalid_json_line" in text


def test_figures_are_those_of_the_summary(world: Any, client: Any) -> None:
    from penstock.telemetry.summary import summarize

    page = page_of(client, world.done)
    summary = summarize(world.done.requests.all())
    assert page.context["summary"] == summary
    assert summary.succeeded == 7 and summary.output_tokens == 140
    assert '<span class="figure">140</span>' in page.content.decode()


def test_every_chart_has_a_table_of_the_same_numbers(world: Any, client: Any) -> None:
    page = page_of(client, world.done)
    for name in ("throughput_chart", "cost_chart"):
        chart = page.context[name]
        assert len(chart.rows) == 60
        assert all(len(row) == len(chart.columns) for row in chart.rows)
        assert len(chart.figure["data"][0]["x"]) == 61


def test_the_evidence_verifies_and_the_page_says_what_was_checked(world: Any, client: Any) -> None:
    answer = client.post(reverse("dashboard:batch-verify", args=[world.done.pk]), headers={"hx-request": "true"})
    text = answer.content.decode()
    assert answer.context["result"].holds
    assert answer.context["result"].leaves == 8
    for said in ("Ed25519 signature", "8 leaves were hashed again", "inclusion of 8 leaves", "8 finished requests"):
        assert said in text, said
    assert "<html" not in text
    without_script = client.post(reverse("dashboard:batch-verify", args=[world.done.pk]))
    assert "<html" in without_script.content.decode()


@pytest.mark.parametrize(
    ("change", "said"),
    (
        ({"output_text": "Another text."}, "the stored output does not have the digest in its leaf"),
        ({"body": {"messages": [{"role": "user", "content": "Other"}]}}, "the stored prompt does not have the digest"),
        ({"output_tokens": 21}, "output_tokens differs from its leaf"),
        ({"valid": None}, "valid differs from its leaf"),
        ({"body": {}}, "the stored prompt does not have the digest"),
        ({"groups": {"language": "fr"}}, "groups_digest differs from its leaf"),
        ({"ttft_seconds": 0.001}, "ttft_seconds differs from its leaf"),
        ({"compute_seconds": 0.001}, "compute_seconds differs from its leaf"),
        ({"detected_language": "xx"}, "detected_language differs from its leaf"),
        ({"finished_at": "2026-01-01T00:00:00Z"}, "finished_at differs from its leaf"),
    ),
)
def test_a_changed_request_is_found_and_named(world: Any, client: Any, change: dict[str, Any], said: str) -> None:
    type(world.request).objects.filter(pk=world.request.pk).update(**change)
    answer = client.post(reverse("dashboard:batch-verify", args=[world.done.pk]))
    text = answer.content.decode()
    assert not answer.context["result"].holds
    assert "Not verified" in text
    assert world.request.pk in text and said in text


def test_a_changed_leaf_is_found_and_named(world: Any, client: Any) -> None:
    import pgtrigger

    from governance.ledger.models import Leaf

    leaf = Leaf.objects.get(kind="request.finished", subject=world.request.pk)
    with pgtrigger.ignore():
        changed = leaf.canonical.replace('"output_tokens":20', '"output_tokens":10')
        assert changed != leaf.canonical
        Leaf.objects.filter(pk=leaf.pk).update(canonical=changed)
    answer = client.post(reverse("dashboard:request-verify", args=[world.request.pk]))
    text = answer.content.decode()
    assert not answer.context["result"].holds
    assert f"Leaf {leaf.index}: its entry no longer has the hash" in text
    assert f"Leaf {leaf.index} is not in the tree whose head was signed" in text


def test_a_request_that_was_deleted_is_missed(world: Any, client: Any) -> None:
    from penstock.telemetry.models import Usage

    Usage.objects.filter(request=world.request).delete()
    world.request.delete()
    answer = client.post(reverse("dashboard:batch-verify", args=[world.done.pk]))
    assert not answer.context["result"].holds
    assert "has a leaf, but no finished request" in answer.content.decode()


@pytest.mark.parametrize("entry", ("[]", '{"payload": 1}'))
def test_a_leaf_changed_into_something_else_is_no_error_of_the_server(world: Any, client: Any, entry: str) -> None:
    import pgtrigger

    from governance.ledger.models import Leaf

    with pgtrigger.ignore():
        Leaf.objects.filter(kind="request.finished", subject=world.request.pk).update(canonical=entry)
    for url in (reverse("dashboard:request-verify", args=[world.request.pk]), reverse("dashboard:ledger-verify")):
        assert client.post(url).status_code == 200
    assert not client.post(reverse("dashboard:request-verify", args=[world.request.pk])).context["result"].holds


def test_a_tree_without_its_nodes_proves_nothing(world: Any, client: Any) -> None:
    import pgtrigger

    from governance.ledger.models import Node

    with pgtrigger.ignore():
        Node.objects.all().delete()
    answer = client.post(reverse("dashboard:batch-verify", args=[world.done.pk]))
    assert not answer.context["result"].holds
    assert "lacks nodes" in answer.content.decode()


def test_a_forged_head_is_found(world: Any, client: Any) -> None:
    import pgtrigger

    from governance.ledger.models import Checkpoint

    head = Checkpoint.objects.order_by("-size").first()
    assert head is not None
    with pgtrigger.ignore():
        Checkpoint.objects.filter(pk=head.pk).update(note=head.note.replace(f"\n{head.size}\n", f"\n{head.size + 1}\n"))
    answer = client.post(reverse("dashboard:batch-verify", args=[world.done.pk]))
    assert not answer.context["result"].holds
    assert "does not match the text" in answer.content.decode()


def test_a_finished_request_without_a_leaf_is_named(world: Any, client: Any, make_batch: Any) -> None:
    from django.utils import timezone

    batch = make_batch(world.task, "secretive", rows=1)
    row = batch.requests.get()
    type(row).objects.filter(pk=row.pk).update(status="succeeded", finished_at=timezone.now())
    answer = client.post(reverse("dashboard:batch-verify", args=[batch.pk]))
    assert f"{row.pk} is finished and has no leaf." in answer.content.decode()


def test_what_is_not_signed_yet_is_no_fault(world: Any, client: Any, finish: Any) -> None:
    finish(world.running)
    answer = client.post(reverse("dashboard:batch-verify", args=[world.running.pk]))
    assert answer.context["result"].holds
    assert "3 requests wait for their leaves" in answer.content.decode()


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous")
def test_a_file_is_uploaded_and_started(world: Any, people: Any, client: Any) -> None:
    from penstock.serving.models import Batch

    upload = SimpleUploadedFile("winter.jsonl", LINE)
    answer = client.post("/new/batch/", {"task": world.task.name, "file": upload, "description": "Winter"})
    batch = Batch.objects.get(input_file__filename="winter.jsonl")
    assert answer["Location"] == reverse("dashboard:batch", args=[batch.pk])
    assert batch.task == world.task
    assert batch.metadata == {"task": world.task.name, "description": "Winter"}
    content = b"".join(client.get(reverse("dashboard:file", args=[batch.input_file.pk])))
    assert content == LINE


def test_problems_of_an_upload_stand_beside_their_fields(world: Any, client: Any) -> None:
    empty = client.post("/new/batch/", {"task": world.task.name})
    assert empty.status_code == 400
    assert empty.context["form"].errors["file"]
    upload = SimpleUploadedFile("winter.jsonl", LINE)
    for name in (world.draft.name, world.foreign_task.name, "no-such-task"):
        upload.seek(0)
        answer = client.post("/new/batch/", {"task": name, "file": upload})
        assert answer.context["form"].errors["task"], name
    nothing = SimpleUploadedFile("nothing.jsonl", b"")
    assert client.post("/new/batch/", {"task": world.task.name, "file": nothing}).context["form"].errors["file"]


def test_a_file_past_the_limit_is_refused_beside_its_field(world: Any, client: Any, monkeypatch: Any) -> None:
    from penstock.config import config

    monkeypatch.setattr(config(), "max_file_bytes", 10)
    upload = SimpleUploadedFile("winter.jsonl", LINE)
    answer = client.post("/new/batch/", {"task": world.task.name, "file": upload})
    assert "larger than the 10 bytes" in str(answer.context["form"].errors["file"])


def test_cancelling_asks_first(world: Any, client: Any) -> None:
    url = reverse("dashboard:batch-cancel", args=[world.running.pk])
    asked = client.get(url)
    assert "3 requests have not started" in asked.content.decode()
    world.running.refresh_from_db()
    assert world.running.status == "in_progress"
    assert client.post(url)["Location"] == reverse("dashboard:batch", args=[world.running.pk])
    world.running.refresh_from_db()
    assert world.running.status == "cancelling"


def test_what_cannot_be_cancelled_says_why(world: Any, client: Any) -> None:
    answer = client.post(reverse("dashboard:batch-cancel", args=[world.done.pk]))
    assert answer.status_code == 400
    assert "cannot be cancelled any more" in answer.content.decode()


def test_the_list_filters(world: Any, client: Any) -> None:
    def found(query: str) -> list[str]:
        return [batch.pk for batch, _progress in client.get(f"/batches/?{query}").context["rows"]]

    assert sorted(found("")) == ["batch_done", "batch_failed", "batch_running"]
    assert found("status=unfinished") == ["batch_running"]
    assert found("status=completed") == ["batch_done"]
    assert found(f"task={world.draft.name}") == []
    assert found("status=nonsense") == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous")
def test_the_exported_bundle_verifies(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    client = as_person(people.auditor)
    answer = client.post(reverse("dashboard:batch-export", args=[world.done.pk]))
    assert answer.status_code == 200
    assert answer["Content-Type"] == "application/zip"
    content = b"".join(answer)
    assert len(content) == int(answer["Content-Length"])
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    assert any(name.endswith("requests.csv") for name in names)


def test_the_terminal_tells_a_batchs_figures_with_names_and_units(world: Any) -> None:
    from penstock.operations.batch_run import summary_rows

    told = {str(what): value for what, value in summary_rows(world.done)}
    assert told["Status"] == "Completed"
    assert told["Requests"] == f"{world.done.requests.count():,}"
    assert str(told["Throughput"]).endswith(" tok/s")
    assert re.fullmatch(r"[\d.,]+ [A-Z]{3}", str(told["Per 1,000 output tokens"])), "no more digits than a person reads"

"""A request for embeddings on its page and through REST: how many vectors, of what, and their digest; no numbers."""

import struct
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from penstock.serving.completion import Result, record_results
from penstock.serving.models import Request
from penstock.serving.vectors import Vectors

pytestmark = pytest.mark.django_db


@pytest.fixture
def embedded(world: Any, make_batch: Callable[..., Any]) -> Request:
    """A finished request with two vectors of three numbers."""
    batch = make_batch(world.task, "vectors", rows=1)
    batch.requests.update(endpoint="/v1/embeddings", body={"model": world.task.name, "input": ["Tea", "茶 <b>"]})
    (row,) = batch.requests.all()
    data = struct.pack("<6f", 0.5, -0.25, 0.125, 1.0, 0.0, -1.0)
    result = Result(
        request_id=row.pk,
        status=Request.Status.SUCCEEDED,
        finished_at=timezone.now(),
        http_status=200,
        prompt_tokens=4,
        compute_seconds=0.5,
        vectors=Vectors(2, 3, data),
    )
    (finished,) = record_results([result])
    return finished


def test_the_page_tells_of_vectors_and_their_digest_in_both_languages(
    embedded: Request, people: Any, as_person: Callable[[Any], Any]
) -> None:
    client = as_person(people.operator)
    page = client.get(f"/requests/{embedded.pk}/").content.decode()
    assert "2 vectors of 3 dimensions." in page and embedded.output_digest in page
    assert "Text 2" in page and "茶 &lt;b&gt;" in page
    assert "0.125" not in page
    client.post("/language/", {"language": "zh-hant"})
    assert "2 個 3 維的向量" in client.get(f"/requests/{embedded.pk}/").content.decode()
    assert as_person(people.outsider).get(f"/requests/{embedded.pk}/").status_code == 404


def test_the_page_says_where_the_numbers_are(embedded: Request, people: Any, as_person: Callable[[Any], Any]) -> None:
    client = as_person(people.operator)
    assert "output file holds the numbers" in client.get(f"/requests/{embedded.pk}/").content.decode()
    Request.objects.filter(pk=embedded.pk).update(batch=None, shard=None)
    page = client.get(f"/requests/{embedded.pk}/").content.decode()
    assert "The answer held the numbers" in page and "output file" not in page


def test_many_texts_are_shown_in_part(embedded: Request, people: Any, as_person: Callable[[Any], Any]) -> None:
    embedded.body = {**embedded.body, "input": [[number, 7] for number in range(23)]}
    embedded.save()
    page = as_person(people.operator).get(f"/requests/{embedded.pk}/").content.decode()
    assert "[19, 7]" in page and "[20, 7]" not in page and "3 further texts" in page


def test_rest_tells_the_same(embedded: Request, people: Any, as_person: Callable[[Any], Any]) -> None:
    told = as_person(people.operator).get(f"/api/requests/{embedded.pk}/").json()
    assert told["embedding"] == {"count": 2, "dimensions": 3}
    assert (told["output_text"], told["output_digest"]) == ("", embedded.output_digest)


def test_a_file_whose_first_line_asks_for_embeddings_makes_a_batch_of_them(
    world: Any, people: Any, as_person: Callable[[Any], Any]
) -> None:
    from django.core.files.uploadedfile import SimpleUploadedFile

    from penstock.serving.models import Batch

    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}\n'
    client = as_person(people.operator)
    before = set(Batch.objects.values_list("pk", flat=True))
    for content, endpoint in (
        (line, "/v1/embeddings"),
        (line.replace(b"embeddings", b"nothing"), "/v1/chat/completions"),
    ):
        upload = SimpleUploadedFile("texts.jsonl", content)
        client.post("/new/batch/", {"task": world.task.name, "file": upload})
        (batch,) = Batch.objects.exclude(pk__in=before)
        assert batch.endpoint == endpoint
        before.add(batch.pk)

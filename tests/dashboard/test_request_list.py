"""The list of requests: every figure leads to one setting of its filters."""

import base64
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def client(people: Any, as_person: Callable[[Any], Any]) -> Any:
    return as_person(people.auditor)


def test_filters_find_what_a_query_finds(world: Any, client: Any) -> None:
    def count(query: str) -> int:
        return int(client.get(f"/requests/?{query}").context["count"])

    assert count("") == 12
    assert count("batch=batch_done") == 8
    assert count("batch=batch_done&status=succeeded") == 7
    assert count("batch=batch_done&status=errors") == 1
    assert count("status=finished") == 9
    assert count("error_code=prompt_too_long") == 1
    assert count("batch=batch_done&group=language:zh-Hant") == 4
    # English texts for the four rows in Chinese are not valid; of the four in English one failed.
    assert count("batch=batch_done&valid=yes") == 3
    assert count("batch=batch_done&valid=no") == 4
    assert count("batch=batch_done&valid=no&group=language:zh-Hant") == 4
    assert count("task=descriptions&days=30") == 9
    assert count("since=2000-01-01T00:00:00Z&until=2001-01-01T00:00:00Z") == 0
    assert count("since=2000-01-01T00:00:00%2B00:00") == 9
    assert count("release=tiny-4bit") == 12
    assert count("release=other") == 0


@pytest.mark.parametrize(
    "query", ("status=nonsense", "group=language", "days=many", "since=yesterday", "valid=perhaps", "task=foreign-task")
)
def test_a_filter_that_makes_no_sense_says_so_and_shows_nothing(world: Any, client: Any, query: str) -> None:
    answer = client.get(f"/requests/?{query}")
    assert answer.status_code == 400
    assert answer.context["count"] == 0
    assert answer.context["form"].errors


@pytest.mark.parametrize("query", ("", "batch=batch_long"))
def test_paging_shows_every_row_once(world: Any, client: Any, make_batch: Any, monkeypatch: Any, query: str) -> None:
    from penstock.serving.models import Request

    make_batch(world.task, "long", rows=120)
    seen: list[str] = []
    link = query
    for _page in range(10):
        page = client.get(f"/requests/?{link}").context["page"]
        seen += [row.pk for row in page.rows]
        link = page.further
        if not link:
            break
    rows = Request.objects.filter(batch_id="batch_long") if query else Request.objects.all()
    assert len(seen) == len(set(seen)) == rows.count()
    if query:
        assert seen == [f"batch_req_long_{line:04d}" for line in range(1, 121)]


@pytest.mark.parametrize(
    "cursor",
    (
        "x",
        "%00",
        "é",
        base64.urlsafe_b64encode(b"2026-11-30|r").decode(),
        base64.urlsafe_b64encode(b"a|b\x00").decode(),
    ),
)
def test_a_broken_cursor_gives_the_first_page(world: Any, client: Any, cursor: str) -> None:
    answer = client.get("/requests/", {"after": cursor})
    assert answer.status_code == 200
    assert len(answer.context["page"].rows) == 12


def test_a_nul_byte_in_a_filter_finds_nothing_and_breaks_nothing(world: Any, client: Any) -> None:
    assert client.get("/requests/?batch=%00").status_code in (200, 400)
    assert client.get("/requests/?group=a:%00").status_code in (200, 400)


def test_a_request_shows_its_place_in_the_ledger(world: Any, client: Any) -> None:
    from governance.ledger import selectors, tree

    page = client.get(f"/requests/{world.request.pk}/")
    context = page.context
    proof = [bytes.fromhex(node) for node in context["proof"]]
    head = context["checkpoint"]
    assert tree.verify_inclusion(
        bytes.fromhex(context["leaf_hash"]), context["leaf"].index, head.size, proof, bytes(head.root)
    )
    assert selectors.tree_size() == head.size
    assert world.request.prompt_digest in page.content.decode()


def test_a_request_without_usage_or_leaf_has_a_page(world: Any, client: Any) -> None:
    waiting = world.running.requests.get(line=4)
    text = client.get(f"/requests/{waiting.pk}/").content.decode()
    assert "not in the tree yet" in text
    assert 'title="No data"' in text


@pytest.mark.parametrize("address", ("/batches/%00/", "/requests/%00/", "/files/%00/", "/settings/people/%00/role/"))
def test_an_address_that_the_database_cannot_compare_leads_nowhere(
    world: Any, people: Any, as_person: Any, address: str
) -> None:
    assert as_person(people.operator).get(address).status_code == 404

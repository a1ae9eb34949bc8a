"""The first page tells what the engines of each host have done."""

from typing import Any

import pytest

pytestmark = pytest.mark.django_db


def test_the_first_page_tells_each_engines_figures(people: Any, client: Any) -> None:
    from django.utils import timezone

    from penstock.serving.models import EngineHost

    engine = {"release": "tea", "steps": 3, "mean_batch_size": 12.34, "prefix_hit_tokens": 1204, "preemptions": 2}
    EngineHost.objects.create(
        name="host",
        url="http://127.0.0.1:1",
        started_at=timezone.now(),
        heartbeat_at=timezone.now(),
        state={"status": "running", "engines": [engine]},
    )
    client.force_login(people.operator)

    page = client.get("/").content.decode()

    assert "tea: 12.3 sequences a step on average; 1,204 prompt tokens found in the cache; 2 preemptions" in page

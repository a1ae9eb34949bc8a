"""Pilots on their pages."""

import json
from typing import Any

from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse


def lines(count: int) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"item-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "descriptions", "messages": [{"role": "user", "content": "Say hello."}]},
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )


def form(**changes: Any) -> dict[str, Any]:
    return {
        "task": "descriptions",
        "name": "spring",
        "title": "Spring",
        "sample_items": 2,
        "items_per_month": 1000,
        "introduction_cost": "500",
        "discount_percent": "7.5",
        "trial_days": 90,
        "starts_on": "2026-12-01",
        **changes,
    }


def test_a_pilot_is_planned_over_an_uploaded_file(world: Any, people: Any, as_person: Any) -> None:
    from penstock.pilots.models import Pilot

    upload = SimpleUploadedFile("items.jsonl", lines(3))
    answer = as_person(people.pilot_manager).post("/new/pilot/", form(upload=upload))
    assert answer.status_code == 302, answer.context["form"].errors
    pilot = Pilot.objects.get(name="spring")
    assert (pilot.sample_items, pilot.items_per_month, str(pilot.discount_rate)) == (2, 1000, "0.0750")


def test_problems_stand_beside_their_fields_and_leave_no_file(world: Any, people: Any, as_person: Any) -> None:
    from penstock.serving.models import File

    client = as_person(people.pilot_manager)
    files = File.objects.count()
    assert "items_file" in client.post("/new/pilot/", form()).context["form"].errors
    broken = SimpleUploadedFile("items.jsonl", b"{broken\n")
    assert "items_file" in client.post("/new/pilot/", form(upload=broken)).context["form"].errors
    taken = SimpleUploadedFile("items.jsonl", lines(2))
    assert "name" in client.post("/new/pilot/", form(name=world.pilot.name, upload=taken)).context["form"].errors
    assert File.objects.count() == files


def test_a_pilot_without_measurements_says_so(world: Any, people: Any, as_person: Any) -> None:
    page = as_person(people.auditor).get(reverse("dashboard:pilot", args=[world.pilot.name]))
    text = page.content.decode()
    assert "The baseline has not been measured yet." in text
    assert page.context["acts"] == []
    assert 'hx-trigger="every 2s"' not in text


def test_measuring_is_followed_until_nothing_moves(world: Any, people: Any, as_person: Any) -> None:
    from penstock.pilots.models import BaselineRun

    client = as_person(people.auditor)
    url = reverse("dashboard:pilot-live", args=[world.pilot.name])
    run = BaselineRun.objects.create(pilot=world.pilot, status="running")
    moving = client.get(url)
    assert moving.status_code == 200
    assert 'hx-trigger="every 2s"' in moving.content.decode()
    BaselineRun.objects.filter(pk=run.pk).update(status="failed", error_message="out of memory")
    over = client.get(url)
    assert (over.status_code, over["HX-Refresh"]) == (286, "true")
    assert "hx-trigger" not in over.content.decode()
    assert "out of memory" in over.content.decode()


def test_a_decision_needs_its_reason_and_its_figures(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.pilot_manager)
    url = reverse("dashboard:pilot-act", args=[world.pilot.name, "stop"])
    assert "reason" in client.post(url, {"decision": "stop", "reason": ""}).context["form"].errors
    too_soon = client.post(url, {"decision": "scale", "reason": "it looks good"})
    assert too_soon.status_code == 400
    world.pilot.refresh_from_db()
    assert world.pilot.status == "planned"
    client.post(url, {"decision": "stop", "reason": "no budget"})
    world.pilot.refresh_from_db()
    assert (world.pilot.status, world.pilot.decision, world.pilot.decided_by) == ("decided", "stop", "pilot")


def test_assumptions_are_edited(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.pilot_manager)
    url = reverse("dashboard:pilot-edit", args=[world.pilot.name])
    typed = form(items_per_month=777)
    assert client.post(url, typed).status_code == 302
    world.pilot.refresh_from_db()
    assert world.pilot.items_per_month == 777
    assert "items_per_month" in client.post(url, {**typed, "items_per_month": "0"}).context["form"].errors


def test_the_report_is_a_pdf_in_the_language_asked_for(world: Any, people: Any, as_person: Any) -> None:
    client = as_person(people.auditor)
    for language in ("en", "zh-hant"):
        answer = client.get(reverse("dashboard:pilot-report", args=[world.pilot.name, language]))
        assert answer.status_code == 200
        assert answer.content.startswith(b"%PDF-")
    assert client.get(reverse("dashboard:pilot-report", args=[world.pilot.name, "tlh"])).status_code == 404

"""The pages in a real browser: charts under the policy, live progress, verification, language and theme."""

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
    pytest.mark.django_db(transaction=True),
]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]


@pytest.fixture
def server(transactional_db: None, static_files: Any) -> Iterator[str]:
    """uvicorn with the ASGI application, in a thread, on the test's database."""
    import uvicorn
    from django.core.asgi import get_asgi_application

    # A new one: the static files are looked up when an application is made, and another test may have made one before
    # they were there.
    application = get_asgi_application()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(web.serve(sockets=[listening])), daemon=True)
    thread.start()
    while not web.started and thread.is_alive():
        thread.join(0.01)
    assert web.started
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    web.should_exit = True
    thread.join()


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def page(server: str, world: Any, complaints: list[str]) -> Iterator[Any]:
    """Signed in as the operator; what the browser complains about is collected, requests elsewhere are refused."""
    from django.db import connections
    from playwright.sync_api import sync_playwright

    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # playwright's own loop runs in this thread
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(server) else complaints.append(sent.url))
        page.goto(f"{server}/sign-in/")
        page.fill("[name=username]", "operator")
        page.fill("[name=password]", "a long pass phrase 1")
        with page.expect_navigation():
            page.click("main button[type=submit]")
        page.server = server
        yield page
        browser.close()
        connections.close_all()  # those that were opened under playwright's loop
    os.environ.pop("DJANGO_ALLOW_ASYNC_UNSAFE")


def test_charts_are_drawn_under_the_policy(page: Any, world: Any, complaints: list[str]) -> None:
    page.goto(f"{page.server}/batches/{world.done.pk}/")
    page.wait_for_selector("#chart-throughput", state="attached")
    page.wait_for_selector(".plot .main-svg")
    assert page.locator(".plot path.js-line").count() == 2
    # The line has the style sheet's colour, which light-dark() makes: #0072b2 in the light theme.
    assert "rgb(0, 114, 178)" in page.locator(".plot path.js-line").first.get_attribute("style")
    assert complaints == []


def test_the_evidence_is_verified_in_place(page: Any, world: Any, complaints: list[str]) -> None:
    page.goto(f"{page.server}/batches/{world.done.pk}/")
    page.click("text=Verify now")
    page.wait_for_selector("#verification .note-success")
    assert "inclusion of 8 leaves" in page.inner_text("#verification")
    assert complaints == []


def test_progress_moves_and_stops_when_the_batch_is_over(page: Any, world: Any, finish: Any) -> None:
    from django.utils import timezone

    page.goto(f"{page.server}/batches/{world.running.pk}/")
    assert page.get_attribute("[role=progressbar]", "aria-valuenow") == "1"
    finish(world.running, upto=3)
    page.wait_for_selector('[role=progressbar][aria-valuenow="3"]')
    page.wait_for_function("document.getElementById('announcement').textContent.includes('70%')")
    now = timezone.now()
    finish(world.running)
    type(world.running).objects.filter(pk=world.running.pk).update(
        status="completed", finalizing_at=now, completed_at=now
    )
    page.wait_for_selector("#live:not([hx-get])")
    page.wait_for_load_state("networkidle")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.wait_for_timeout(2500)  # longer than the two seconds between questions
    assert sent == []


def test_language_and_theme_are_switched_without_a_flash(page: Any, complaints: list[str]) -> None:
    def background(theme: str) -> str:
        page.locator(f"form[action='/theme/'] button[value={theme}]").click()
        page.wait_for_selector(f"html[data-theme={theme}] main")  # the next page is there, not only asked for
        page.wait_for_load_state("load")
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.click("text=繁體中文")
    page.wait_for_selector("html[lang=zh-Hant] main")
    assert background("dark") != background("light")
    assert complaints == []


@pytest.mark.parametrize("width", (360, 768, 1280))
def test_no_page_is_wider_than_its_window(page: Any, world: Any, complaints: list[str], width: int) -> None:
    from test_pages_by_person import LISTS, THINGS, address

    page.set_viewport_size({"width": width, "height": 800})
    for name in (*LISTS, *THINGS):
        if name in ("person-new", "person-team", "overview-batches"):
            continue  # the administrator's; and a part of a page, which is no page
        page.goto(f"{page.server}{address(name, world)}", wait_until="load")
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, (name, wider)


def test_the_keyboard_reaches_the_content_and_the_menu(page: Any) -> None:
    page.goto(f"{page.server}/tasks/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(f"{page.server}/tasks/")
    assert not page.is_visible("nav.menu")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.is_visible("nav.menu")
    assert page.get_attribute("[data-toggle-menu]", "aria-expanded") == "true"

"""What pages may load: our own files, collected; no inline script anywhere."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from test_pages_by_person import LISTS, THINGS, address


class Page(HTMLParser):
    """Scripts, references and event attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.loaded: list[str] = []
        self.events: list[str] = []
        self.ids: list[str] = []
        self.described: list[str] = []
        self.tables_without_caption = 0
        self._caption_open: list[bool] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "script":
            self.scripts.append(values)
        for name in ("src", "href"):
            if tag in ("script", "link", "img") and values.get(name):
                self.loaded.append(str(values[name]))
        self.events += [name for name in values if name.startswith("on")]
        if values.get("id"):
            self.ids.append(str(values["id"]))
        for name in ("aria-labelledby", "aria-describedby", "aria-controls", "for"):
            self.described += str(values.get(name) or "").split()
        if tag == "table":
            self._caption_open.append(False)
        if tag == "caption":
            self._caption_open[-1] = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and not self._caption_open.pop():
            self.tables_without_caption += 1


def test_the_policy_allows_scripts_from_our_own_files_alone(client: Any, db: None) -> None:
    policy = client.get("/sign-in/")["Content-Security-Policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["script-src"] == "'self'"
    assert directives["default-src"] == "'self'"
    assert directives["object-src"] == "'none'"
    assert directives["frame-ancestors"] == "'none'"


def test_pages_hold_to_the_policy_and_miss_no_file(
    world: Any, people: Any, as_person: Callable[[Any], Any], static_files: Path
) -> None:
    client = as_person(people.administrator)
    for name in (*LISTS, *THINGS):
        page = Page(client.get(address(name, world)).content.decode())
        for script in page.scripts:
            assert script.get("src") or script.get("type") == "application/json", (name, script)
        assert not page.events, name
        for reference in page.loaded:
            assert reference.startswith("/static/"), (name, reference)
            assert (static_files / reference.removeprefix("/static/")).exists(), (name, reference)
        assert page.tables_without_caption == 0, name
        assert len(page.ids) == len(set(page.ids)), (name, [key for key in page.ids if page.ids.count(key) > 1])
        assert set(page.described) <= set(page.ids), (name, set(page.described) - set(page.ids))


def test_no_page_claims_compliance_or_gives_a_score(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    client = as_person(people.administrator)
    for name in (*LISTS, *THINGS):
        text = client.get(address(name, world)).content.decode()
        visible = re.sub(r"<script.*?</script>", "", text, flags=re.S)
        assert not re.search(r"\bcompliant\b|\bcompliance score\b", visible, flags=re.I), name


def test_plotlys_bundle_is_the_packages_own(static_files: Path) -> None:
    from plotly.offline import get_plotlyjs

    assert (static_files / "vendor" / "plotly.min.js").read_text() == get_plotlyjs()


def test_a_prompt_cannot_bring_markup_of_its_own(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    page = as_person(people.operator).get(address("request", world)).content.decode()
    assert "Describe product 1 &lt;b&gt;" in page

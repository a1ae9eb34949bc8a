"""Signing in, the language and the theme."""

from collections.abc import Callable
from typing import Any

import pytest


def test_a_person_signs_in_and_out(client: Any, people: Any) -> None:
    wrong = client.post("/sign-in/", {"username": "operator", "password": "wrong"})
    assert wrong.status_code == 200
    assert b'role="alert"' in wrong.content
    answer = client.post("/sign-in/", {"username": "operator", "password": "a long pass phrase 1", "next": "/tasks/"})
    assert answer["Location"] == "/tasks/"
    assert client.get("/tasks/").status_code == 200
    assert client.get("/sign-out/").status_code == 405
    client.post("/sign-out/")
    assert client.get("/tasks/").status_code == 302


def test_signing_in_never_leads_to_another_site(client: Any, people: Any) -> None:
    answer = client.post(
        "/sign-in/", {"username": "operator", "password": "a long pass phrase 1", "next": "https://elsewhere.example/"}
    )
    assert answer["Location"] == "/"


def test_the_language_is_switched_and_kept(people: Any, as_person: Callable[[Any], Any]) -> None:
    client = as_person(people.operator)
    assert '<html lang="en"' in client.get("/").content.decode()
    answer = client.post("/language/", {"language": "zh-hant", "next": "/tasks/"})
    assert answer["Location"] == "/tasks/"
    page = client.get("/tasks/").content.decode()
    assert '<html lang="zh-Hant"' in page
    client.post("/language/", {"language": "en", "next": "/"})
    assert '<html lang="en"' in client.get("/").content.decode()


def test_controls_are_told_in_the_chosen_language(world: Any, people: Any, as_person: Callable[[Any], Any]) -> None:
    from governance.catalogs.loader import get_catalog

    control = get_catalog("iso-iec-42001-2023").controls[0]
    client = as_person(people.operator)
    client.post("/language/", {"language": "zh-hant"})
    assert control.title.zh_hant in client.get("/controls/iso-iec-42001-2023/").content.decode()


def test_a_persons_own_language_comes_with_signing_in(client: Any, people: Any) -> None:
    people.operator.language = "zh-hant"
    people.operator.save()
    client.post("/sign-in/", {"username": "operator", "password": "a long pass phrase 1"})
    assert '<html lang="zh-Hant"' in client.get("/").content.decode()


@pytest.mark.parametrize(
    ("chosen", "shown"), (("dark", "dark"), ("light", "light"), ("auto", "auto"), ("neon", "auto"))
)
def test_the_page_comes_in_the_chosen_theme(client: Any, db: None, chosen: str, shown: str) -> None:
    answer = client.post("/theme/", {"theme": chosen, "next": "/sign-in/"})
    assert answer["Location"] == "/sign-in/"
    assert f'data-theme="{shown}"' in client.get("/sign-in/").content.decode()


def test_choosing_a_theme_never_leads_to_another_site(client: Any, db: None) -> None:
    assert client.post("/theme/", {"theme": "dark", "next": "//elsewhere.example/"})["Location"] == "/"

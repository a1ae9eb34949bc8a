import gettext
import threading
from pathlib import Path

import pytest

from penstock.operations import messages


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small house with one string in code, one in a template."""
    (tmp_path / "platform/penstock").mkdir(parents=True)
    (tmp_path / "governance").mkdir()
    (tmp_path / "templates").mkdir()
    (tmp_path / "platform/penstock/code.py").write_text('from x import gettext as _\nA = _("%(n)d rows") % {"n": 1}\n')
    (tmp_path / "templates/page.html").write_text("{% load i18n %}<p>{% translate 'Sign in' %}</p>")
    monkeypatch.setattr(messages, "ROOT", tmp_path)
    monkeypatch.setattr(messages, "LOCALES", tmp_path / "locale")
    return tmp_path


def translate(house: Path, **texts: str) -> None:
    path = messages.po_file("zh_Hant")
    content = path.read_text(encoding="utf-8")
    for number, (source, text) in enumerate(texts.items()):
        source = {"rows": "%(n)d rows", "sign_in": "Sign in"}[source]
        content = content.replace(f'msgid "{source}"\nmsgstr ""', f'msgid "{source}"\nmsgstr "{text}"')
        assert number < 2
    path.write_text(content, encoding="utf-8")


def test_strings_of_code_and_templates_are_collected(house: Path) -> None:
    messages.collect()
    content = messages.po_file("zh_Hant").read_text(encoding="utf-8")
    assert 'msgid "%(n)d rows"' in content
    assert 'msgid "Sign in"' in content


def test_an_untranslated_string_is_named(house: Path) -> None:
    messages.collect()
    translate(house, rows="%(n)d 列")
    assert messages.problems() == ["zh_Hant: 'Sign in' is not translated"]


def test_a_lost_placeholder_is_named(house: Path) -> None:
    messages.collect()
    translate(house, rows="很多列", sign_in="登入")
    assert len(messages.problems()) == 1
    assert "%(n)d" in messages.problems()[0]


def test_what_is_compiled_is_what_the_standard_library_reads(house: Path) -> None:
    messages.collect()
    translate(house, rows="%(n)d 列", sign_in="登入")
    assert messages.problems() == []
    messages.compile_all()
    with messages.po_file("zh_Hant").with_suffix(".mo").open("rb") as stream:
        assert gettext.GNUTranslations(stream).gettext("Sign in") == "登入"


def test_collecting_again_keeps_the_translations(house: Path) -> None:
    messages.collect()
    translate(house, rows="%(n)d 列", sign_in="登入")
    messages.collect()
    assert messages.problems() == []


def test_the_projects_own_strings_are_all_translated() -> None:
    assert messages.problems() == []


def test_a_program_that_starts_while_translations_are_compiled_reads_them_whole(house: Path) -> None:
    messages.collect()
    translate(house, rows="%(n)d 列", sign_in="登入")
    messages.compile_all()
    source, compiled = messages.po_file("zh_Hant"), messages.po_file("zh_Hant").with_suffix(".mo")
    done = threading.Event()

    def compile_again_and_again() -> None:
        while not done.is_set():
            source.touch()
            messages.compile_all()

    writer = threading.Thread(target=compile_again_and_again)
    writer.start()
    try:
        for _ in range(300):
            with compiled.open("rb") as stream:
                assert gettext.GNUTranslations(stream).gettext("Sign in") == "登入"
    finally:
        done.set()
        writer.join()
    assert [path.name for path in compiled.parent.iterdir() if path.name.startswith(".")] == []


def test_translations_that_are_up_to_date_are_not_written_again(house: Path) -> None:
    messages.collect()
    messages.compile_all()
    compiled = messages.po_file("zh_Hant").with_suffix(".mo")
    before = compiled.stat().st_ino
    messages.compile_all()
    assert compiled.stat().st_ino == before

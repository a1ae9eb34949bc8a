"""Translations, with Babel in the place of GNU gettext's programs, which a fresh machine need not have.

python -m penstock.operations.messages collect   strings of the code into locale/*/LC_MESSAGES/django.po
python -m penstock.operations.messages compile   .po files into the .mo files that Django reads
python -m penstock.operations.messages check     fails, naming them, if any string is new, missing or ill-formed
"""

import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parents[3]
LOCALES = ROOT / "locale"
SOURCES = ("platform/penstock", "governance", "templates")
LANGUAGES = ("zh_Hant",)
KEYWORDS: Any = {
    "_": None,
    "gettext": None,
    "gettext_lazy": None,
    "gettext_noop": None,
    "ngettext": (1, 2),
    "ngettext_lazy": (1, 2),
    "pgettext": ((1, "c"), 2),
    "pgettext_lazy": ((1, "c"), 2),
    "npgettext": ((1, "c"), 2, 3),
}
PLACEHOLDER = re.compile(r"%\([a-z_0-9]+\)[sdf]|%[sdf]|\{[a-z_0-9]*\}")


class TranslationsIncomplete(Exception):
    """Strings that a person would see untranslated; the message lists each with what is wrong with it."""


def sources() -> Iterator[Path]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".html", ".txt"} and "migrations" not in path.parts:
                yield path


def collected() -> Catalog:
    """Every marked string of the code and the templates."""
    from django.utils.translation.template import templatize

    catalog = Catalog(domain="django", project="Penstock", charset="utf-8", fuzzy=False)
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py":
            text = templatize(text, origin=str(path))
        origin = str(path.relative_to(ROOT))
        for _line, message, comments, context in extract(
            "python", io.BytesIO(text.encode()), keywords=KEYWORDS, comment_tags=("Translators:",)
        ):
            # No line numbers: they would change the file whenever the code moves.
            catalog.add(message, locations=[(origin, 0)], auto_comments=comments, context=context)
    return catalog


def po_file(language: str) -> Path:
    return LOCALES / language / "LC_MESSAGES" / "django.po"


def load(language: str) -> Catalog:
    path = po_file(language)
    if not path.exists():
        return Catalog(locale=language, domain="django", project="Penstock", charset="utf-8", fuzzy=False)
    with path.open("rb") as stream:
        return read_po(stream, locale=language, domain="django")


def collect() -> None:
    template = collected()
    for language in LANGUAGES:
        catalog = load(language)
        catalog.update(template, no_fuzzy_matching=True, update_header_comment=False)
        catalog.obsolete.clear()
        path = po_file(language)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = io.BytesIO()
        write_po(text, catalog, sort_output=True, width=120, include_lineno=False, omit_header=False)
        replace(path, text.getvalue())
        missing = sum(1 for message in catalog if message.id and not any(_strings(message.string)))
        print(f"{path.relative_to(ROOT)}: {len(catalog)} strings, {missing} to translate")  # noqa: T201


def compile_all() -> None:
    """Brings each .mo file up to its .po file. One that is not older is left alone."""
    for language in LANGUAGES:
        path = po_file(language)
        compiled = path.with_suffix(".mo")
        if not path.exists() or (compiled.exists() and compiled.stat().st_mtime_ns >= path.stat().st_mtime_ns):
            continue
        content = io.BytesIO()
        write_mo(content, load(language))
        replace(compiled, content.getvalue())


def replace(path: Path, content: bytes) -> None:
    """Writes aside and renames: a program that starts meanwhile reads the old file or the new one, never a part."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def _strings(value: str | tuple[str, ...] | list[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def problems() -> list[str]:
    """What a reader of each language would trip over: untranslated strings, and placeholders that got lost."""
    found: list[str] = []
    template = collected()
    for language in LANGUAGES:
        catalog = load(language)
        for message in template:
            if not message.id:
                continue
            ids = _strings(message.id)
            name = f"{language}: {ids[0]!r}"
            translated = catalog.get(ids[0], message.context)
            if translated is None or not translated.string or not all(_strings(translated.string)):
                found.append(f"{name} is not translated")
                continue
            if translated.fuzzy:
                found.append(f"{name} is marked fuzzy")
            # A plural may leave the number out of its singular: compare with the last form of each.
            wanted = sorted(PLACEHOLDER.findall(ids[-1]))
            for text in _strings(translated.string):
                if sorted(PLACEHOLDER.findall(text)) != wanted:
                    found.append(f"{name} has placeholders {wanted}, its translation {PLACEHOLDER.findall(text)}")
    return found


def check() -> None:
    found = problems()
    if found:
        raise TranslationsIncomplete("\n".join([*found, f"{len(found)} strings; run `make messages`, then translate"]))


if __name__ == "__main__":
    commands = {"collect": collect, "compile": compile_all, "check": check}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    try:
        commands[sys.argv[1]]()
    except TranslationsIncomplete as incomplete:
        sys.exit(str(incomplete))

"""The report of a pilot as PDF/A-2a (archivable) and PDF/UA-1 (accessible), in English or Traditional Chinese.

The template lays out, and knows no text: every string comes to it as JSON data, which Typst never reads as markup, so
nothing that a person typed can become code. The same pilot printed at the same moment gives the same bytes.
"""

import datetime as dt
import json
import unicodedata
from pathlib import Path
from typing import Any, Literal

import typst
from django.conf import settings
from django.utils import timezone, translation

from penstock.pilots.models import Pilot

TEMPLATE = Path(settings.ROOT) / "templates" / "reports" / "pilot.typ"
ARCHIVABLE: Literal["a-2a"] = "a-2a"
ACCESSIBLE: Literal["ua-1"] = "ua-1"
LANGUAGES = {"en": ("en", "gb"), "zh-hant": ("zh", "tw")}


class ReportError(Exception):
    """A report that cannot be made; says why."""


def report_pdf(*, pilot: Pilot, language: str, printed_at: dt.datetime | None = None) -> bytes:
    """The report in `language` (`en` or `zh-hant`, whatever its case). Raises ReportError."""
    # Here and not above: matplotlib takes a second to load, which only a report should wait for.
    from penstock.pilots.charts import FONT, font_folder, shown_codepoints
    from penstock.pilots.report_content import content

    chosen = language.lower().replace("_", "-")
    if chosen not in LANGUAGES:
        raise ReportError(f"language is {language!r}; one of {', '.join(LANGUAGES)} is expected")
    moment = (printed_at or timezone.now()).astimezone(dt.UTC).replace(microsecond=0)
    with translation.override(chosen):
        data = _showable(content(pilot, printed_at=moment), shown_codepoints())
    lang, region = LANGUAGES[chosen]
    data |= {"lang": lang, "region": region, "font": FONT}
    try:
        pdf: bytes = typst.compile(
            TEMPLATE,
            root=TEMPLATE.parent,
            font_paths=[font_folder()],
            ignore_system_fonts=True,
            format="pdf",
            sys_inputs={"data": json.dumps(data, ensure_ascii=False)},
            pdf_standards=[ARCHIVABLE, ACCESSIBLE],
            timestamp=moment,
        )
    except typst.TypstError as error:
        raise ReportError(f"the report of {pilot.name} cannot be laid out: {error}") from error
    return pdf


def _showable(value: Any, known: frozenset[int]) -> Any:
    """The same data with U+… in place of each character that the font lacks: an archive file must show all of its text,
    so Typst would refuse an emoji in a title."""
    if isinstance(value, str):
        return "".join(
            one if ord(one) in known or one == "\n" else f"[U+{ord(one):04X}]" if one.isprintable() else " "
            for one in unicodedata.normalize("NFC", value)
        )
    if isinstance(value, dict):
        return {key: item if key == "svg" else _showable(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_showable(item, known) for item in value]
    return value

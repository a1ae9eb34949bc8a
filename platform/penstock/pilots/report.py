"""The report of a pilot as PDF/A-2a (archivable) and PDF/UA-1 (accessible), in English or Traditional Chinese.

The template lays out, and knows no text: every string comes to it as JSON data, which Typst never reads as markup, so
nothing that a person typed can become code. The same pilot printed at the same moment gives the same bytes.
"""

import datetime as dt
import json
from pathlib import Path
from typing import Literal

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
    from penstock.pilots.charts import FONT, font_folder
    from penstock.pilots.report_content import content

    chosen = language.lower().replace("_", "-")
    if chosen not in LANGUAGES:
        raise ReportError(f"language is {language!r}; one of {', '.join(LANGUAGES)} is expected")
    moment = (printed_at or timezone.now()).astimezone(dt.UTC).replace(microsecond=0)
    with translation.override(chosen):
        data = content(pilot, printed_at=moment)
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

"""The control matrix and the Statement of Applicability as XLSX workbooks.

The same input gives the same bytes, so that a workbook's digest in a bundle can be checked. Text that a person typed
can never become a formula. Times are UTC (a cell cannot hold a zone).
"""

import datetime as dt
import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django.utils import timezone, translation
from django.utils.translation import gettext as _
from openpyxl import Workbook
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.styles import Alignment, Font, PatternFill
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.worksheet import Worksheet

from governance.catalogs.loader import Catalog, get_catalog
from governance.controls.coverage import (
    ControlCoverage,
    ControlState,
    EvidenceItem,
    Verdict,
    summarize,
)
from governance.controls.figures import threshold_text
from governance.controls.selectors import StatementRow
from governance.controls.services import row_digest

MEDIA_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"

MAX_CELL_CHARACTERS = 32_767  # Excel's own limit
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
ZIP_TIME = (1980, 1, 1, 0, 0, 0)

HEADER_FILL = PatternFill("solid", fgColor="1F3A4D")
HEADER_FONT = Font(bold=True, color="FFFFFF")
TOP = Alignment(vertical="top", wrap_text=True)
FILLS = {
    ControlState.LIVE: "E3F1EA",
    Verdict.WITHIN: "E3F1EA",
    Verdict.RECORDED: "E3F1EA",
    ControlState.OUTSIDE: "FBE3DD",
    Verdict.OUTSIDE: "FBE3DD",
    ControlState.STALE: "FBF1D5",
    Verdict.STALE: "FBF1D5",
}

Value = str | int | float | Decimal | dt.datetime | dt.date | None


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    width: int
    number_format: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A value that needs more than its column's format: a link (http or https only), a number format, a colour."""

    value: Value
    link: str = ""
    number_format: str | None = None
    fill: str | None = None


def control_matrix(
    coverage_by_catalog: Mapping[str, Sequence[ControlCoverage]],
    language: str,
    *,
    generated_at: dt.datetime | None = None,
) -> bytes:
    """One sheet a catalog, one row for each control and figure, and the counts of controls by state in front."""
    moment = generated_at or timezone.now()
    with translation.override(language):
        book = Workbook()
        catalogs = [get_catalog(catalog_id) for catalog_id in coverage_by_catalog]
        _about(book, _("Control matrix"), _matrix_notes(), catalogs, moment, language)
        _table(book, _("Summary"), _summary_columns(), _summary_rows(coverage_by_catalog, language), freeze="B2")
        for catalog in catalogs:
            rows = _matrix_rows(coverage_by_catalog[catalog.id], language)
            _table(book, catalog.title.in_language(language), _matrix_columns(), rows, freeze="C2")
        return _bytes(book, moment)


def statement_of_applicability(
    rows: Sequence[StatementRow], language: str, *, generated_at: dt.datetime | None = None
) -> bytes:
    """One sheet a catalog, one row a control, in the order of `rows`; undecided controls stand as undecided."""
    moment = generated_at or timezone.now()
    by_catalog: dict[str, list[StatementRow]] = {}
    for row in rows:
        by_catalog.setdefault(row.catalog_id, []).append(row)
    with translation.override(language):
        book = Workbook()
        catalogs = [get_catalog(catalog_id) for catalog_id in by_catalog]
        _about(book, _("Statement of Applicability"), _statement_notes(), catalogs, moment, language)
        for catalog in catalogs:
            _table(
                book,
                catalog.title.in_language(language),
                _statement_columns(),
                _statement_rows(by_catalog[catalog.id], language),
                freeze="C2",
            )
        return _bytes(book, moment)


def _matrix_notes() -> list[str]:
    return [
        _(
            "Each figure is one observation. No figure, and no number of them, says that a control is met; "
            "the counts are not a score."
        ),
        _("Controls without a figure need a document or a person."),
        _("Thresholds are the organization's own policy."),
    ]


def _statement_notes() -> list[str]:
    return [
        _("Decisions and justifications are the organization's; Penstock adds the evidence count and its date."),
        _("Each decision's digest stands in the ledger, so that a later change can be noticed."),
    ]


def _summary_columns() -> list[Column]:
    return [
        Column(_("Catalog"), 36),
        Column(_("Controls"), 12),
        *(Column(str(state.label), 22) for state in ControlState),
    ]


def _summary_rows(coverage_by_catalog: Mapping[str, Sequence[ControlCoverage]], language: str) -> Iterator[list[Cell]]:
    for catalog_id, covered in coverage_by_catalog.items():
        counts = summarize(covered)
        by_state = {
            ControlState.OUTSIDE: counts.outside_threshold,
            ControlState.LIVE: counts.live,
            ControlState.STALE: counts.stale,
            ControlState.NO_DATA: counts.no_data,
            ControlState.NOT_MAPPED: counts.not_mapped,
        }
        yield [
            Cell(get_catalog(catalog_id).title.in_language(language)),
            Cell(counts.total),
            *(Cell(by_state[state]) for state in ControlState),
        ]


def _matrix_columns() -> list[Column]:
    return [
        Column(_("Control"), 14),
        Column(_("Title"), 28),
        Column(_("Group"), 26),
        Column(_("Text"), 46),
        Column(_("State"), 20),
        Column(_("Figure"), 28),
        Column(_("Value"), 14, "General"),
        Column(_("Unit"), 12),
        Column(_("Threshold"), 14),
        Column(_("Verdict"), 16),
        Column(_("Records"), 11, "#,##0"),
        Column(_("Measured (UTC)"), 18, "yyyy-mm-dd hh:mm"),
        Column(_("Window start (UTC)"), 18, "yyyy-mm-dd hh:mm"),
        Column(_("Window end (UTC)"), 18, "yyyy-mm-dd hh:mm"),
        Column(_("Fresh for, hours"), 12),
        Column(_("What it shows"), 46),
        Column(_("What is missing"), 40),
        Column(_("An auditor would ask next"), 46),
        Column(_("Requests behind it"), 30),
    ]


def _matrix_rows(covered: Sequence[ControlCoverage], language: str) -> Iterator[list[Cell]]:
    for control in covered:
        head = [
            Cell(control.control.id),
            Cell(control.control.title.in_language(language)),
            Cell(" › ".join(group.title.in_language(language) for group in control.groups)),
            Cell(control.control.text.in_language(language)),
            Cell(str(control.state.label), fill=FILLS.get(control.state)),
        ]
        for item in control.items:
            yield [*head, *_evidence_cells(item, control.gap, language)]
        if not control.items:
            yield [*head, *[Cell(None)] * 11, Cell(control.gap), Cell(None), Cell(None)]


def _evidence_cells(item: EvidenceItem, gap: str, language: str) -> list[Cell]:
    measured = item.measurement
    silent = item.verdict == Verdict.NO_DATA or measured is None
    return [
        Cell(item.definition.title.in_language(language)),
        Cell(
            None if silent or measured is None else measured.value,
            number_format="0.00%" if item.definition.unit == "ratio" else None,
        ),
        Cell(_unit_label(measured.unit if measured else item.definition.unit)),
        Cell(threshold_text(item.rule.threshold)),
        Cell(str(item.verdict.label), fill=FILLS.get(item.verdict)),
        Cell(measured.count if measured else 0),
        Cell(None if silent or measured is None else measured.measured_at),
        Cell(measured.window_start if measured else None),
        Cell(measured.window_end if measured else None),
        Cell(item.rule.freshness_hours),
        Cell(item.rule.shows.in_language(language)),
        Cell(gap),
        Cell(item.rule.next_question.in_language(language)),
        Cell((measured.requests_query or "") if measured else ""),
    ]


def _unit_label(unit: str) -> str:
    return {
        "count": _("number"),
        "ratio": _("ratio"),
        "seconds": _("seconds"),
        "tokens_per_second": _("tokens/s"),
        "currency": _("currency"),
        "multiple": _("times"),
    }.get(unit, unit)


def _statement_columns() -> list[Column]:
    return [
        Column(_("Control"), 14),
        Column(_("Title"), 34),
        Column(_("Group"), 28),
        Column(_("Applicable"), 13),
        Column(_("Justification"), 50),
        Column(_("Origin"), 18),
        Column(_("Implementation status"), 20),
        Column(_("Evidence items"), 12),
        Column(_("Newest evidence (UTC)"), 18, "yyyy-mm-dd hh:mm"),
        Column(_("Owner"), 20),
        Column(_("Approver"), 20),
        Column(_("Link"), 36),
        Column(_("Version"), 10),
        Column(_("Decided (UTC)"), 18, "yyyy-mm-dd hh:mm"),
        Column(_("Decided by"), 20),
        Column(_("Digest of the decision (SHA-256)"), 36),
    ]


def _statement_rows(rows: Sequence[StatementRow], language: str) -> Iterator[list[Cell]]:
    for row in rows:
        head = [
            Cell(row.control.id),
            Cell(row.control.title.in_language(language)),
            Cell(" › ".join(group.title.in_language(language) for group in row.groups)),
        ]
        evidence = [Cell(row.evidence_count), Cell(row.evidence_newest)]
        decision = row.decision
        if decision is None:
            yield [*head, Cell(_("undecided")), *[Cell(None)] * 3, *evidence, *[Cell(None)] * 7]
            continue
        yield [
            *head,
            Cell(_("yes") if decision.applicable else _("no")),
            Cell(decision.justification),
            Cell(decision.get_origin_display()),
            Cell(decision.get_implementation_status_display()),
            *evidence,
            Cell(decision.owner_name),
            Cell(decision.approver_name),
            Cell(decision.link, link=decision.link),
            Cell(decision.version),
            Cell(decision.updated_at),
            Cell(decision.updated_by),
            Cell(row_digest(decision)),
        ]


def _about(
    book: Workbook,
    title: str,
    notes: Sequence[str],
    catalogs: Sequence[Catalog],
    moment: dt.datetime,
    language: str,
) -> None:
    sheet = book.active
    sheet.title = _sheet_title(book, _("About"))
    sheet.column_dimensions["A"].width = 26
    sheet.column_dimensions["B"].width = 110
    rows: list[tuple[str, Cell]] = [
        (title, Cell(None)),
        (_("Generated (UTC)"), Cell(moment, number_format="yyyy-mm-dd hh:mm:ss")),
        *((_("Note"), Cell(note)) for note in notes),
    ]
    for catalog in catalogs:
        rows += [
            ("", Cell(None)),
            (_("Catalog"), Cell(catalog.title.in_language(language))),
            (_("Version"), Cell(catalog.version)),
            (_("Source"), Cell(catalog.source)),
            (_("Address"), Cell(str(catalog.source_url), link=str(catalog.source_url))),
            (_("Retrieved"), Cell(catalog.retrieved, number_format="yyyy-mm-dd")),
            (_("Text"), Cell(catalog.text_source.in_language(language))),
            (_("Digest (SHA-256)"), Cell(catalog.digest)),
        ]
    for number, (name, cell) in enumerate(rows, start=1):
        _put(sheet, number, 1, Cell(name))
        sheet.cell(number, 1).font = Font(bold=True, size=14 if number == 1 else 11)
        _put(sheet, number, 2, cell)


def _table(
    book: Workbook, title: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, freeze: str
) -> None:
    sheet = book.create_sheet(_sheet_title(book, title))
    for number, column in enumerate(columns, start=1):
        _put(sheet, 1, number, Cell(column.title))
        head = sheet.cell(1, number)
        head.font, head.fill = HEADER_FONT, HEADER_FILL
        sheet.column_dimensions[get_column_letter(number)].width = column.width
    last = 1
    for last, row in enumerate(rows, start=2):
        for number, (column, cell) in enumerate(zip(columns, row, strict=True), start=1):
            _put(sheet, last, number, cell, column.number_format)
    sheet.freeze_panes = freeze
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(columns))}{last}"
    sheet.print_title_rows = "1:1"
    sheet.page_setup.orientation = "landscape"
    sheet.page_setup.paperSize = sheet.PAPERSIZE_A4
    sheet.page_setup.fitToWidth, sheet.page_setup.fitToHeight = 1, 0
    sheet.sheet_properties.pageSetUpPr.fitToPage = True


def _put(sheet: Worksheet, row: int, column: int, cell: Cell, number_format: str | None = None) -> None:
    target = sheet.cell(row, column)
    target.alignment = TOP
    value = cell.value
    if isinstance(value, dt.datetime):
        target.value = value.astimezone(dt.UTC).replace(tzinfo=None, microsecond=0)
    elif isinstance(value, str):
        if value:
            _put_text(target, value)
    else:
        target.value = value
    if value is not None and not isinstance(value, str) and (cell.number_format or number_format):
        target.number_format = cell.number_format or number_format
    if cell.fill:
        target.fill = PatternFill("solid", fgColor=cell.fill)
    if cell.link.startswith(("https://", "http://")):
        target.hyperlink = cell.link
        target.font = Font(color="0B5394", underline="single")


def _put_text(target: Any, text: str) -> None:
    """Write text as text: set as a string, and marked as quoted where it would be read as a formula once edited or
    saved in another format."""
    clean = ILLEGAL_CHARACTERS_RE.sub("�", text)
    if len(clean) > MAX_CELL_CHARACTERS:
        clean = clean[: MAX_CELL_CHARACTERS - 1] + "…"
    target.value = clean
    target.data_type = "s"
    if clean.startswith(FORMULA_STARTS):
        target.quotePrefix = True


def _sheet_title(book: Workbook, title: str) -> str:
    """A name that Excel takes: at most 31 characters, none of its special ones, used once."""
    plain = re.sub(r"[\[\]:*?/\\']", "-", title)[:31]
    name, number = plain, 1
    while name.lower() in {known.lower() for known in book.sheetnames if known != "Sheet"}:
        number += 1
        name = f"{plain[:27]} ({number})"
    return name


def _bytes(book: Workbook, moment: dt.datetime) -> bytes:
    """The workbook's bytes, with every time in the file the time of generation or a constant."""
    stamp = moment.astimezone(dt.UTC).replace(tzinfo=None, microsecond=0)
    book.properties.creator = "Penstock"
    book.properties.created = stamp
    written = io.BytesIO()
    book.save(written)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(written) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            content = source.read(name)
            if name == "docProps/core.xml":
                # openpyxl puts the moment of saving here.
                content = re.sub(
                    rb"(<dcterms:modified[^>]*>)[^<]*",
                    lambda found: found.group(1) + f"{stamp.isoformat()}Z".encode(),
                    content,
                )
            entry = zipfile.ZipInfo(name, ZIP_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            target.writestr(entry, content)
    return packed.getvalue()

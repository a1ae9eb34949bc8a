"""The workbooks open, hold what the pages hold, and let no text become a formula."""

import datetime as dt
import io
import zipfile
from collections.abc import Iterator

import pytest
from django.utils import translation
from openpyxl import Workbook, load_workbook
from openpyxl.worksheet.worksheet import Worksheet

from governance.catalogs.loader import get_catalog, load_catalogs
from governance.controls.coverage import ControlCoverage, coverage
from governance.controls.models import Applicability
from governance.controls.selectors import StatementRow
from governance.controls.services import row_digest
from governance.controls.sources import Measurement, Scope
from governance.exports.workbook import control_matrix, statement_of_applicability

NOW = dt.datetime(2026, 11, 30, 20, 0, tzinfo=dt.timezone(dt.timedelta(hours=8)))
ISO = "iso-iec-42001-2023"
NIST = "nist-ai-rmf-1.0"


def figure(key: str, value: float, unit: str, **more: str) -> Measurement:
    return Measurement(
        key=key,
        value=value,
        unit=unit,
        window_start=NOW - dt.timedelta(days=30),
        window_end=NOW,
        count=640,
        measured_at=NOW - dt.timedelta(hours=1),
        **more,  # type: ignore[arg-type]
    )


def covered(catalog_id: str) -> list[ControlCoverage]:
    figures = [
        figure("requests.error_rate", 0.0625, "ratio", requests_query="task=1&status=failed"),
        figure("cost.total", 12.5, "TWD"),
    ]
    return coverage(
        catalog_id=catalog_id,
        scope=Scope(),
        window_days=30,
        now=NOW,
        measurements={item.key: item for item in figures},
    )


def opened(content: bytes) -> Workbook:
    return load_workbook(io.BytesIO(content))


def rows_of(sheet: Worksheet) -> Iterator[dict[str, object]]:
    rows = sheet.iter_rows(values_only=True)
    titles = next(rows)
    for row in rows:
        yield dict(zip(map(str, titles), row, strict=True))


def statement(**changes: object) -> list[StatementRow]:
    """Two controls: A.2.2 decided, A.2.3 not."""
    catalog = get_catalog(ISO)
    fields = {
        "catalog_id": ISO,
        "control_id": "A.2.2",
        "applicable": True,
        "justification": "The board asked for it.",
        "origin": "risk",
        "implementation_status": "implemented",
        "owner_name": "陳經理",
        "approver_name": "Risk officer",
        "link": "https://wiki.example.org/policy",
        "version": 3,
        "updated_at": NOW,
        "updated_by": "approver",
    } | changes
    decided = Applicability(**fields)
    return [
        StatementRow(ISO, control, catalog.group_path(control), decision, count, newest)
        for control, decision, count, newest in (
            (catalog.control("A.2.2"), decided, 2, NOW),
            (catalog.control("A.2.3"), None, 0, None),
        )
    ]


def test_the_matrix_has_every_control_of_every_catalog() -> None:
    book = opened(control_matrix({key: covered(key) for key in load_catalogs()}, "en", generated_at=NOW))
    assert len(book.sheetnames) == 2 + 4
    controls = {row["Control"] for row in rows_of(book["ISO-IEC 42001-2023, Annex A"])}
    assert controls == {control.id for control in get_catalog(ISO).controls}
    summary = {row["Catalog"]: row for row in rows_of(book["Summary"])}
    assert summary["NIST AI RMF 1.0"]["Controls"] == 72


def test_the_matrix_tells_the_figure_its_age_and_what_to_ask_next() -> None:
    book = opened(control_matrix({ISO: covered(ISO)}, "en", generated_at=NOW))
    row = next(row for row in rows_of(book["ISO-IEC 42001-2023, Annex A"]) if row["Figure"] == "Error rate")
    assert row["Control"] == "A.6.2.6"
    assert (row["Value"], row["Unit"], row["Threshold"]) == (0.0625, "ratio", "≤ 5 %")
    assert row["Verdict"] == "outside threshold"
    assert row["Records"] == 640
    assert row["Measured (UTC)"] == dt.datetime(2026, 11, 30, 11, 0)  # noqa: DTZ001
    assert row["Requests behind it"] == "task=1&status=failed"
    assert row["An auditor would ask next"] == "What was done about the errors, by whom, and how soon?"


def test_a_control_without_figures_has_a_row_that_says_so() -> None:
    book = opened(control_matrix({ISO: covered(ISO)}, "en", generated_at=NOW))
    row = next(row for row in rows_of(book["ISO-IEC 42001-2023, Annex A"]) if row["Control"] == "A.2.2")
    assert row["State"] == "missing: needs a document or a person"
    assert row["Figure"] is None
    assert "a document or a person" in str(row["What is missing"])


def test_the_workbook_names_its_sources_and_when_it_was_made() -> None:
    about = opened(control_matrix({NIST: covered(NIST)}, "en", generated_at=NOW))["About"]
    told = [(name, value) for name, value in about.iter_rows(values_only=True, max_col=2)]
    assert ("Generated (UTC)", dt.datetime(2026, 11, 30, 12, 0)) in told  # noqa: DTZ001
    assert ("Digest (SHA-256)", get_catalog(NIST).digest) in told
    assert ("Source", get_catalog(NIST).source) in told


def test_sheets_are_made_for_reading() -> None:
    book = opened(control_matrix({ISO: covered(ISO)}, "en", generated_at=NOW))
    sheet = book["ISO-IEC 42001-2023, Annex A"]
    assert sheet.freeze_panes == "C2"
    assert sheet.auto_filter.ref == sheet.dimensions
    assert sheet.print_title_rows == "$1:$1"
    assert all(cell.alignment.wrap_text for cell in sheet[2])
    assert sheet.column_dimensions["D"].width == 46
    rates = [cell for cell in sheet["G"] if cell.value == 0.0625]
    assert rates and all(cell.number_format == "0.00%" for cell in rates)


def test_the_same_input_gives_the_same_bytes() -> None:
    first = control_matrix({ISO: covered(ISO)}, "en", generated_at=NOW)
    with translation.override("zh-hant"):  # the reader's language does not leak in
        assert control_matrix({ISO: covered(ISO)}, "en", generated_at=NOW) == first
    assert statement_of_applicability(statement(), "en", generated_at=NOW) == statement_of_applicability(
        statement(), "en", generated_at=NOW
    )
    later = control_matrix({ISO: covered(ISO)}, "en", generated_at=NOW + dt.timedelta(seconds=1))
    assert later != first


def test_no_time_but_that_of_generation_is_in_the_file() -> None:
    with zipfile.ZipFile(io.BytesIO(statement_of_applicability(statement(), "en", generated_at=NOW))) as file:
        assert {entry.date_time for entry in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        core = file.read("docProps/core.xml").decode()
    assert core.count("2026-11-30T12:00:00Z") == 2


def test_the_statement_has_the_fields_that_the_standard_asks_for() -> None:
    book = opened(statement_of_applicability(statement(), "en", generated_at=NOW))
    decided, undecided = rows_of(book["ISO-IEC 42001-2023, Annex A"])
    assert decided == {
        "Control": "A.2.2",
        "Title": "AI policy",
        "Group": "Policies related to AI",
        "Applicable": "yes",
        "Justification": "The board asked for it.",
        "Origin": "Risk assessment",
        "Implementation status": "Implemented",
        "Evidence items": 2,
        "Newest evidence (UTC)": dt.datetime(2026, 11, 30, 12, 0),  # noqa: DTZ001
        "Owner": "陳經理",
        "Approver": "Risk officer",
        "Link": "https://wiki.example.org/policy",
        "Version": 3,
        "Decided (UTC)": dt.datetime(2026, 11, 30, 12, 0),  # noqa: DTZ001
        "Decided by": "approver",
        "Digest of the decision (SHA-256)": row_digest(statement()[0].decision),  # type: ignore[arg-type]
    }
    assert (undecided["Control"], undecided["Applicable"]) == ("A.2.3", "undecided")
    assert undecided["Justification"] is None


@pytest.mark.parametrize(
    "text",
    ['=HYPERLINK("http://evil.example","x")', "+1+1", "-2+3", "@SUM(A1)", "\t=1+1", "=cmd|' /C calc'!A0"],
)
def test_no_typed_text_becomes_a_formula(text: str) -> None:
    book = opened(statement_of_applicability(statement(justification=text), "en", generated_at=NOW))
    cell = book["ISO-IEC 42001-2023, Annex A"]["E2"]
    assert cell.value == text
    assert cell.data_type == "s"
    assert cell.quotePrefix
    for sheet in book:
        assert all(cell.data_type != "f" for row in sheet.iter_rows() for cell in row)


def test_characters_that_xml_cannot_hold_are_replaced_and_long_text_is_cut_visibly() -> None:
    book = opened(
        statement_of_applicability(
            statement(justification="a\x00b\x0bc", owner_name="x" * 40_000), "en", generated_at=NOW
        )
    )
    sheet = book["ISO-IEC 42001-2023, Annex A"]
    assert sheet["E2"].value == "a�b�c"
    assert len(sheet["J2"].value) == 32_767 and sheet["J2"].value.endswith("…")


def test_only_web_addresses_become_links() -> None:
    def link(address: str) -> object:
        rows = statement(link=address)
        sheet = opened(statement_of_applicability(rows, "en", generated_at=NOW))["ISO-IEC 42001-2023, Annex A"]
        return sheet["L2"].hyperlink

    assert link("https://wiki.example.org/policy") is not None
    assert link("javascript:alert(1)") is None


def test_the_catalogs_words_follow_the_language() -> None:
    book = opened(control_matrix({ISO: covered(ISO)}, "zh-hant", generated_at=NOW))
    sheet = book["ISO-IEC 42001-2023 附錄 A"]
    assert sheet["B2"].value == "AI 政策"

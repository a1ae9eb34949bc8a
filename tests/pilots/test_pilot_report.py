"""The PDF: a valid archive file in both languages, the same figures as the rows, and nothing typed becomes code."""

import datetime as dt
import re
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.utils import translation

from governance.ledger.services import drain_and_sign, ledger_key
from penstock.pilots.report import ReportError, report_pdf
from penstock.pilots.report_content import content
from penstock.pilots.services import decide

pytestmark = pytest.mark.django_db

PRINTED = dt.datetime(2026, 11, 30, 8, 0, tzinfo=dt.UTC)
INJECTION = '#panic("owned") #image("/etc/passwd") *bold* $x^2$ = \\u{41} "]}) 商店試辦'


@pytest.fixture
def measured(make_pilot: Any, baseline_of: Any, trial_of: Any) -> Any:
    pilot = make_pilot(title=INJECTION)
    baseline_of(pilot, [2.0, 3.0, 4.0, 1.0], valid=[True, True, False, True], text=INJECTION)
    trial_of(pilot, [1.0, 2.0, 2.5, 0.5], tokens=[6, 5, 4, 3])
    return pilot


def page_count(pdf: bytes) -> int:
    return len(re.findall(rb"/Type ?/Page\b", pdf))


def test_the_report_is_archivable_and_accessible_in_both_languages(measured: Any) -> None:
    for language, tag in (("en", b"/Lang(en-GB)"), ("zh-hant", b"/Lang(zh-TW)"), ("zh-Hant", b"/Lang(zh-TW)")):
        pdf = report_pdf(pilot=measured, language=language)
        assert pdf.startswith(b"%PDF-1.7")
        assert b"<pdfaid:part>2</pdfaid:part>" in pdf
        assert b"<pdfaid:conformance>A</pdfaid:conformance>" in pdf
        assert b"<pdfuaid:part>1</pdfuaid:part>" in pdf
        assert tag in pdf
        assert 3 <= page_count(pdf) <= 6


def test_the_same_pilot_printed_at_the_same_moment_gives_the_same_bytes(measured: Any) -> None:
    first, second = (report_pdf(pilot=measured, language="en", printed_at=PRINTED) for _ in range(2))
    assert first == second


def test_text_that_a_person_typed_stays_text(measured: Any, people: Any) -> None:
    """Typst would stop at `#panic` and at the file if it read the text as markup."""
    decide(user=people.pilot_manager, pilot=measured, decision="redesign", reason=INJECTION)
    measured.refresh_from_db()
    assert report_pdf(pilot=measured, language="en").startswith(b"%PDF")


def test_text_that_the_font_cannot_show_is_no_obstacle(make_pilot: Any) -> None:
    pilot = make_pilot(title="Tea 🍵 ไทย \ue000 \u202e e\u0301 𠀀")
    assert report_pdf(pilot=pilot, language="en").startswith(b"%PDF")


def test_a_pilot_without_measurements_has_a_report_too(make_pilot: Any, baseline_of: Any) -> None:
    pilot = make_pilot()
    assert report_pdf(pilot=pilot, language="en").startswith(b"%PDF")
    baseline_of(pilot, [1.0] * 4)
    assert report_pdf(pilot=pilot, language="zh-hant").startswith(b"%PDF")


def test_another_language_is_refused(measured: Any) -> None:
    with pytest.raises(ReportError, match="zh-hant"):
        report_pdf(pilot=measured, language="fr")


def rows(part: dict[str, Any]) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in part["rows"]}


def test_the_figures_of_the_report_equal_a_hand_written_query(measured: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            WITH card AS (SELECT hardware_price / (lifetime_years * 31557600 * utilization)
                                 + power_watts / 1000 * electricity_price_per_kwh / 3600 AS per_second
                          FROM telemetry_ratecard WHERE id = %(card)s),
                 before AS (SELECT count(*) AS n, sum(duration_seconds)::numeric AS seconds,
                                   sum(output_tokens) AS tokens, sum(valid::int) AS valid
                            FROM pilots_baselineitem i JOIN pilots_baselinerun r ON r.id = i.run_id
                            WHERE r.pilot_id = %(pilot)s),
                 after AS (SELECT count(*) AS n, extract(epoch FROM max(finished_at) - min(started_at)) AS seconds,
                                  sum(output_tokens) AS tokens, sum(valid::int) AS valid
                           FROM serving_request WHERE batch_id = %(batch)s)
            SELECT before.tokens, after.tokens, before.seconds, after.seconds,
                   (after.n / after.seconds) / (before.n / before.seconds),
                   per_second * before.seconds / before.n, per_second * after.seconds / after.n,
                   before.valid, after.valid
            FROM card, before, after
            """,
            {"card": measured.rate_card_id, "pilot": measured.pk, "batch": measured.trial_batch_id},
        )
        tokens_before, tokens_after, before, after, multiple, cost_before, cost_after, *valid = cursor.fetchone()
    with translation.override("en"):
        shown = content(measured, printed_at=PRINTED)
    table = rows(shown["comparison"])
    assert shown["tiles"][0]["value"] == f"{multiple:.2f}×" == "4.00×"
    assert table["Output tokens"][:2] == [str(tokens_before), str(tokens_after)] == ["24", "18"]
    assert [Decimal(text) for text in table["Seconds"][:2]] == [before, after]
    assert table["Cost per item"][:2] == [f"{cost_before:.4f} TWD", f"{cost_after:.5f} TWD"]
    assert [text.split(" / ")[0] for text in table["Valid outputs"][:2]] == [str(count) for count in valid]


def test_the_report_names_the_signed_head_and_the_pilots_entries(measured: Any) -> None:
    head = drain_and_sign(key=ledger_key())
    assert head is not None
    with translation.override("en"):
        evidence = content(measured, printed_at=PRINTED)["evidence"]
    table = rows(evidence)
    assert table["Signed head of the ledger"][1] == bytes(head.root).hex()
    assert table["Trial batch"][0] == measured.trial_batch_id
    assert table["Model release"][1] == measured.task.model_release.digest
    assert [entry[1] for entry in evidence["entries"]] == [
        "pilot.created",
        "pilot.baseline_started",
        "pilot.trial_started",
    ]
    assert "4 finished requests" in evidence["lead"]

"""What pages and reports show of the sample equals what a hand-written query over the rows gives."""

import json
import re
from html import unescape
from pathlib import Path

import pytest
from installation import Installation, signed_in

# Pages show three significant digits.
ROUNDING = 0.006


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def figures_of(text: str) -> list[float]:
    return [float(figure.replace(",", "")) for figure in re.findall(r"\d[\d,]*\.?\d*", text)]


def test_fairness_and_batch_pages_show_each_groups_rates(installation: Installation, sample_batch: str) -> None:
    rows = installation.query(
        """
        SELECT groups->>'language', count(*), avg(CASE WHEN valid THEN 1.0 ELSE 0 END),
               avg(CASE WHEN truncated THEN 1.0 ELSE 0 END)
        FROM serving_request WHERE batch_id = %s GROUP BY 1
        """,
        sample_batch,
    )
    assert {row[0] for row in rows} == {"en", "zh-Hant"}
    pages = (f"/fairness/product-descriptions/?batch={sample_batch}", f"/batches/{sample_batch}/")
    with signed_in(installation) as client:
        for page in pages:
            html = client.get(page).text
            table = next(
                table for table in re.findall(r"<table.*?</table>", html, re.S) if "compared by group" in table
            )
            shown = {}
            for row in re.findall(r"<tr>.*?</tr>", table, re.S)[1:]:
                cells = [text_of(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)]
                shown["en" if "English" in cells[0] else "zh-Hant"] = cells
            for language, count, valid, truncated in rows:
                cells = shown[language]
                assert figures_of(cells[2])[0] == count
                assert figures_of(cells[5])[0] == pytest.approx(100 * float(valid), rel=ROUNDING, abs=0.06)
                assert figures_of(cells[7])[0] == pytest.approx(100 * float(truncated), rel=ROUNDING, abs=0.06)


def test_the_coverage_pages_show_the_measured_rates(installation: Installation, sample_batch: str) -> None:
    valid = installation.value(
        "SELECT avg(CASE WHEN valid THEN 1.0 ELSE 0 END) FROM serving_request WHERE valid IS NOT NULL"
    )
    with signed_in(installation) as client:
        catalog = text_of(client.get("/controls/iso-iec-42001-2023/").text)
        page = client.get("/controls/iso-iec-42001-2023/A.6.2.6/").text
        # The ledger goes on growing: compare with a count that held while the page was made.
        for _ in range(20):
            leaves = installation.value("SELECT count(*) FROM governance_leaf")
            events = client.get("/controls/iso-iec-42001-2023/A.6.2.8/").text
            if installation.value("SELECT count(*) FROM governance_leaf") == leaves:
                break
    assert "A.6.2.4" in catalog and "A.10.4" in catalog
    sections = re.findall(r"<section.*?</section>", page, re.S)
    section = next(text for text in map(text_of, sections) if "valid outputs" in text.lower())
    assert any(figure == pytest.approx(100 * float(valid), abs=0.06) for figure in figures_of(section))
    assert any(f"/requests/?{query}" for query in re.findall(r'href="/requests/\?([^"]+)"', page)), (
        "down to the requests"
    )
    sections = re.findall(r"<section.*?</section>", events, re.S)
    assert any(leaves in figures_of(text_of(section)) for section in sections)


def test_a_pilots_page_report_and_command_agree_with_sql(
    installation: Installation, sample_batch: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.pdf"
    done = installation.run(
        "pilot", "run", "--name", "e2e-pilot", "--task", "product-descriptions", "--sample", "3",
        "--pdf", str(report), "--json",
    )  # fmt: skip
    figures = json.loads(done.stdout)
    baseline = installation.value(
        """
        SELECT sum(i.duration_seconds) FROM pilots_baselineitem i JOIN pilots_baselinerun r ON r.id = i.run_id
        JOIN pilots_pilot p ON p.id = r.pilot_id WHERE p.name = 'e2e-pilot'
        """
    )
    trial = installation.value(
        """
        SELECT extract(epoch FROM max(q.finished_at) - min(q.started_at)) FROM serving_request q
        JOIN pilots_pilot p ON p.trial_batch_id = q.batch_id WHERE p.name = 'e2e-pilot'
        """
    )
    multiple = baseline / float(trial)
    assert figures["throughput_multiple"] == pytest.approx(multiple, rel=1e-6)
    price = installation.value(
        """
        SELECT c.hardware_price / (c.lifetime_years * 31557600 * c.utilization)
               + c.power_watts / 1000 * c.electricity_price_per_kwh / 3600
        FROM telemetry_ratecard c JOIN pilots_pilot p ON p.rate_card_id = c.id WHERE p.name = 'e2e-pilot'
        """
    )
    per_item = float(price) * baseline / 3
    assert float(figures["baseline"]["cost_per_item"]) == pytest.approx(per_item, rel=1e-6)
    assert report.read_bytes().startswith(b"%PDF-")
    with signed_in(installation) as client:
        page = text_of(client.get("/pilots/e2e-pilot/").text)
        for language in ("en", "zh-hant"):
            answer = client.get(f"/pilots/e2e-pilot/report-{language}.pdf")
            assert answer.headers["content-type"] == "application/pdf"
    shown = figures_of(page[page.index("Throughput multiple") :])[0]
    assert shown == pytest.approx(multiple, rel=ROUNDING)

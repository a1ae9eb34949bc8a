"""What a newcomer sees: one command, a real batch on a real model, and its evidence."""

import json
import subprocess
import sys
import zipfile
from decimal import Decimal
from pathlib import Path

from installation import Installation, signed_in, wait_for
from openai import OpenAI


def test_the_sample_batch_completes_without_any_further_act(installation: Installation, sample_batch: str) -> None:
    assert installation.value("SELECT count(*) FROM serving_request WHERE batch_id = %s", sample_batch) == 64
    assert (
        installation.value(
            "SELECT count(*) FROM serving_request WHERE batch_id = %s AND status = 'succeeded'", sample_batch
        )
        == 64
    )


def test_every_request_has_one_leaf_and_one_usage_row(installation: Installation, sample_batch: str) -> None:
    def sequenced() -> bool:
        return installation.value("SELECT count(*) FROM governance_outboxentry") == 0

    wait_for("the ledger takes up every event", sequenced, 60)
    doubled = """
        SELECT count(*) FROM serving_request r WHERE batch_id = %s AND (
            (SELECT count(*) FROM governance_leaf l WHERE l.kind = 'request.finished' AND l.subject = r.id) <> 1
            OR (SELECT count(*) FROM telemetry_usage u WHERE u.request_id = r.id) <> 1)
    """
    assert installation.value(doubled, sample_batch) == 0


def test_the_openai_client_does_the_whole_job(installation: Installation, api_key: str, tmp_path: Path) -> None:
    client = OpenAI(base_url=f"{installation.url}/v1", api_key=api_key)
    model = next(iter(client.models.list())).id
    lines = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"Name {number} colours."}],
                "max_tokens": 12,
            },
        }
        for number in range(2, 6)
    ]
    path = tmp_path / "work.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    uploaded = client.files.create(file=path.open("rb"), purpose="batch")
    assert uploaded.bytes == path.stat().st_size
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"who": "tests"}
    )
    assert batch.status in ("validating", "in_progress")
    done = wait_for(
        "the batch ends",
        lambda: (b := client.batches.retrieve(batch.id)).status in ("completed", "failed") and b,
        180,
    )
    assert done.status == "completed", done.errors
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 4, 0)
    results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {row["custom_id"] for row in results} == {line["custom_id"] for line in lines}
    assert all(row["response"]["status_code"] == 200 for row in results)
    assert all(row["response"]["body"]["usage"]["completion_tokens"] <= 12 for row in results)

    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    whole = client.chat.completions.create(model=model, messages=question, max_tokens=24, temperature=0)
    assert "Paris" in (whole.choices[0].message.content or "")
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model=model,
        messages=question,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2, "tokens arrive as they are made"
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def export(installation: Installation, batch: str, folder: Path) -> Path:
    bundle = folder / "evidence.zip"
    installation.run("evidence", "export", "--batch", batch, "--output", str(bundle))
    return bundle


def verify(bundle: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the verifier out of the bundle, in an empty directory, without Penstock on the path."""
    with zipfile.ZipFile(bundle) as archive:
        name = next(name for name in archive.namelist() if name.rsplit("/", 1)[-1] == "verify.py")
        (folder / "verify.py").write_bytes(archive.read(name))
    return subprocess.run(
        [sys.executable, "-I", "verify.py", str(bundle)], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_bundle_verifies_offline_and_any_changed_byte_is_found(
    installation: Installation, sample_batch: str, tmp_path: Path
) -> None:
    bundle = export(installation, sample_batch, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    good = verify(bundle, empty)
    assert good.returncode == 0, good.stdout + good.stderr
    content = bundle.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 12)):
        changed = bytearray(content)
        changed[position] ^= 0x01
        bad_bundle = tmp_path / "changed.zip"
        bad_bundle.write_bytes(changed)
        bad = subprocess.run(
            [sys.executable, "-I", "verify.py", str(bad_bundle)],
            cwd=empty,
            capture_output=True,
            text=True,
            check=False,
        )
        assert bad.returncode == 1, f"byte {position} of {len(content)} changed, yet: {bad.stdout}"
        assert bad.stdout.strip() or bad.stderr.strip()


def test_no_prompt_text_is_in_the_ledger_or_the_bundle(
    installation: Installation, sample_batch: str, tmp_path: Path
) -> None:
    bundle = export(installation, sample_batch, tmp_path)
    with zipfile.ZipFile(bundle) as archive:
        everything = b"".join(archive.read(name) for name in archive.namelist())
    assert "高山烏龍茶".encode() not in everything
    assert b"grown above 1,300 metres" not in everything


def test_the_batchs_figures_equal_sql(installation: Installation, sample_batch: str) -> None:
    tokens, seconds, cost = installation.query(
        """
        SELECT sum(r.output_tokens), extract(epoch FROM max(r.finished_at) - min(r.started_at)), sum(u.cost)
        FROM serving_request r JOIN telemetry_usage u ON u.request_id = r.id WHERE r.batch_id = %s
        """,
        sample_batch,
    )[0]
    with signed_in(installation) as client:
        answer = client.get(f"/api/batches/{sample_batch}/measurements/")
    assert answer.status_code == 200, answer.text[:300]
    figures = answer.json()["summary"]
    assert figures["output_tokens"] == tokens
    assert abs(figures["output_tokens_per_second"] - tokens / float(seconds)) < 0.01 * tokens / float(seconds)
    assert Decimal(str(figures["cost_total"])).quantize(Decimal("1e-8")) == cost.quantize(Decimal("1e-8"))


def test_every_page_opens_in_both_languages(installation: Installation, sample_batch: str) -> None:
    with signed_in(installation) as client:
        for language in ("en", "zh-hant"):
            client.cookies.set("penstock_language", language)
            for path in (
                "/", "/tasks/", "/batches/", f"/batches/{sample_batch}/", "/requests/", "/fairness/",
                "/fairness/product-descriptions/", "/controls/", "/controls/iso-iec-42001-2023/",
                "/controls/nist-ai-rmf-1.0/", "/ledger/", "/pilots/", "/models/", "/settings/rates/",
                "/settings/keys/", "/settings/people/",
            ):  # fmt: skip
                page = client.get(path)
                assert page.status_code == 200, f"{path}: {page.status_code}"
                assert 'lang="zh-hant"' in page.text.lower() if language == "zh-hant" else 'lang="en"' in page.text


def test_a_second_up_in_the_same_home_is_refused_with_a_reason(installation: Installation) -> None:
    second = installation.run("up", check=False)
    assert second.returncode == 1
    assert "runs already" in second.stderr


def test_doctor_finds_nothing_missing(installation: Installation, sample_batch: str) -> None:
    findings = json.loads(installation.run("doctor", "--json").stdout)
    assert [finding for finding in findings if not finding["ok"]] == []


def test_the_whole_ledger_can_be_checked_at_the_terminal(installation: Installation, sample_batch: str) -> None:
    found = json.loads(installation.run("evidence", "check", "--json").stdout)
    assert found["intact"]
    assert found["problems"] == []
    assert found["leaves"] >= 64
    assert found["checkpoints"] >= 1

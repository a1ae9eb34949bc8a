"""The bundle and its stand-alone verifier: what is right passes, and no byte can change unnoticed."""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from governance.exports import verify
from governance.exports.bundle import BundleError, BundleLeaf, BundleSummary, EarlierHead, write_bundle
from governance.ledger import tree
from governance.ledger.checkpoint import TreeHead, sign_checkpoint_note
from governance.ledger.events import Event
from governance.ledger.keys import LedgerKey
from governance.ledger.tree import NodeId

ORIGIN = "example.test/ledger"
KEY = LedgerKey(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
STRANGER = LedgerKey(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"\x08" * 32))
WHEN = datetime(2026, 3, 1, 1, 30, tzinfo=UTC)


class Log:
    """A log in memory."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.entries = [event.canonical() for event in events]
        self.nodes: dict[NodeId, bytes] = {}
        frontier = tree.Frontier()
        for index, entry in enumerate(self.entries):
            self.nodes[NodeId(0, index)] = tree.leaf_hash(entry)
            self.nodes.update(frontier.append(tree.leaf_hash(entry)))

    def read(self, wanted: Sequence[NodeId], /) -> Mapping[NodeId, bytes]:
        return {node: self.nodes[node] for node in wanted}

    def checkpoint(self, size: int, key: LedgerKey = KEY) -> str:
        return sign_checkpoint_note(TreeHead(ORIGIN, size, tree.root(size, self.read)), key)

    def leaf(self, index: int, size: int) -> BundleLeaf:
        proof = tree.inclusion_proof(index, size, self.read)
        return BundleLeaf(index, self.entries[index].decode(), proof)

    def earlier(self, old: int, size: int) -> EarlierHead:
        return EarlierHead(old, self.checkpoint(old), tree.consistency_proof(old, size, self.read))


def event(number: int, kind: str = "request.finished", subject: str = "", **payload: Any) -> Event:
    return Event(kind=kind, subject=subject or f"req-{number}", payload={"n": number, "語言": "繁體中文", **payload})


LOG = Log([event(n, batch="batch-1" if n % 2 else "batch-2") for n in range(40)])


def write(destination: Path, log: Log = LOG, size: int = 40, key: LedgerKey = KEY, **kwargs: Any) -> BundleSummary:
    arguments: dict[str, Any] = {
        "leaves": [log.leaf(index, size) for index in range(1, size, 4)],
        "measurements": [{"name": "ttft_seconds", "value": Decimal("0.25"), "count": 3, "until": WHEN}],
        "extra_files": {"controls.xlsx": b"PK\x03\x04 a workbook", "reports/pilot.pdf": b"%PDF-1.7"},
        "earlier_heads": [log.earlier(16, size), log.earlier(21, size)] if size > 21 else [],
        "selection": {"batch": "batch-1"},
        "created_at": WHEN,
        **kwargs,
    }
    return write_bundle(destination=destination, key=key, checkpoint=log.checkpoint(size, key), **arguments)


@dataclass(frozen=True)
class Written:
    path: Path
    folder: Path
    summary: BundleSummary
    raw: bytes
    spans: dict[str, tuple[int, int]]

    def owner(self, offset: int) -> str:
        """The file whose content holds the byte; '' for the container's own."""
        return next((name for name, (start, end) in self.spans.items() if start <= offset < end), "")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("bundle")
    summary = write(folder / "evidence.zip")
    raw = summary.path.read_bytes()
    with zipfile.ZipFile(summary.path) as container:
        container.extractall(folder / "unpacked")
        spans = {
            info.filename: (start := info.header_offset + 30 + len(info.filename), start + info.file_size)
            for info in container.infolist()
        }
    return Written(summary.path, folder / "unpacked", summary, raw, spans)


def check(path: Path, **kwargs: Any) -> verify.Report:
    return verify.verify_bundle(str(path), **kwargs)


def test_a_bundle_verifies_as_zip_and_as_folder(written: Written) -> None:
    for path in (written.path, written.folder):
        report = check(path, key=str(KEY.verifier))
        assert report.lines()[-1].startswith("VERIFIED with the key that you gave.")
        assert report.head is not None
        assert report.head.size == 40
        assert set(report.roots) == {16, 21}
    words = "\n".join(check(written.path).lines())
    assert "every byte accounted for" in words
    assert "leaves: 10 entries are in the log, each at its place (request.finished 10)" in words
    assert "compare its fingerprint" in words
    assert hashlib.sha256(KEY.verifier.public_bytes).hexdigest() in words


def test_leaves_are_a_line_each_whatever_ends_a_line_for_their_reader(tmp_path: Path) -> None:
    """U+0085, U+2028 and U+2029 may stand in JSON as they are, and end a line for Python's `splitlines`."""
    names = ["plain", "one\x85two", "one\u2028two\u2029three"]
    log = Log([event(number, name=name) for number, name in enumerate(names)])
    leaves = [log.leaf(index, 3) for index in range(3)]
    summary = write(tmp_path / "evidence.zip", log, 3, leaves=leaves, measurements=[], selection={"batch": names[2]})
    assert check(summary.path, key=str(KEY.verifier)).lines()[-1].startswith("VERIFIED")
    with zipfile.ZipFile(summary.path) as container:
        lines = container.read("leaves.jsonl").decode().splitlines()
    assert [json.loads(json.loads(line)["entry"])["payload"]["name"] for line in lines] == names


def test_the_container_is_an_ordinary_zip_and_a_function_of_its_contents(written: Written, tmp_path: Path) -> None:
    with zipfile.ZipFile(written.path) as container:
        assert container.testzip() is None
        names = container.namelist()
        assert names == sorted(names)
        assert {info.date_time for info in container.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert container.read("exports/controls.xlsx") == b"PK\x03\x04 a workbook"
        assert container.read("verify.py") == Path(verify.__file__).read_bytes()
    again = write(tmp_path / "again.zip")
    assert again.path.read_bytes() == written.raw
    assert again.sha256 == hashlib.sha256(written.raw).hexdigest()
    assert again.size_bytes == len(written.raw)


def test_the_statement_is_in_toto_in_dsse_about_the_manifest(written: Written) -> None:
    envelope = json.loads((written.folder / "statement.dsse.json").read_bytes())
    payload = base64.b64decode(envelope["payload"])
    statement = json.loads(payload)
    manifest = (written.folder / "manifest.json").read_bytes()
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [
        {"name": "manifest.json", "digest": {"sha256": hashlib.sha256(manifest).hexdigest()}}
    ]
    # PAE of the DSSE specification, spelt out.
    kind = "application/vnd.in-toto+json"
    signed = b"DSSEv1 28 " + kind.encode() + b" " + str(len(payload)).encode() + b" " + payload
    assert len(kind) == 28
    assert KEY.verifier.verify(signed, base64.b64decode(envelope["signatures"][0]["sig"]))
    measurements = json.loads((written.folder / "measurements.json").read_bytes())
    assert measurements == [
        {"name": "ttft_seconds", "value": "0.25", "count": 3, "until": "2026-03-01T01:30:00.000000Z"}
    ]


def test_pre_authentication_encoding_as_in_the_dsse_specification() -> None:
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert verify.pae("http://example.com/HelloWorld", b"hello world") == expected


def assert_found(report: verify.Report, owner: str) -> None:
    """The change was found, and a finding names the file, or the container where the byte is the container's."""
    assert not report.verified
    assert report.lines()[-1].startswith("NOT VERIFIED")
    assert any(finding.file == owner for finding in report.problems), (owner, report.lines())


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_byte_of_the_zip_changes_unnoticed(written: Written, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["", "", *written.spans]))
    if name:
        start, end = written.spans[name]
        offset = data.draw(st.integers(start, end - 1))
    else:
        offset = data.draw(st.integers(0, len(written.raw) - 1))
    changed = bytearray(written.raw)
    changed[offset] ^= data.draw(st.integers(1, 255))
    path = written.path.with_name("changed.zip")
    path.write_bytes(changed)
    assert_found(check(path), written.owner(offset))


def test_no_byte_of_the_containers_own_changes_unnoticed(written: Written) -> None:
    path = written.path.with_name("changed.zip")
    own = [offset for offset in range(len(written.raw)) if not written.owner(offset)]
    assert len(own) > 500
    for offset in own:
        changed = bytearray(written.raw)
        changed[offset] ^= 1 << offset % 8
        path.write_bytes(changed)
        report = check(path)
        assert not report.verified, offset


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_byte_of_the_folder_changes_unnoticed(written: Written, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(written.spans)))
    path = written.folder / name
    original = path.read_bytes()
    changed = bytearray(original)
    changed[data.draw(st.integers(0, len(original) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        assert_found(check(written.folder), name)
    finally:
        path.write_bytes(original)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_cut_a_longer_and_a_shuffled_zip_are_refused(written: Written, data: st.DataObject) -> None:
    raw = written.raw
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = data.draw(
        st.sampled_from([raw[:at], raw[:at] + b"\0" + raw[at:], raw[:at] + raw[at + 1 :], raw + raw[:at] + b"\n"])
    )
    path = written.path.with_name("changed.zip")
    path.write_bytes(changed)
    assert not check(path).verified


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_hostile_document_is_a_finding_and_never_a_crash(written: Written, data: st.DataObject) -> None:
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
    name = data.draw(st.sampled_from(sorted(written.spans)))
    path = written.folder / name
    original = path.read_bytes()
    try:
        document: Any = json.loads(original)
        keys = data.draw(st.lists(st.sampled_from(sorted(document)), max_size=2)) if isinstance(document, dict) else []
        for key in keys:
            document[key] = data.draw(json_values)
        hostile = json.dumps(document if keys else data.draw(json_values)).encode()
    except ValueError:
        hostile = data.draw(st.binary(max_size=200))
    path.write_bytes(hostile)
    try:
        assert check(written.folder).verified is (hostile == original)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("name", ["manifest.json", "statement.dsse.json", "leaves.jsonl", "consistency/16.json"])
@pytest.mark.parametrize(
    "hostile", [b"[" * 200_000, b'{"a":' * 100_000, b"1" * 10_000, b"\xff", b"", b"NaN", b"x" * 3_000_000]
)
def test_json_made_to_exhaust_the_parser_is_a_finding(written: Written, name: str, hostile: bytes) -> None:
    path = written.folder / name
    original = path.read_bytes()
    path.write_bytes(hostile)
    try:
        assert_found(check(written.folder), name)
    finally:
        path.write_bytes(original)


def repacked(written: Written, change: Callable[[dict[str, bytes]], None]) -> bytes:
    """A well-formed container with other contents."""
    contents = {name: written.raw[start:end] for name, (start, end) in written.spans.items()}
    change(contents)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as container:
        for name, content in contents.items():
            container.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "file", "message"),
    [
        (lambda c: c.update({"extra.txt": b"x"}), "extra.txt", "is not listed in the manifest"),
        (lambda c: c.pop("exports/controls.xlsx"), "exports/controls.xlsx", "is listed in the manifest but missing"),
        (lambda c: c.pop("checkpoint.txt"), "checkpoint.txt", "is missing"),
        (lambda c: c.pop("vkey.txt"), "vkey.txt", "is missing"),
        (lambda c: c.pop("manifest.json"), "manifest.json", "is missing"),
        (lambda c: c.pop("leaves.jsonl"), "leaves.jsonl", "is missing"),
    ],
)
def test_files_added_or_taken_away_are_named(
    written: Written, tmp_path: Path, change: Callable[[dict[str, bytes]], None], file: str, message: str
) -> None:
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(io.BytesIO(repacked(written, change))) as container:
        container.extractall(folder)
    findings = [(finding.file, finding.message()) for finding in check(folder).problems]
    assert (file, message) in findings


@pytest.mark.parametrize(
    "name", ["../evil.txt", "/etc/passwd", "a/../../b", "a\\b", ".hidden", "ex ports/x", "中文.txt"]
)
def test_a_path_that_leads_elsewhere_is_refused_and_nothing_is_written(
    written: Written, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "hostile.zip"
    path.write_bytes(repacked(written, lambda contents: contents.update({name: b"x"})))
    report = check(path)
    assert not report.verified
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(BundleError, match="names in a bundle"):
        write(tmp_path / "new.zip", extra_files={name: b"x"})
    assert list(tmp_path.iterdir()) == [path]


def test_compression_is_refused_so_no_small_file_unfolds_into_a_large_one(written: Written, tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as container:
        container.writestr("README.txt", b"\0" * 50_000_000)
    assert not check(path).verified


def test_links_in_a_folder_are_refused(written: Written, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(written.path) as container:
        container.extractall(folder)
    (folder / "measurements.json").rename(tmp_path / "elsewhere.json")
    os.symlink(tmp_path / "elsewhere.json", folder / "measurements.json")
    os.symlink(tmp_path, folder / "more")
    findings = {(finding.file, finding.message()) for finding in check(folder).problems}
    assert ("measurements.json", "is not a plain file with a plain name") in findings
    assert ("more", "is not a plain file with a plain name") in findings


def test_a_bundle_signed_by_a_stranger_passes_only_until_the_key_is_pinned(tmp_path: Path) -> None:
    log = Log([event(n, output_tokens=999) for n in range(8)])
    note = log.checkpoint(8, STRANGER)
    write_bundle(
        destination=tmp_path / "forged.zip",
        key=STRANGER,
        checkpoint=note,
        leaves=[log.leaf(3, 8)],
        measurements=[],
        created_at=WHEN,
    )
    assert check(tmp_path / "forged.zip").verified  # the report asks to compare the fingerprint
    report = check(tmp_path / "forged.zip", key=str(KEY.verifier))
    assert report.problems[0].render() == (
        "vkey.txt: is not the key that you gave: somebody else signed, or the key was exchanged"
    )
    assert not check(tmp_path / "forged.zip", key="not a key").verified


def test_a_changed_entry_is_named_by_line_and_leaf(written: Written) -> None:
    path = written.folder / "leaves.jsonl"
    original = path.read_text()
    path.write_text(original.replace('\\"n\\":13,', '\\"n\\":31,'))
    try:
        found = [(finding.line, finding.leaf) for finding in check(written.folder).problems if finding.line]
    finally:
        path.write_text(original)
    assert found == [(4, 13)]


def test_a_batch_that_declares_more_requests_than_are_shown_is_found(tmp_path: Path) -> None:
    log = Log(
        [
            *(event(n, batch="batch-1") for n in range(3)),
            event(9, kind="batch.completed", subject="batch-1", request_leaves=3),
        ]
    )
    whole = write(tmp_path / "whole.zip", log, 4, leaves=[log.leaf(index, 4) for index in range(4)])
    assert "batch batch-1: all of its 3 finished requests are here" in "\n".join(check(whole.path).lines())
    short = write(tmp_path / "short.zip", log, 4, leaves=[log.leaf(index, 4) for index in (0, 2, 3)])
    assert [finding.render() for finding in check(short.path).problems] == [
        "leaves.jsonl, line 3, leaf 3: batch batch-1 had 3 finished requests, the bundle has 2"
    ]


def test_leaving_out_what_declares_the_count_is_said_to_leave_it_open(tmp_path: Path) -> None:
    """Who signs can leave out a request and, with it, the entry that would give it away: no proof forbids that."""
    log = Log(
        [
            *(event(n, batch="batch-1") for n in range(3)),
            event(9, kind="batch.completed", subject="batch-1", request_leaves=3),
        ]
    )
    whole = check(write(tmp_path / "whole.zip", log, 4, leaves=[log.leaf(index, 4) for index in range(4)]).path)
    assert whole.notes == [] and "open" not in "\n".join(whole.lines())
    short = check(write(tmp_path / "short.zip", log, 4, leaves=[log.leaf(index, 4) for index in (0, 2)]).path)
    assert short.verified
    assert "some of them may have been left out" in "\n".join(short.lines())
    assert short.verdict().endswith("1 point(s) stay open, see above.")
    assert "尚有 1 點未能確定" in short.verdict("zh-Hant")
    empty = check(write(tmp_path / "empty.zip", log, 4, leaves=[]).path)
    assert empty.as_json()["open"] == [
        "batch batch-1: the bundle was made about it, and holds no entry of its requests"
    ]


def test_a_later_bundle_shows_that_the_earlier_ones_log_stands(tmp_path: Path) -> None:
    early = write(tmp_path / "early.zip", size=21).path
    late = write(tmp_path / "late.zip").path
    report = check(late, since=str(early))
    assert report.verified
    assert (
        "since: the earlier bundle's %(old)d entries stand unchanged in this log",
        {"old": 21, "new": 40},
    ) in report.checks
    assert check(late, since=str(late)).verified
    assert "has only 21 now" in check(early, since=str(late)).verdict()
    unrelated = write(tmp_path / "unrelated.zip", size=22).path
    assert "has no proof from 22 entries" in check(late, since=str(unrelated)).verdict()


def test_a_rewritten_history_is_found_against_the_earlier_bundle(tmp_path: Path) -> None:
    early = write(tmp_path / "early.zip", size=21).path
    rewritten = Log([event(n, rewritten=True) for n in range(40)])
    late = write(tmp_path / "late.zip", rewritten).path
    assert check(late).verified  # in itself it is sound: its signer rewrote everything
    report = check(late, since=str(early))
    assert [finding.message() for finding in report.problems] == [
        "the first 21 entries are not those of the earlier bundle"
    ]
    with_old_head = write(
        tmp_path / "honest.zip",
        rewritten,
        earlier_heads=[EarlierHead(21, LOG.checkpoint(21), tree.consistency_proof(21, 40, rewritten.read))],
    ).path
    assert "history was rewritten" in check(with_old_head).verdict()


@given(st.integers(1, 60), st.data())
def test_both_implementations_of_the_merkle_proofs_agree(size: int, data: st.DataObject) -> None:
    log = Log([event(n) for n in range(size)])
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size))
    root, old_root = tree.root(size, log.read), tree.root(old, log.read)
    leaf, path = log.nodes[NodeId(0, index)], tree.inclusion_proof(index, size, log.read)
    proof = tree.consistency_proof(old, size, log.read)
    assert verify.included(leaf, index, size, path, root)
    assert verify.consistent(old, size, proof, old_root, root)
    assert verify.leaf_hash(log.entries[index]) == leaf

    at, other = data.draw(st.integers(-1, size + 1)), data.draw(st.integers(1, size + 1))
    bent = [*path, root] if data.draw(st.booleans()) else path[:-1]
    assert verify.included(leaf, at, other, bent, root) == tree.verify_inclusion(leaf, at, other, bent, root)
    bent = [*proof, root] if data.draw(st.booleans()) else proof[1:]
    assert verify.consistent(old, other, bent, old_root, root) == tree.verify_consistency(
        old, other, bent, old_root, root
    )


def run_verifier(written: Written, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = cwd / "v" / "verify.py"
    script.parent.mkdir()
    script.write_bytes(written.raw[slice(*written.spans["verify.py"])])
    return subprocess.run(
        [sys.executable, "-I", str(script), *arguments],
        cwd=cwd,
        env={"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
    )


def test_the_verifier_out_of_the_bundle_runs_alone_from_an_empty_folder(written: Written, tmp_path: Path) -> None:
    outcome = run_verifier(written, tmp_path, str(written.path), "--key", str(KEY.verifier))
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines()[-1].startswith("VERIFIED with the key that you gave.")


def test_the_verifier_alone_finds_a_changed_byte_and_says_so_in_both_languages(
    written: Written, tmp_path: Path
) -> None:
    changed = bytearray(written.raw)
    changed[written.spans["measurements.json"][0] + 20] ^= 1
    (tmp_path / "changed.zip").write_bytes(changed)
    outcome = run_verifier(written, tmp_path, "changed.zip", "--json", "--lang", "zh-Hant")
    assert (outcome.returncode, outcome.stderr) == (1, "")
    report = json.loads(outcome.stdout)
    assert report["verified"] is False
    assert {problem["file"] for problem in report["problems"]} == {"measurements.json"}
    assert report["problems"][-1]["message"] == "已被更改：其 SHA-256 與清單不符"
    assert report["verdict"].startswith("查驗未通過：2 個問題")


def test_a_bundle_that_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in check(tmp_path / "none.zip").verdict()
    assert not check(tmp_path).verified  # an empty folder


def test_the_verifier_imports_only_the_standard_library_and_cryptography() -> None:
    parsed = ast.parse(Path(verify.__file__).read_text())
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name or "").split(".")[0]  # type: ignore[union-attr]
        for node in ast.walk(parsed)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"cryptography"}


def test_every_sentence_of_the_verifier_has_its_translation() -> None:
    source = ast.parse(Path(verify.__file__).read_text())
    constants = {
        node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(verify.ZH_HANT) <= constants
    places = {"wrong": 1, "fail": 1, "holds": 0, "leaves_open": 0, "translate": 0, "Finding": 1}
    spoken = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            place = places.get(name)
            if place is not None and len(node.args) > place and isinstance(node.args[place], ast.Constant):
                spoken.add(node.args[place].value)  # type: ignore[attr-defined]
        is_text = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "text"
        if is_text and isinstance(node.value, ast.Constant):  # type: ignore[attr-defined]
            spoken.add(node.value.value)  # type: ignore[attr-defined]
    assert len(spoken) > 50
    assert spoken <= set(verify.ZH_HANT)


@pytest.mark.parametrize("bad", [{"value": float("nan")}, {"value": {1, 2}}])
def test_a_figure_without_a_json_form_leaves_no_file_behind(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="no JSON form"):
        write(tmp_path / "evidence.zip", measurements=[bad])
    assert list(tmp_path.iterdir()) == []

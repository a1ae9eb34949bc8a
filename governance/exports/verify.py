#!/usr/bin/env python3
"""Checks a Penstock evidence bundle, offline. Needs Python 3.10 or later and `cryptography`; nothing of Penstock.

    python verify.py BUNDLE [--key VKEY] [--since OLD_BUNDLE] [--lang en|zh-Hant] [--json]

BUNDLE is the .zip file, or the folder it was unpacked to. Exit status: 0 verified, 1 not verified.

What is checked, so that no byte is left out:
1. the container: the .zip must be byte for byte what its contents make it;
2. statement.dsse.json: its signature (DSSE, Ed25519), and that it names the SHA-256 of manifest.json;
3. manifest.json: size and SHA-256 of every other file, and that there is no other file;
4. checkpoint.txt: the signed head of the log (C2SP tlog-checkpoint);
5. leaves.jsonl: every entry is in that log, at its place (RFC 9162 inclusion proofs);
6. consistency/: earlier heads are prefixes of this one (RFC 9162 consistency proofs);
7. where a batch's entry declares its number of finished requests, that as many are in the bundle; of a batch
   without such an entry it is said that nothing shows whether all of its requests are here.

Not checked, because the log does not hold it: the figures in measurements.json and exports/ are the signer's own
statement over these entries.

This one file is all that an auditor has to read, so it imports nothing that lies beside it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
except ImportError:
    sys.exit("verify.py needs the Python package 'cryptography': python -m pip install cryptography")

FORMAT = "penstock-evidence-bundle"
VERSION = 1
MANIFEST, STATEMENT, CHECKPOINT, VKEY = "manifest.json", "statement.dsse.json", "checkpoint.txt", "vkey.txt"
LEAVES, MEASUREMENTS, README, VERIFIER = "leaves.jsonl", "measurements.json", "README.txt", "verify.py"
CONSISTENCY_FOLDER = "consistency/"
REQUIRED = (CHECKPOINT, LEAVES, MEASUREMENTS, README, VERIFIER, VKEY)
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:penstock:evidence-bundle:v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MAX_NAME_BYTES = 200
MAX_FILES = 10_000
MAX_ZIP_BYTES = 2**32 - 1
MAX_DOCUMENT_BYTES = 32 * 1024 * 1024
MAX_LINE_BYTES = 1024 * 1024
MAX_PROOF_HASHES = 128
CHUNK_BYTES = 1024 * 1024
MAX_PROBLEMS = 50


# What was found


@dataclass(frozen=True)
class Finding:
    """Something wrong, and where: a file, a line of it, a leaf of the log, or a byte of the container."""

    file: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    line: int | None = None
    leaf: int | None = None
    byte: int | None = None

    def message(self, lang: str = "en") -> str:
        return translate(self.text, lang) % self.values

    def render(self, lang: str = "en") -> str:
        place = [self.file or translate("the container", lang)]
        for text, number in (("line %d", self.line), ("leaf %d", self.leaf), ("byte %d", self.byte)):
            if number is not None:
                place.append(translate(text, lang) % number)
        return f"{', '.join(place)}: {self.message(lang)}"


class Unreadable(Exception):
    """A part that is too damaged to go on with."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.render())
        self.finding = finding


@dataclass
class Report:
    """The outcome: what holds (`checks`) and what does not (`problems`)."""

    checks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # what the bundle leaves open
    key: Key | None = None
    key_pinned: bool = False
    head: Head | None = None
    roots: dict[int, bytes] = field(default_factory=dict)  # earlier heads proven to be prefixes, by size

    @property
    def verified(self) -> bool:
        return not self.problems

    def holds(self, text: str, **values: Any) -> None:
        self.checks.append((text, values))

    def leaves_open(self, text: str, **values: Any) -> None:
        if len(self.notes) < MAX_PROBLEMS:
            self.notes.append((text, values))

    def wrong(self, file: str, text: str, *, line: int | None = None, leaf: int | None = None, **values: Any) -> None:
        self.note(Finding(file, text, values, line, leaf))

    def note(self, finding: Finding) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(finding)

    def verdict(self, lang: str = "en") -> str:
        """One line."""
        if self.problems:
            text = translate("NOT VERIFIED: %(count)d problem(s); the first: %(first)s", lang)
            return text % {"count": len(self.problems), "first": self.problems[0].render(lang)}
        text = "VERIFIED with the key in the bundle: compare its fingerprint with one that reached you otherwise."
        if self.key_pinned:
            text = "VERIFIED with the key that you gave."
        if not self.notes:
            return translate(text, lang)
        return f"{translate(text, lang)} {translate('%d point(s) stay open, see above.', lang) % len(self.notes)}"

    def lines(self, lang: str = "en") -> list[str]:
        """The report in plain words; the verdict is the last line."""
        lines = [f"{translate('ok', lang)}   {translate(text, lang) % values}" for text, values in self.checks]
        lines += [f"{translate('open', lang)} {translate(text, lang) % values}" for text, values in self.notes]
        lines += [f"{translate('BAD', lang)}  {finding.render(lang)}" for finding in self.problems]
        if self.key is not None:
            values = {"vkey": self.key.vkey, "print": self.key.fingerprint}
            lines.append(translate("key  %(vkey)s", lang) % values)
            lines.append(translate("     fingerprint (SHA-256) %(print)s", lang) % values)
        return [*lines, self.verdict(lang)]

    def as_json(self, lang: str = "en") -> dict[str, Any]:
        """The same for programs."""
        key, head = self.key, self.head
        return {
            "verified": self.verified,
            "verdict": self.verdict(lang),
            "key": key and {"vkey": key.vkey, "fingerprint": key.fingerprint, "pinned": self.key_pinned},
            "checkpoint": head and {"origin": head.origin, "size": head.size, "root": head.root.hex()},
            "checks": [translate(text, lang) % values for text, values in self.checks],
            "open": [translate(text, lang) % values for text, values in self.notes],
            "problems": [
                {"file": f.file or None, "line": f.line, "leaf": f.leaf, "byte": f.byte, "message": f.message(lang)}
                for f in self.problems
            ],
        }


def fail(file: str, text: str, *, byte: int | None = None, **values: Any) -> NoReturn:
    raise Unreadable(Finding(file, text, values, byte=byte))


# The bundle's files, in a .zip or in a folder


class Files:
    """Names and sizes of the files, and their contents piece by piece."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.stream: BinaryIO | None = None
        self.sizes: dict[str, int] = {}

    def load(self, report: Report) -> None:
        """Finds the files. Raises Unreadable where that is impossible."""
        raise NotImplementedError

    def open(self, name: str) -> BinaryIO:
        """A stream that stands at the beginning of the file."""
        raise NotImplementedError

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def chunks(self, name: str) -> Iterator[bytes]:
        if name not in self.sizes:
            fail(name, "is missing")
        stream, left = self.open(name), self.sizes[name]
        while left:
            chunk = stream.read(min(left, CHUNK_BYTES))
            if not chunk:
                fail(name, "ends before its size is reached")
            left -= len(chunk)
            yield chunk

    def read(self, name: str) -> bytes:
        if self.sizes.get(name, 0) > MAX_DOCUMENT_BYTES:
            fail(name, "is larger than this file may be (%(size)d bytes)", size=self.sizes[name])
        return b"".join(self.chunks(name))

    def lines(self, name: str) -> Iterator[bytes]:
        rest = b""
        for chunk in self.chunks(name):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if len(rest) > MAX_LINE_BYTES:
                break
        if rest:
            fail(name, "has a line that is too long or does not end")


class Folder(Files):
    """An unpacked bundle. Links are not followed."""

    def load(self, report: Report) -> None:
        for folder, folders, files in os.walk(self.path):
            links = [entry for entry in folders if os.path.islink(os.path.join(folder, entry))]
            for entry in files + links:
                full = os.path.join(folder, entry)
                name = os.path.relpath(full, self.path).replace(os.sep, "/")
                if os.path.islink(full) or not os.path.isfile(full) or not is_safe(name):
                    report.wrong(printable(name), "is not a plain file with a plain name")
                    continue
                self.sizes[name] = os.path.getsize(full)
                if len(self.sizes) > MAX_FILES:
                    fail("", "holds more than %(count)d files", count=MAX_FILES)
        report.holds("folder: %(count)d files", count=len(self.sizes))

    def open(self, name: str) -> BinaryIO:
        self.close()
        self.stream = open(os.path.join(self.path, *name.split("/")), "rb")  # noqa: SIM115 - close() ends it
        return self.stream


class Zip(Files):
    """A .zip as Penstock writes it: stored files in order of name, nothing between, before or after them.

    Only names and sizes are taken from it. From them and from the contents the headers and the directory are
    made again and must be equal, so that there is no byte in which something could hide.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.offsets: dict[str, int] = {}

    def load(self, report: Report) -> None:
        self.stream = open(self.path, "rb")  # noqa: SIM115 - close() ends it
        total, at = os.path.getsize(self.path), 0
        entries: list[ZipEntry] = []
        while self._bytes(at, 4) != b"PK\x01\x02":
            entry = self._entry(at, total)
            if entries and entry.name <= entries[-1].name:
                fail("", "the file names are not in order", byte=at)
            if len(entries) == MAX_FILES:
                fail("", "holds more than %(count)d files", count=MAX_FILES)
            expected = zip_header(entry)
            header = self._bytes(at, len(expected))
            self.sizes[entry.name], self.offsets[entry.name] = entry.size, at + len(expected)
            if header != expected:
                at_byte = at + first_difference(header, expected)
                text = "the header of %(name)s is not as Penstock writes it"
                report.note(Finding("", text, {"name": entry.name}, byte=at_byte))
            elif zip_crc(self.chunks(entry.name)) != entry.crc:
                report.wrong(entry.name, "the content does not have the checksum in the container")
            entries.append(entry)
            at += len(expected) + entry.size
        directory = zip_directory(entries)
        rest = self._bytes(at, len(directory) + 1)
        if rest != directory:
            at_byte = at + first_difference(rest, directory)
            report.note(Finding("", "the directory does not follow from the files", byte=at_byte))
        else:
            text = "container: %(count)d files in %(size)d bytes, every byte accounted for"
            report.holds(text, count=len(entries), size=total)

    def open(self, name: str) -> BinaryIO:
        assert self.stream is not None
        self.stream.seek(self.offsets[name])
        return self.stream

    def _bytes(self, offset: int, size: int) -> bytes:
        assert self.stream is not None
        self.stream.seek(offset)
        return self.stream.read(size)

    def _entry(self, at: int, total: int) -> ZipEntry:
        fixed = self._bytes(at, ZIP_HEADER.size)
        if len(fixed) < ZIP_HEADER.size or fixed[:4] != b"PK\x03\x04":
            fail("", "neither a file nor the directory begins here", byte=at)
        crc, size, name_bytes = struct.unpack_from("<I4xIH", fixed, 14)
        name = self._bytes(at + len(fixed), min(name_bytes, MAX_NAME_BYTES)).decode("ascii", "replace")
        if len(name) != name_bytes or not is_safe(name):
            fail("", "the name of a file is not plain", byte=at + len(fixed))
        if at + len(fixed) + name_bytes + size > total:
            fail("", "the file %(name)s reaches beyond the end", byte=at, name=name)
        return ZipEntry(name, size, crc, at)


@dataclass(frozen=True)
class ZipEntry:
    """A stored file: CRC-32 of its content, and the offset of its header."""

    name: str
    size: int
    crc: int
    offset: int


ZIP_HEADER = struct.Struct("<4sHHHHHIIIHH")
ZIP_DIRECTORY = struct.Struct("<4sHHHHHHIIIHHHHHII")
ZIP_END = struct.Struct("<4sHHHHIIH")
ZIP_DATE = 0x21  # 1980-01-01: the container tells no time


def zip_header(entry: ZipEntry) -> bytes:
    """Local file header (APPNOTE 4.3.7)."""
    name, size = entry.name.encode("ascii"), entry.size
    return ZIP_HEADER.pack(b"PK\x03\x04", 20, 0, 0, 0, ZIP_DATE, entry.crc, size, size, len(name), 0) + name


def zip_directory(entries: Sequence[ZipEntry]) -> bytes:
    """Central directory and its end record (APPNOTE 4.3.12, 4.3.16)."""
    parts, end = [], 0
    for entry in entries:
        name, size = entry.name.encode("ascii"), entry.size
        made = (b"PK\x01\x02", 3 << 8 | 20, 20, 0, 0, 0, ZIP_DATE, entry.crc, size, size, len(name))
        parts.append(ZIP_DIRECTORY.pack(*made, 0, 0, 0, 0, 0o100644 << 16, entry.offset) + name)
        end = entry.offset + len(zip_header(entry)) + size
    directory, count = b"".join(parts), len(entries)
    return directory + ZIP_END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), end, 0)


def zip_crc(chunks: Iterator[bytes]) -> int:
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return crc


def is_safe(name: str) -> bool:
    """Whether a path is plain ASCII, relative, and without any dot segment."""
    return len(name) <= MAX_NAME_BYTES and SAFE_NAME.fullmatch(name) is not None


def printable(text: str) -> str:
    return ascii(text)[1:-1]


def first_difference(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


# Keys, notes and statements


@dataclass(frozen=True)
class Key:
    """An Ed25519 verifier key of C2SP signed-note."""

    vkey: str
    name: str
    key_hash: bytes
    public: bytes

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.public).hexdigest()

    def signed(self, signature: bytes, message: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Head:
    """What a checkpoint says."""

    origin: str
    size: int
    root: bytes


def parse_key(vkey: str) -> Key | None:
    name, _, rest = vkey.partition("+")
    key_hash, _, encoded = rest.partition("+")
    raw = unbase64(encoded)
    if not name or raw is None or len(raw) != 33 or raw[0] != 1:
        return None
    computed = hashlib.sha256(name.encode("utf-8", "replace") + b"\n" + raw).digest()[:4]
    return Key(vkey, name, computed, raw[1:]) if key_hash == computed.hex() else None


def parse_head(note: str) -> Head | None:
    lines = note.partition("\n\n")[0].split("\n")
    if len(lines) < 3 or re.fullmatch("0|[1-9][0-9]{0,18}", lines[1]) is None:
        return None
    root = unbase64(lines[2])
    return Head(lines[0], int(lines[1]), root) if root is not None and len(root) == 32 else None


def note_signed(note: str, key: Key) -> bool:
    text, _, signatures = note.rpartition("\n\n")
    for line in signatures.split("\n"):
        dash, _, rest = line.partition(" ")
        name, _, encoded = rest.partition(" ")
        blob = unbase64(encoded)
        if dash == "\u2014" and name == key.name and blob and blob[:4] == key.key_hash:
            return key.signed(blob[4:], f"{text}\n".encode("utf-8", "replace"))
    return False


def pae(payload_type: str, payload: bytes) -> bytes:
    """What a DSSE signature covers."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(payload), payload)


def unbase64(text: Any) -> bytes | None:
    """The bytes, or None unless `text` is their one right spelling."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (ValueError, TypeError):
        return None
    return raw if base64.b64encode(raw).decode() == text else None


def parse_json(raw: bytes) -> Any:
    """The value. Raises ValueError for anything but plain JSON in UTF-8 without repeated names."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is repeated")
        return found

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def dump_json(value: Any) -> bytes:
    """The one spelling in which Penstock writes a JSON document: one line, also for readers that end a line at more
    characters than JSON does.
    """
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    text = text.translate({ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
    return text.encode("utf-8", "backslashreplace") + b"\n"


# Merkle proofs


def leaf_hash(entry: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def included(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """RFC 9162, 2.1.3.2."""
    if not 0 <= index < size:
        return False
    fn, sn, r = index, size - 1, leaf
    for p in proof:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            r = node_hash(p, r)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            r = node_hash(r, p)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and r == root


def consistent(old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> bool:
    """RFC 9162, 2.1.4.2, for 0 < old <= new."""
    if not 0 < old <= new:
        return False
    if old == new:
        return not proof and old_root == new_root
    path = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    if not path:
        return False
    fn, sn = old - 1, new - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    fr = sr = path[0]
    for c in path[1:]:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            fr, sr = node_hash(c, fr), node_hash(c, sr)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            sr = node_hash(sr, c)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and fr == old_root and sr == new_root


def parse_proof(value: Any) -> list[bytes] | None:
    if not isinstance(value, list) or len(value) > MAX_PROOF_HASHES:
        return None
    hashes = [raw for raw in map(unbase64, value) if raw is not None and len(raw) == 32]
    return hashes if len(hashes) == len(value) else None


# The checks


def verify_bundle(path: str, key: str | None = None, since: str | None = None) -> Report:
    """Checks the bundle at `path`; with `key` (a vkey) only that signer counts; `since` is an earlier bundle."""
    report = Report()
    files = Folder(path) if os.path.isdir(path) else Zip(path)
    checks = (check_statement, check_files, check_head, check_leaves, check_consistency)
    try:
        if attempt(report, lambda: files.load(report)):
            attempt(report, lambda: check_key(files, report, key))
            for check in checks:
                attempt(report, lambda: check(files, report))  # noqa: B023 - called before the next turn
    finally:
        files.close()
    if since is not None:
        check_since(report, since)
    return report


def attempt(report: Report, step: Callable[[], None]) -> bool:
    """Runs one check; damage that ends it is noted, so that the other checks still run."""
    try:
        step()
    except Unreadable as damage:
        report.note(damage.finding)
    except OSError as error:
        report.wrong("", "cannot be read: %(reason)s", reason=error.strerror)
    else:
        return True
    return False


def check_key(files: Files, report: Report, pinned: str | None) -> None:
    """The key inside, and whether it is the one that the auditor trusts."""
    if pinned is not None:
        report.key, report.key_pinned = parse_key(pinned.strip()), True
        if report.key is None:
            fail("--key", "the key given is not a verifier key (name+hash+key)")
    inside = files.read(VKEY)
    key = parse_key(as_text(VKEY, inside)[:-1])
    if key is None or inside != f"{key.vkey}\n".encode():
        fail(VKEY, "is not a verifier key whose parts agree")
    if report.key is None:
        report.key = key
    elif key.vkey != report.key.vkey:
        report.wrong(VKEY, "is not the key that you gave: somebody else signed, or the key was exchanged")


def check_statement(files: Files, report: Report) -> None:
    """The signed statement, and that it speaks of this manifest."""
    raw = files.read(STATEMENT)
    envelope = as_object(STATEMENT, raw)
    signatures, payload = envelope.get("signatures"), unbase64(envelope.get("payload"))
    if (
        set(envelope) != {"payload", "payloadType", "signatures"}
        or envelope["payloadType"] != PAYLOAD_TYPE
        or payload is None
        or not (isinstance(signatures, list) and len(signatures) == 1 and isinstance(signatures[0], dict))
        or set(signatures[0]) != {"keyid", "sig"}
        or not all(isinstance(value, str) for value in signatures[0].values())
        or raw != dump_json(envelope)
    ):
        fail(STATEMENT, "is not written as Penstock writes it")
    if report.key is None:
        fail(STATEMENT, "cannot be checked without a key")
    if signatures[0]["keyid"] != report.key.key_hash.hex():
        fail(STATEMENT, "names another key than %(key)s", key=report.key.key_hash.hex())
    signature = unbase64(signatures[0]["sig"])
    if signature is None or not report.key.signed(signature, pae(PAYLOAD_TYPE, payload)):
        fail(STATEMENT, "the signature does not match: the statement was changed, or another key signed it")
    statement = as_object(STATEMENT, payload)
    digest = hashlib.sha256(files.read(MANIFEST)).hexdigest()
    if statement.get("_type") != STATEMENT_TYPE or statement.get("predicateType") != PREDICATE_TYPE:
        fail(STATEMENT, "is a statement of another kind")
    if statement.get("subject") != [{"digest": {"sha256": digest}, "name": MANIFEST}]:
        fail(MANIFEST, "is not the manifest that was signed: its SHA-256 is %(digest)s", digest=digest)
    report.holds("statement: signed by %(name)s; it names this manifest", name=report.key.name)


def check_files(files: Files, report: Report) -> None:
    """Size and SHA-256 of every file, and that the manifest lists all of them and no other."""
    manifest = as_object(MANIFEST, files.read(MANIFEST))
    rows = manifest.get("files")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION or not isinstance(rows, list):
        fail(MANIFEST, "is not a manifest of a format that this verifier knows")
    listed: set[str] = set()
    faults = len(report.problems)
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("path"), str) or row["path"] in listed:
            fail(MANIFEST, "has a row without a path of its own")
        name, said = row["path"], row.get("size")
        listed.add(name)
        if name not in files.sizes:
            report.wrong(printable(name), "is listed in the manifest but missing")
        elif files.sizes[name] != said:
            report.wrong(name, "has %(size)d bytes, the manifest says %(said)s", size=files.sizes[name], said=said)
        else:
            digest = hashlib.sha256()
            for chunk in files.chunks(name):
                digest.update(chunk)
            if digest.hexdigest() != row.get("sha256"):
                report.wrong(name, "was changed: its SHA-256 is not the one in the manifest")
    for name in sorted(set(files.sizes) - listed - {MANIFEST, STATEMENT}):
        report.wrong(name, "is not listed in the manifest")
    for name in sorted(set(REQUIRED) - listed):
        report.wrong(name, "is missing")
    if len(report.problems) == faults:
        report.holds("manifest: %(count)d files have the size and SHA-256 that it lists", count=len(rows))


def check_head(files: Files, report: Report) -> None:
    """The signed head of the log."""
    note = as_text(CHECKPOINT, files.read(CHECKPOINT))
    report.head = head = parse_head(note)
    if head is None:
        fail(CHECKPOINT, "is not a checkpoint (origin, size, root)")
    if report.key is None:
        fail(CHECKPOINT, "cannot be checked without a key")
    if head.origin != report.key.name:
        fail(CHECKPOINT, "is of the log %(origin)s, not of the key's", origin=head.origin)
    if not note_signed(note, report.key):
        fail(CHECKPOINT, "the signature does not match: the head was changed, or another key signed it")
    text = "checkpoint: the log %(origin)s has %(size)d entries and the root %(root)s"
    report.holds(text, origin=head.origin, size=head.size, root=head.root.hex())


def check_leaves(files: Files, report: Report) -> None:
    """Every entry against the root, and the batches' own counts against what is here."""
    head, faults = report.head, len(report.problems)
    if head is None:
        fail(LEAVES, "cannot be checked without the head of the log")
    kinds: dict[str, int] = {}
    finished: dict[str, int] = {}
    declared: list[tuple[int, int, str, int]] = []
    last, number = -1, 0
    for number, line in enumerate(files.lines(LEAVES), 1):
        try:
            index, text, proof = parse_leaf(line)
            entry = parse_json(text.encode())
            kind, subject, payload = str(entry["kind"]), str(entry["subject"]), dict(entry["payload"])
        except (ValueError, KeyError, TypeError):
            report.wrong(LEAVES, "is not an entry with its index and proof", line=number)
            continue
        if index <= last:
            report.wrong(LEAVES, "is out of order", line=number, leaf=index)
        last = index
        if not included(leaf_hash(text.encode()), index, head.size, proof, head.root):
            text = "the entry is not in the log at this place: it or its proof was changed"
            report.wrong(LEAVES, text, line=number, leaf=index)
        kinds[kind] = kinds.get(kind, 0) + 1
        if kind == "request.finished":
            batch = str(payload.get("batch"))
            finished[batch] = finished.get(batch, 0) + 1
        elif kind.startswith("batch.") and isinstance(payload.get("request_leaves"), int):
            declared.append((number, index, subject, payload["request_leaves"]))
    for number_declared, index, batch, count in declared:
        here = finished.get(batch, 0)
        if here != count:
            text = "batch %(batch)s had %(count)d finished requests, the bundle has %(here)d"
            report.wrong(LEAVES, text, line=number_declared, leaf=index, batch=batch, count=count, here=here)
        else:
            text = "batch %(batch)s: all of its %(count)d finished requests are here"
            report.holds(text, batch=batch, count=count)
    for batch in sorted(finished.keys() - {batch for _, _, batch, _ in declared} - {"None"}):
        text = "batch %(batch)s: no entry here says how many requests it had; some of them may have been left out"
        report.leaves_open(text, batch=printable(batch))
    chosen = selected_batch(files)
    if chosen and chosen not in finished and all(batch != chosen for _, _, batch, _ in declared):
        text = "batch %(batch)s: the bundle was made about it, and holds no entry of its requests"
        report.leaves_open(text, batch=printable(chosen))
    if len(report.problems) == faults:
        summary = ", ".join(f"{printable(kind)} {kinds[kind]}" for kind in sorted(kinds))
        text = "leaves: %(count)d entries are in the log, each at its place (%(kinds)s)"
        report.holds(text, count=number, kinds=summary or "-")


def selected_batch(files: Files) -> str | None:
    """The batch that the bundle says it is about."""
    selection = as_object(MANIFEST, files.read(MANIFEST)).get("selection")
    batch = selection.get("batch") if isinstance(selection, dict) else None
    return batch if isinstance(batch, str) else None


def parse_leaf(line: bytes) -> tuple[int, str, list[bytes]]:
    """Index, entry and proof of a line. Raises ValueError."""
    value = parse_json(line)
    if not isinstance(value, dict) or set(value) != {"index", "entry", "proof"}:
        raise ValueError("a leaf has an index, an entry and a proof")
    index, entry, proof = value["index"], value["entry"], parse_proof(value["proof"])
    if type(index) is not int or not isinstance(entry, str) or proof is None:
        raise ValueError("a part of the leaf is of the wrong type")
    return index, entry, proof


def check_consistency(files: Files, report: Report) -> None:
    """Earlier heads: signed by the same key, and prefixes of this log."""
    head, key = report.head, report.key
    for name in sorted(files.sizes):
        if not name.startswith(CONSISTENCY_FOLDER):
            continue
        document = as_object(name, files.read(name))
        note, proof = document.get("checkpoint"), parse_proof(document.get("proof"))
        old = parse_head(note) if isinstance(note, str) else None
        if not isinstance(note, str) or old is None or proof is None:
            report.wrong(name, "is not an earlier head with its proof")
        elif head is None or key is None:
            report.wrong(name, "cannot be checked without the head of the log")
        elif old.origin != key.name or not note_signed(note, key):
            report.wrong(name, "the earlier head is not signed by this key")
        elif not consistent(old.size, head.size, proof, old.root, head.root):
            text = "the log of %(old)d entries is not the beginning of this one: history was rewritten"
            report.wrong(name, text, old=old.size)
        else:
            report.roots[old.size] = old.root
            text = "consistency: the first %(old)d entries are as they were signed then"
            report.holds(text, old=old.size)


def check_since(report: Report, path: str) -> None:
    """An earlier bundle: verified by itself, and its log the beginning of this one's."""
    if report.key is None or report.head is None:
        return
    old, new = verify_bundle(path, key=report.key.vkey), report.head
    for finding in old.problems:
        report.wrong("--since", "the earlier bundle: %(problem)s", problem=finding.render())
    if old.head is None:
        return
    known = new.root if old.head.size == new.size else report.roots.get(old.head.size)
    sizes = {"old": old.head.size, "new": new.size}
    if old.head.size > new.size:
        report.wrong("--since", "the log had %(old)d entries then and has only %(new)d now", **sizes)
    elif known is None:
        text = "this bundle has no proof from %(old)d entries: ask for an export that has"
        report.wrong("--since", text, **sizes)
    elif known != old.head.root:
        report.wrong("--since", "the first %(old)d entries are not those of the earlier bundle", **sizes)
    else:
        report.holds("since: the earlier bundle's %(old)d entries stand unchanged in this log", **sizes)


def as_text(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except ValueError:
        fail(name, "is not text in UTF-8")


def as_object(name: str, raw: bytes) -> dict[str, Any]:
    try:
        value = parse_json(raw)
    except ValueError as error:
        fail(name, "is not plain JSON (%(reason)s)", reason=printable(str(error)))
    if not isinstance(value, dict):
        fail(name, "is not a JSON object")
    return value


# Words


def translate(text: str, lang: str) -> str:
    return ZH_HANT[text] if lang == "zh-Hant" else text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Checks a Penstock evidence bundle, offline. 離線查驗 Penstock 證據包。",
        epilog="Exit status: 0 verified, 1 not verified, 2 wrong usage.",
    )
    parser.add_argument("bundle", help="the .zip file, or the folder that it was unpacked to")
    parser.add_argument("--key", metavar="VKEY", help="verifier key that you trust; no other will do")
    parser.add_argument("--since", metavar="OLD_BUNDLE", help="an earlier bundle, to see that nothing was rewritten")
    parser.add_argument("--lang", choices=["en", "zh-Hant"], default="en", help="language of the report")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    options = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the check
    report = verify_bundle(options.bundle, key=options.key, since=options.since)
    if options.json:
        text = json.dumps(report.as_json(options.lang), ensure_ascii=False, indent=2)
    else:
        text = "\n".join(report.lines(options.lang))
    sys.stdout.write(f"{text}\n")
    return 0 if report.verified else 1


# fmt: off
ZH_HANT = {
    "the container": "容器檔",
    "line %d": "第 %d 行",
    "leaf %d": "葉節點 %d",
    "byte %d": "第 %d 位元組",
    "ok": "通過",
    "BAD": "不符",
    "open": "未定",
    "%d point(s) stay open, see above.": "尚有 %d 點未能確定，詳見上文。",
    "batch %(batch)s: no entry here says how many requests it had; some of them may have been left out":
        "批次 %(batch)s：此處沒有紀錄說明它有多少請求，可能有部分遭到略去",
    "batch %(batch)s: the bundle was made about it, and holds no entry of its requests":
        "批次 %(batch)s：證據包以它為對象，卻不含其任何請求的紀錄",
    "key  %(vkey)s": "金鑰  %(vkey)s",
    "     fingerprint (SHA-256) %(print)s": "      指紋（SHA-256）%(print)s",
    "NOT VERIFIED: %(count)d problem(s); the first: %(first)s":
        "查驗未通過：%(count)d 個問題，第一個是：%(first)s",
    "VERIFIED with the key that you gave.": "查驗通過，使用您提供的金鑰。",
    "VERIFIED with the key in the bundle: compare its fingerprint with one that reached you otherwise.":
        "查驗通過，使用證據包內附的金鑰：請與您經由其他管道取得的指紋比對。",
    "folder: %(count)d files": "資料夾：共 %(count)d 個檔案",
    "container: %(count)d files in %(size)d bytes, every byte accounted for":
        "容器檔：%(count)d 個檔案，共 %(size)d 位元組，逐一核對無誤",
    "statement: signed by %(name)s; it names this manifest": "聲明：由 %(name)s 簽署，所指的正是這份清單",
    "manifest: %(count)d files have the size and SHA-256 that it lists":
        "清單：%(count)d 個檔案的大小與 SHA-256 均與清單相符",
    "checkpoint: the log %(origin)s has %(size)d entries and the root %(root)s":
        "檢查點：日誌 %(origin)s 有 %(size)d 筆紀錄，根雜湊為 %(root)s",
    "leaves: %(count)d entries are in the log, each at its place (%(kinds)s)":
        "葉節點：%(count)d 筆紀錄都在日誌中，位置正確（%(kinds)s）",
    "batch %(batch)s: all of its %(count)d finished requests are here":
        "批次 %(batch)s：全部 %(count)d 個已完成的請求都在其中",
    "consistency: the first %(old)d entries are as they were signed then":
        "一致性：前 %(old)d 筆紀錄與當時簽署時相同",
    "since: the earlier bundle's %(old)d entries stand unchanged in this log":
        "先前證據包：其 %(old)d 筆紀錄在本日誌中均未變動",
    "is missing": "缺少此檔案",
    "ends before its size is reached": "檔案內容比標示的大小短",
    "is larger than this file may be (%(size)d bytes)": "超過此檔案允許的大小（%(size)d 位元組）",
    "has a line that is too long or does not end": "有一行過長或沒有結尾",
    "is not a plain file with a plain name": "不是一般檔案，或名稱不符規定",
    "holds more than %(count)d files": "檔案超過 %(count)d 個",
    "the file names are not in order": "檔名順序不對",
    "the header of %(name)s is not as Penstock writes it": "%(name)s 的檔頭與 Penstock 所寫的不同",
    "the content does not have the checksum in the container": "內容與容器檔記載的檢查碼不符",
    "the directory does not follow from the files": "目錄與檔案不符",
    "neither a file nor the directory begins here": "此處既非檔案也非目錄的開頭",
    "the name of a file is not plain": "檔名不符規定",
    "the file %(name)s reaches beyond the end": "檔案 %(name)s 超出結尾",
    "cannot be read: %(reason)s": "無法讀取：%(reason)s",
    "the key given is not a verifier key (name+hash+key)": "提供的不是驗證金鑰（名稱+雜湊+金鑰）",
    "is not a verifier key whose parts agree": "不是各部分相符的驗證金鑰",
    "is not the key that you gave: somebody else signed, or the key was exchanged":
        "不是您提供的金鑰：由他人簽署，或金鑰已被調換",
    "is not written as Penstock writes it": "寫法與 Penstock 所寫的不同",
    "cannot be checked without a key": "沒有金鑰，無法查驗",
    "names another key than %(key)s": "所指的金鑰不是 %(key)s",
    "the signature does not match: the statement was changed, or another key signed it":
        "簽章不符：聲明已被更改，或由其他金鑰簽署",
    "is a statement of another kind": "是另一種聲明",
    "is not the manifest that was signed: its SHA-256 is %(digest)s":
        "不是所簽署的清單：其 SHA-256 為 %(digest)s",
    "is not a manifest of a format that this verifier knows": "不是本查驗程式認得的清單格式",
    "has a row without a path of its own": "有一列沒有自己的路徑",
    "is listed in the manifest but missing": "列於清單，但檔案不存在",
    "has %(size)d bytes, the manifest says %(said)s": "有 %(size)d 位元組，清單記載為 %(said)s",
    "was changed: its SHA-256 is not the one in the manifest": "已被更改：其 SHA-256 與清單不符",
    "is not listed in the manifest": "未列於清單",
    "is not a checkpoint (origin, size, root)": "不是檢查點（來源、大小、根雜湊）",
    "is of the log %(origin)s, not of the key's": "屬於日誌 %(origin)s，與金鑰不符",
    "the signature does not match: the head was changed, or another key signed it":
        "簽章不符：檢查點已被更改，或由其他金鑰簽署",
    "cannot be checked without the head of the log": "沒有日誌的檢查點，無法查驗",
    "is not an entry with its index and proof": "不是附有索引與證明的紀錄",
    "is out of order": "順序不對",
    "the entry is not in the log at this place: it or its proof was changed":
        "此紀錄不在日誌的這個位置：紀錄或其證明已被更改",
    "batch %(batch)s had %(count)d finished requests, the bundle has %(here)d":
        "批次 %(batch)s 有 %(count)d 個已完成的請求，證據包內有 %(here)d 個",
    "is not an earlier head with its proof": "不是附有證明的先前檢查點",
    "the earlier head is not signed by this key": "先前的檢查點並非由此金鑰簽署",
    "the log of %(old)d entries is not the beginning of this one: history was rewritten":
        "%(old)d 筆紀錄的日誌不是本日誌的開頭：歷史已被改寫",
    "the earlier bundle: %(problem)s": "先前的證據包：%(problem)s",
    "the log had %(old)d entries then and has only %(new)d now":
        "日誌當時有 %(old)d 筆紀錄，現在只有 %(new)d 筆",
    "this bundle has no proof from %(old)d entries: ask for an export that has":
        "本證據包沒有從 %(old)d 筆紀錄起的證明：請索取附有證明的匯出檔",
    "the first %(old)d entries are not those of the earlier bundle": "前 %(old)d 筆紀錄與先前的證據包不同",
    "is not text in UTF-8": "不是 UTF-8 文字",
    "is not plain JSON (%(reason)s)": "不是單純的 JSON（%(reason)s）",
    "is not a JSON object": "不是 JSON 物件",
}
# fmt: on


if __name__ == "__main__":
    sys.exit(main())

"""The evidence bundle: one .zip that an outsider checks with nothing but Python and `cryptography`.

`governance.exports.verify` is both the verifier that travels in the bundle and the definition of the format (file
names, the bytes of the container, the spelling of JSON); this module writes what it reads. Every file is covered by
the manifest, the manifest by a signed in-toto statement (DSSE v1), and the container by being a function of its
contents: the same contents give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from governance.exports import verify
from governance.exports.bundle_readme import README_TEXT
from governance.ledger.checkpoint import verify_checkpoint_note
from governance.ledger.events import timestamp
from governance.ledger.keys import LedgerKey

EXPORTS_FOLDER = "exports/"


class BundleError(Exception):
    """A bundle that cannot be written as asked; nothing was left behind."""


@dataclass(frozen=True, slots=True)
class BundleLeaf:
    """An entry of the log with its audit path to the bundle's checkpoint."""

    index: int
    canonical: str
    proof: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class EarlierHead:
    """A head signed before, with the proof that its tree is the beginning of the bundle's."""

    size: int
    note: str
    proof: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class BundleSummary:
    """What was written; digests in hex."""

    path: Path
    size_bytes: int
    sha256: str
    manifest_sha256: str
    leaf_count: int
    tree_size: int
    root: str
    vkey: str
    fingerprint: str


def write_bundle(
    *,
    destination: Path,
    key: LedgerKey,
    checkpoint: str,
    leaves: Iterable[BundleLeaf],
    measurements: Sequence[Mapping[str, Any]],
    created_at: datetime,
    extra_files: Mapping[str, bytes] | None = None,
    earlier_heads: Iterable[EarlierHead] = (),
    selection: Mapping[str, str] | None = None,
) -> BundleSummary:
    """Writes the bundle aside and puts it in place whole; a file that is there already is replaced.

    `leaves` come in the order of their index and are streamed; `checkpoint` is the signed note that their proofs
    lead to; `extra_files` go to `exports/` under the names given; `selection` says what was chosen, for the reader.
    Raises `BundleError` for unusable names, figures without a JSON form, or more than a .zip of 4 GiB holds.
    """
    head = verify_checkpoint_note(checkpoint, key.verifier)
    aside = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}")
    spooled = aside.with_name(f"{aside.name}.leaves")
    try:
        leaf_count = _spool(spooled, leaves)
        contents: dict[str, bytes | Path] = {
            verify.CHECKPOINT: checkpoint.encode(),
            verify.LEAVES: spooled,
            verify.MEASUREMENTS: _readable_json(measurements),
            verify.README: README_TEXT.encode(),
            verify.VERIFIER: Path(verify.__file__).read_bytes(),
            verify.VKEY: f"{key.verifier}\n".encode(),
        }
        for earlier in earlier_heads:
            document = {"checkpoint": earlier.note, "proof": [_base64(item) for item in earlier.proof]}
            contents[f"{verify.CONSISTENCY_FOLDER}{earlier.size}.json"] = verify.dump_json(document)
        for name, content in (extra_files or {}).items():
            contents[_export_name(name)] = content
        about = {
            "created_at": timestamp(created_at),
            "leaves": leaf_count,
            "log": {"origin": head.origin, "root": _base64(head.root), "size": head.size},
            "selection": dict(selection or {}),
        }
        manifest = _manifest(contents, about)
        contents[verify.MANIFEST] = manifest
        contents[verify.STATEMENT] = _statement(manifest, about, key)
        sha256, size_bytes = _write_zip(aside, contents)
        aside.replace(destination)
    finally:
        aside.unlink(missing_ok=True)
        spooled.unlink(missing_ok=True)
    return BundleSummary(
        path=destination,
        size_bytes=size_bytes,
        sha256=sha256,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        leaf_count=leaf_count,
        tree_size=head.size,
        root=head.root.hex(),
        vkey=str(key.verifier),
        fingerprint=key.verifier.fingerprint,
    )


def _spool(path: Path, leaves: Iterable[BundleLeaf]) -> int:
    """Writes leaves.jsonl to a file of its own, since its size must be known before the container is written."""
    count = 0
    with path.open("wb") as file:
        for leaf in leaves:
            proof = [_base64(item) for item in leaf.proof]
            file.write(verify.dump_json({"entry": leaf.canonical, "index": leaf.index, "proof": proof}))
            count += 1
    return count


def _manifest(contents: Mapping[str, bytes | Path], about: Mapping[str, Any]) -> bytes:
    files = []
    for name in sorted(contents):
        digest, size = hashlib.sha256(), 0
        for chunk in _chunks(contents[name]):
            digest.update(chunk)
            size += len(chunk)
        files.append({"path": name, "sha256": digest.hexdigest(), "size": size})
    return _readable_json({"format": verify.FORMAT, "version": verify.VERSION, **about, "files": files})


def _statement(manifest: bytes, about: Mapping[str, Any], key: LedgerKey) -> bytes:
    """The in-toto statement v1 about the manifest, in a DSSE v1 envelope."""
    payload = verify.dump_json(
        {
            "_type": verify.STATEMENT_TYPE,
            "subject": [{"name": verify.MANIFEST, "digest": {"sha256": hashlib.sha256(manifest).hexdigest()}}],
            "predicateType": verify.PREDICATE_TYPE,
            "predicate": dict(about),
        }
    )
    signature = key.sign(verify.pae(verify.PAYLOAD_TYPE, payload))
    return verify.dump_json(
        {
            "payload": _base64(payload),
            "payloadType": verify.PAYLOAD_TYPE,
            "signatures": [{"keyid": key.verifier.key_hash.hex(), "sig": _base64(signature)}],
        }
    )


def _write_zip(path: Path, contents: Mapping[str, bytes | Path]) -> tuple[str, int]:
    """Writes the container; returns its SHA-256 and its size in bytes."""
    if len(contents) > verify.MAX_FILES:
        raise BundleError(f"a bundle holds at most {verify.MAX_FILES} files, this one {len(contents)}")
    with path.open("wb") as file:
        out = _Digesting(file)
        entries = []
        for name in sorted(contents):
            crc = size = 0
            for chunk in _chunks(contents[name]):
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
            if out.size + size > verify.MAX_ZIP_BYTES:
                raise BundleError("the bundle would be larger than 4 GiB; export a narrower selection")
            entry = verify.ZipEntry(name, size, crc, out.size)
            entries.append(entry)
            out.write(verify.zip_header(entry))
            for chunk in _chunks(contents[name]):
                out.write(chunk)
        directory = verify.zip_directory(entries)
        if out.size + len(directory) > verify.MAX_ZIP_BYTES:
            raise BundleError("the bundle would be larger than 4 GiB; export a narrower selection")
        out.write(directory)
        file.flush()
        os.fsync(file.fileno())
    return out.digest.hexdigest(), out.size


class _Digesting:
    """Writes, counts and hashes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self.digest.update(chunk)
        self.size += len(chunk)


def _chunks(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while chunk := file.read(verify.CHUNK_BYTES):
            yield chunk


def _export_name(name: str) -> str:
    path = f"{EXPORTS_FOLDER}{name}"
    if not verify.is_safe(path):
        raise BundleError(f"{name!r}: names in a bundle are ASCII letters, digits, '.', '_', '-' and '/' between them")
    return path


def _readable_json(value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False, default=_json_form)
    except (TypeError, ValueError) as error:
        raise BundleError(f"a figure has no JSON form: {error}") from error
    return text.encode() + b"\n"


def _json_form(value: object) -> str:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime):
        return timestamp(value)
    raise TypeError(f"{type(value).__name__} {value!r}")


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()

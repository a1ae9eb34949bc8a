"""The signed head of the log: C2SP tlog-checkpoint in a C2SP signed-note, signed with Ed25519.

A note is text that ends in a newline, an empty line, and signature lines `— name base64(hash ||
signature)`. The text of a checkpoint is three lines: origin, tree size in decimal, root hash in base64.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from governance.ledger.keys import LedgerKey, VerifierKey
from governance.ledger.tree import HASH_BYTES

_SIGNATURE_PREFIX = "\N{EM DASH} "


class NoteError(ValueError):
    """A note that is malformed, or that the key given did not sign."""


class CheckpointError(ValueError):
    """A note's text that is not a checkpoint."""


@dataclass(frozen=True, slots=True)
class TreeHead:
    """What a checkpoint says: this log (`origin`) has `size` leaves with this `root` (32 bytes)."""

    origin: str
    size: int
    root: bytes

    def __post_init__(self) -> None:
        if not self.origin or "\n" in self.origin:
            raise CheckpointError("the origin must be one non-empty line")
        if self.size < 0:
            raise CheckpointError(f"the tree size {self.size} is negative")
        if len(self.root) != HASH_BYTES:
            raise CheckpointError(f"the root hash has {len(self.root)} bytes, not {HASH_BYTES}")

    def text(self) -> str:
        """The note text."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    @classmethod
    def parse(cls, text: str) -> TreeHead:
        """Reads the note text; lines after the third are extensions and are left alone."""
        lines = text.split("\n")
        if len(lines) < 4 or lines[-1] != "":
            raise CheckpointError("a checkpoint has three lines: origin, size, root hash")
        origin, size, encoded = lines[:3]
        if not (size.isascii() and size.isdecimal()) or len(size) > 19 or size != str(int(size)):
            raise CheckpointError(f"the tree size {size[:40]!r} is not a plain decimal number")
        return cls(origin, int(size), _decode(encoded, "root hash"))


def sign_note(text: str, key: LedgerKey) -> str:
    """The note: text, empty line, signature line."""
    if not text.endswith("\n"):
        raise NoteError("the text of a note must end in a newline")
    signature = base64.b64encode(key.verifier.key_hash + key.sign(text.encode())).decode()
    return f"{text}\n{_SIGNATURE_PREFIX}{key.name} {signature}\n"


def open_note(note: str, key: VerifierKey) -> str:
    """The text of a note that `key` signed; other keys' signatures are ignored, as specified."""
    text, separator, signatures = note.rpartition("\n\n")
    if not separator or not signatures.endswith("\n"):
        raise NoteError("a note has a text, an empty line and signature lines")
    text += "\n"
    for line in signatures[:-1].split("\n"):
        prefix, _, rest = line.partition(" ")
        name, _, encoded = rest.partition(" ")
        if f"{prefix} " != _SIGNATURE_PREFIX or not name or not encoded:
            raise NoteError(f"malformed signature line: {line[:80]!r}")
        blob = _decode(encoded, "signature")
        if name != key.name or blob[:4] != key.key_hash:
            continue
        if not key.verify(text.encode(), blob[4:]):
            raise NoteError(f"the signature of {name} does not match the text")
        return text
    raise NoteError(f"no signature by {key.name} (key {key.key_hash.hex()})")


def sign_checkpoint_note(head: TreeHead, key: LedgerKey) -> str:
    """The signed checkpoint; the key's name must be the log's origin."""
    if key.name != head.origin:
        raise CheckpointError(f"the key is named {key.name!r}, the log {head.origin!r}")
    return sign_note(head.text(), key)


def verify_checkpoint_note(note: str, key: VerifierKey) -> TreeHead:
    """The head that the note holds. Raises `NoteError` or `CheckpointError`."""
    head = TreeHead.parse(open_note(note, key))
    if head.origin != key.name:
        raise CheckpointError(f"the checkpoint is of log {head.origin!r}, the key of {key.name!r}")
    return head


def _decode(encoded: str, what: str) -> bytes:
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"the {what} is not base64: {error}") from error
    if base64.b64encode(raw).decode() != encoded:
        raise CheckpointError(f"the {what} is base64 with stray bits")
    return raw

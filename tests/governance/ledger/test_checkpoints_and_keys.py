"""Signed notes against the published example of the Go note package; keys on disk."""

from __future__ import annotations

import base64
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from governance.ledger import keys
from governance.ledger.checkpoint import (
    CheckpointError,
    NoteError,
    TreeHead,
    open_note,
    sign_checkpoint_note,
    sign_note,
    verify_checkpoint_note,
)
from governance.ledger.keys import KeyFileError, LedgerKey, VerifierKey, VerifierKeyError

# The example of golang.org/x/mod/sumdb/note.
SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
NOTE = (
    f"{TEXT}\n— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZ"
    "SNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)

KEY = LedgerKey("example.test/ledger", Ed25519PrivateKey.from_private_bytes(b"\x07" * 32))
HEAD = TreeHead("example.test/ledger", 42, bytes(range(32)))


def test_the_published_note_is_signed_and_opened_byte_for_byte() -> None:
    key = LedgerKey("PeterNeumann", Ed25519PrivateKey.from_private_bytes(SEED))
    assert str(key.verifier) == VKEY
    assert sign_note(TEXT, key) == NOTE
    assert open_note(NOTE, VerifierKey.parse(VKEY)) == TEXT


def test_signatures_of_others_are_ignored_but_ours_must_be_there() -> None:
    note = sign_note(TEXT, KEY)
    both = note + NOTE.rpartition("\n\n")[2]
    assert open_note(both, KEY.verifier) == TEXT
    assert open_note(both, VerifierKey.parse(VKEY)) == TEXT
    with pytest.raises(NoteError, match=r"no signature by example\.test"):
        open_note(NOTE, KEY.verifier)


def test_a_checkpoint_is_origin_size_and_root() -> None:
    note = sign_checkpoint_note(HEAD, KEY)
    assert note.split("\n")[:4] == [
        "example.test/ledger",
        "42",
        "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
        "",
    ]
    assert verify_checkpoint_note(note, KEY.verifier) == HEAD


@given(st.data())
def test_a_changed_character_of_a_checkpoint_is_found(data: st.DataObject) -> None:
    note = sign_checkpoint_note(HEAD, KEY)
    at = data.draw(st.integers(0, len(note) - 1))
    char = data.draw(st.characters(codec="utf-8", exclude_categories=["Cs"]).filter(lambda c: c != note[at]))
    with pytest.raises((NoteError, CheckpointError)):
        verify_checkpoint_note(note[:at] + char + note[at + 1 :], KEY.verifier)


@pytest.mark.parametrize("size", ["-1", "042", "+42", "4 2", "٤٢", "", "9" * 5000])
def test_a_size_that_is_not_plain_decimal_is_refused(size: str) -> None:
    with pytest.raises(CheckpointError, match="size"):
        TreeHead.parse(HEAD.text().replace("\n42\n", f"\n{size}\n"))


def test_a_checkpoint_of_another_log_is_refused() -> None:
    other = TreeHead("another.test/ledger", 1, bytes(32))
    with pytest.raises(CheckpointError, match="another"):
        sign_checkpoint_note(other, KEY)
    with pytest.raises(CheckpointError, match="another"):
        verify_checkpoint_note(sign_note(other.text(), KEY), KEY.verifier)


@given(st.data())
def test_a_changed_character_of_a_verifier_key_is_found(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(VKEY) - 1))
    char = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c.lower() != VKEY[at].lower()))
    with pytest.raises((VerifierKeyError, keys.KeyNameError)):
        VerifierKey.parse(VKEY[:at] + char + VKEY[at + 1 :])


def test_the_key_is_made_once_closed_to_others_and_published(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    key = keys.load_or_create_key(folder, "example.test/ledger")
    again = keys.load_or_create_key(folder, "example.test/ledger")
    assert key.verifier == again.verifier
    assert stat.S_IMODE((folder / keys.KEY_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / keys.VKEY_FILE).read_text() == f"{key.verifier}\n"
    assert sorted(path.name for path in folder.iterdir()) == [keys.KEY_FILE, keys.VKEY_FILE]
    assert VerifierKey.parse(str(key.verifier)).verify(b"message", key.sign(b"message"))


def test_processes_that_start_together_share_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: keys.load_or_create_key(tmp_path, "example.test/ledger").verifier, range(32)))
    assert len(set(made)) == 1


def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    keys.load_or_create_key(tmp_path, "example.test/ledger")
    (tmp_path / keys.KEY_FILE).chmod(0o644)
    with pytest.raises(KeyFileError, match="0600"):
        keys.load_or_create_key(tmp_path, "example.test/ledger")


@pytest.mark.parametrize("content", [b"", b"not a key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_a_damaged_key_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / keys.KEY_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"ledger\.key"):
        keys.load_or_create_key(tmp_path, "example.test/ledger")
    assert path.read_bytes() == content

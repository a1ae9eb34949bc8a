"""The ledger's Ed25519 key: made once in a folder of the caller's choice, never readable by others.

The public half travels as a verifier key ("vkey") of C2SP signed-note: `name+hash+base64(0x01 || key)`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_FILE = "ledger.key"
VKEY_FILE = "ledger.vkey"

_ED25519 = b"\x01"  # the signature type byte of C2SP signed-note


class KeyNameError(ValueError):
    """A key name that a signed note cannot carry."""


class VerifierKeyError(ValueError):
    """A verifier key that does not parse, or whose parts disagree."""


class KeyFileError(Exception):
    """The key file is unreadable, not an Ed25519 key, or open to others."""


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """The public half: what an auditor pins. `public_bytes` holds the 32 raw bytes of the Ed25519 key."""

    name: str
    public_bytes: bytes

    def __post_init__(self) -> None:
        if not self.name or "+" in self.name or any(char.isspace() for char in self.name):
            raise KeyNameError(f"key name {self.name!r} must be non-empty, without spaces and without '+'")
        if len(self.public_bytes) != 32:
            raise VerifierKeyError(f"an Ed25519 public key has 32 bytes, not {len(self.public_bytes)}")

    @classmethod
    def parse(cls, vkey: str) -> VerifierKey:
        """Reads `name+hash+base64`. Raises `VerifierKeyError` where a part is missing, malformed or wrong."""
        parts = vkey.strip().split("+", 2)
        if len(parts) != 3:
            raise VerifierKeyError("a verifier key has three parts: name+hash+key")
        name, key_hash, encoded = parts
        try:
            raw = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise VerifierKeyError(f"the key part is not base64: {error}") from error
        if raw[:1] != _ED25519 or len(raw) != 33:
            raise VerifierKeyError("the key part is not an Ed25519 key (type 1, 32 bytes)")
        key = cls(name, raw[1:])
        if key_hash != key.key_hash.hex():
            raise VerifierKeyError(f"the key's hash is {key.key_hash.hex()}, but the text says {key_hash!r}")
        return key

    @property
    def key_hash(self) -> bytes:
        """The 4-byte key ID of C2SP signed-note: SHA-256(name || LF || type || key)[:4]."""
        return hashlib.sha256(self.name.encode() + b"\n" + _ED25519 + self.public_bytes).digest()[:4]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the raw public key, in hex: for reading out over another channel."""
        return hashlib.sha256(self.public_bytes).hexdigest()

    def __str__(self) -> str:
        encoded = base64.b64encode(_ED25519 + self.public_bytes).decode()
        return f"{self.name}+{self.key_hash.hex()}+{encoded}"

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether `signature` (64 bytes) is this key's over `message`."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public_bytes).verify(signature, message)
        except InvalidSignature:
            return False
        return True


class LedgerKey:
    """The private half, bound to the name (the ledger's origin) that it signs under."""

    __slots__ = ("_private", "verifier")

    def __init__(self, name: str, private: Ed25519PrivateKey) -> None:
        self._private = private
        public = private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.verifier = VerifierKey(name, public)

    @property
    def name(self) -> str:
        return self.verifier.name

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature of `message`, 64 bytes."""
        return self._private.sign(message)


def load_or_create_key(directory: Path, name: str) -> LedgerKey:
    """The key of this folder, made on the first call; `ledger.vkey` beside it holds the public half.

    However many processes call at once, all get the same key: the file appears complete, by a link that fails
    where one exists. Raises `KeyFileError` when it cannot be read, is open to others, or holds something
    else.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / KEY_FILE
    if not path.exists():
        pem = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _publish(path, pem, mode=0o600, replace=False)
    key = load_key(path, name)
    vkey = f"{key.verifier}\n".encode()
    vkey_path = directory / VKEY_FILE
    if not vkey_path.exists() or vkey_path.read_bytes() != vkey:
        _publish(vkey_path, vkey, mode=0o644, replace=True)
    return key


def load_key(path: Path, name: str) -> LedgerKey:
    """Reads the private key (PKCS #8 PEM). Raises `KeyFileError`."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        pem = path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise KeyFileError(f"{path}: others can read it (mode {mode:04o}); set it to 0600")
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise KeyFileError(f"{path}: not a private key in PEM form: {error}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise KeyFileError(f"{path}: holds another kind of key; the ledger signs with Ed25519")
    return LedgerKey(name, private)


def _publish(path: Path, content: bytes, *, mode: int, replace: bool) -> None:
    """Writes aside, syncs, and puts the file in place whole; without `replace` the first writer wins."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            aside.replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

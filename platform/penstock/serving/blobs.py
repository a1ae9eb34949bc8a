"""The content-addressed blob store: a file's bytes lie in `BLOBS_DIR` under their SHA-256.

A blob is written aside, synchronized to disk and renamed, so that a name always stands for its whole content; the
same content is kept once.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from django.conf import settings
from django.utils.translation import gettext as _


@dataclass(frozen=True, slots=True)
class Blob:
    sha256: str
    size_bytes: int


class BlobTooLarge(Exception):
    """More bytes came than the limit allows; nothing was kept."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        super().__init__(_("The content is larger than the %(limit)d bytes allowed.") % {"limit": limit_bytes})


class BlobMissing(Exception):
    """The store has no content under this SHA-256."""

    def __init__(self, sha256: str, path: Path) -> None:
        self.sha256 = sha256
        super().__init__(
            _("The content with SHA-256 %(sha256)s is not at %(path)s.") % {"sha256": sha256, "path": path}
        )


def blob_path(sha256: str) -> Path:
    """Where the content lies; two levels, so that no folder grows too large to list."""
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise ValueError(f"not a SHA-256 in hexadecimal: {sha256!r}")
    return Path(settings.BLOBS_DIR) / sha256[:2] / sha256[2:]


def store(chunks: Iterable[bytes], *, limit_bytes: int | None = None) -> Blob:
    """Keeps the concatenation of `chunks`.

    Raises BlobTooLarge past `limit_bytes`, and OSError (a full disk among them); either leaves nothing behind.
    """
    folder = Path(settings.BLOBS_DIR)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".incoming-")
    aside = Path(name)
    try:
        digest, size_bytes = hashlib.sha256(), 0
        with os.fdopen(handle, "wb") as stream:
            for chunk in chunks:
                size_bytes += len(chunk)
                if limit_bytes is not None and size_bytes > limit_bytes:
                    raise BlobTooLarge(limit_bytes)
                digest.update(chunk)
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        blob = Blob(digest.hexdigest(), size_bytes)
        place = blob_path(blob.sha256)
        place.parent.mkdir(exist_ok=True, mode=0o700)
        aside.replace(place)
        _sync_folder(place.parent)
        return blob
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()


def open_blob(sha256: str) -> BinaryIO:
    """The content for reading. Raises BlobMissing."""
    path = blob_path(sha256)
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise BlobMissing(sha256, path) from error


def _sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

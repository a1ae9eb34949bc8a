"""Folders: where layer images and the file of spilled keys and values lie, and how a renaming is made to last."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

FOLDER_VARIABLE = "PENSTOCK_IMAGES"


def images_folder(folder: Path | None = None) -> Path:
    """Where images are kept: as told, or where PENSTOCK_IMAGES says, or in the user's cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    return folder or (Path(named) if named else Path(platformdirs.user_cache_dir("penstock")) / "images")


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk, as they are now."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

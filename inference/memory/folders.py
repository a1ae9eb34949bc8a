"""Where what is made once and may be made again lies: layer images, and the file of spilled keys and values."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

FOLDER_VARIABLE = "PENSTOCK_IMAGES"


def images_folder(folder: Path | None = None) -> Path:
    """Where images are kept: as told, or where PENSTOCK_IMAGES says, or in the user's cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    return folder or (Path(named) if named else Path(platformdirs.user_cache_dir("penstock")) / "images")

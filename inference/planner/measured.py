"""Keeping what was measured of this host: a file each in the user's cache, by a key of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import platformdirs

logger = logging.getLogger(__name__)


def measured_folder() -> Path:
    """Where measurements are kept."""
    return Path(platformdirs.user_cache_dir("penstock"))


def measured_place(kind: str, marks: Iterable[object]) -> Path:
    """Where a measurement of that kind is kept, with those marks: of the host, the code and what was measured."""
    key = hashlib.sha256("\n".join(map(str, marks)).encode()).hexdigest()[:16]
    return measured_folder() / kind / f"{key}.json"


def kept(place: Path) -> dict[str, Any] | None:
    """What was kept there; None where nothing was, or it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(place.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used (%s); measuring again", place, error)
        return None
    return found


def keep(place: Path, values: dict[str, Any]) -> None:
    """Write aside and rename; a cache that cannot be written costs a measurement, no more."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).rename(place)
    except OSError as error:
        logger.warning("a measurement could not be kept in %s: %s", place, error)

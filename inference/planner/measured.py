"""Keeping what was measured of this host: a file each in the user's cache, by a key of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import platformdirs

logger = logging.getLogger(__name__)

# What a host gives changes with what else runs on it and beside it: a virtual machine was seen to compute at full and
# at half speed by turns of ten seconds. What a run will meet is best told by the mean of several samples, not too old.
FRESH_SECONDS = 60.0
SAMPLES_SECONDS = 3600.0
MOST_SAMPLES = 16


def measured_folder() -> Path:
    """Where measurements are kept."""
    return Path(platformdirs.user_cache_dir("penstock"))


def measured_place(kind: str, marks: Iterable[object]) -> Path:
    """Where a measurement of that kind is kept, with those marks: of the host, the code and what was measured."""
    key = hashlib.sha256("\n".join(map(str, marks)).encode()).hexdigest()[:16]
    return measured_folder() / kind / f"{key}.json"


def sampled(
    place: Path, measure: Callable[[], tuple[dict[str, Any], bool]], *, again: bool = False, once: bool = False
) -> dict[str, Any]:
    """The mean of what was measured within SAMPLES_SECONDS, now too where that has not been done for FRESH_SECONDS.

    measure: gives a sample, and whether this process had the processor to itself; where it had not, the sample is kept
    only until there is another. Numbers, and lists of numbers, are averaged over the samples that have them; all else
    is the latest sample's. again: measure now, and forget what was kept. once: whatever was kept will do, however old.
    """
    now = time.time()
    samples = [] if again else (kept(place) or {}).get("samples", [])
    if not once:
        samples = [one for one in samples if now - SAMPLES_SECONDS <= one["at"] <= now][-MOST_SAMPLES + 1 :]
    if not samples or (not once and now - samples[-1]["at"] > FRESH_SECONDS):
        values, sound = measure()
        samples.append({"at": now, "values": values, "sound": sound})
        samples = [one for one in samples if one["sound"]] or samples[-1:]
        keep(place, {"samples": samples})
    found = [one["values"] for one in samples]
    return {name: _mean([one[name] for one in found if one[name] is not None]) for name in found[-1]}


def _mean(values: list[Any]) -> Any:
    latest = values[-1] if values else None
    if isinstance(latest, list):
        return [_mean(list(column)) for column in zip(*values, strict=True)]
    return statistics.fmean(values) if isinstance(latest, float) else latest


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

"""The engines that a host has loaded: one a model release, loaded when first needed, the least used given up first."""

import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext as _

from inference.errors import InferenceError
from penstock.config import config
from penstock.registry.models import ModelRelease

if TYPE_CHECKING:
    from inference.engine import Engine

logger = logging.getLogger(__name__)

KEPT_ENGINES = 2


class EngineUnavailable(Exception):
    """A release that cannot run here: its weights cannot be read, or do not fit. `passing` if waiting may help."""

    def __init__(self, message: str, *, passing: bool) -> None:
        self.passing = passing
        super().__init__(message)


@dataclass(slots=True)
class Loaded:
    """A loaded engine, and who uses it."""

    name: str
    digest: str
    engine: "Engine"
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)


class EnginePool:
    """Thread-safe. With a memory budget there is one engine at a time, for each would want the whole of it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}
        self._lock = threading.Lock()  # guards _loaded and users; never held while loading
        self._loading = threading.Lock()  # one load at a time: two at once would both count the same free memory
        self._closed = False

    @contextmanager
    def use(self, release: ModelRelease) -> "Iterator[Engine]":
        """The release's engine, running, kept loaded as long as the block lasts. Raises EngineUnavailable."""
        loaded = self._acquire(release)
        try:
            yield loaded.engine
        finally:
            with self._lock:
                loaded.users -= 1
                loaded.used_at = time.monotonic()

    def state(self) -> list[dict[str, Any]]:
        """For each loaded engine: its release and the engine's own figures."""
        with self._lock:
            loaded = list(self._loaded.values())
        return [
            {"release": one.name, "digest": one.digest, "users": one.users, **asdict(one.engine.stats())}
            for one in loaded
        ]

    def close(self) -> None:
        """Stops every engine; what still ran in them ends as cancelled."""
        with self._lock:
            self._closed = True
            loaded = list(self._loaded.values())
            self._loaded.clear()
        for one in loaded:
            one.engine.stop()

    def _acquire(self, release: ModelRelease) -> Loaded:
        found = self._take(release)
        if found is not None:
            return found
        with self._loading:
            found = self._take(release)  # somebody may have loaded it meanwhile
            return found if found is not None else self._load(release)

    def _take(self, release: ModelRelease) -> Loaded | None:
        with self._lock:
            if self._closed:
                raise EngineUnavailable(_("The engine host is stopping."), passing=True)
            found = self._loaded.get(release.digest)
            if found is not None:
                found.users += 1
                found.used_at = time.monotonic()
            return found

    def _load(self, release: ModelRelease) -> Loaded:
        self._make_room()
        started = time.monotonic()
        try:
            engine = load_engine(release)
        except InferenceError as error:
            raise EngineUnavailable(
                _("The model release '%(name)s' cannot be loaded: %(why)s") % {"name": release.name, "why": error},
                passing=False,
            ) from error
        engine.start()
        logger.info("loaded %s in %.1f s", release.name, time.monotonic() - started)
        loaded = Loaded(release.name, release.digest, engine, users=1)
        with self._lock:
            if self._closed:
                engine.stop()
                raise EngineUnavailable(_("The engine host is stopping."), passing=True)
            self._loaded[release.digest] = loaded
        return loaded

    def _make_room(self) -> None:
        """Gives up idle engines, the longest unused first, until one more may be loaded."""
        limit = 1 if config().memory_budget_bytes else KEPT_ENGINES
        while True:
            with self._lock:
                if len(self._loaded) < limit:
                    return
                idle = [(one.used_at, digest) for digest, one in self._loaded.items() if one.users == 0]
                if not idle:
                    raise EngineUnavailable(
                        _("Every engine of this host is busy with another model release."), passing=True
                    )
                given_up = self._loaded.pop(min(idle)[1])
            logger.info("giving up %s for another release", given_up.name)
            given_up.engine.stop()
            del given_up
            gc.collect()


def load_engine(release: ModelRelease) -> "Engine":
    """Raises inference.errors.InferenceError."""
    from inference.engine import Engine

    settings = config()
    return Engine.load(
        release.store_path,
        threads=settings.threads,
        max_batch=settings.max_running_requests,
        memory_bytes=settings.memory_budget_bytes,
    )

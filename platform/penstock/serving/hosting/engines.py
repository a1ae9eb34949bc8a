"""The engines that a host has loaded: one a model release, loaded when first needed, the least used given up first."""

import gc
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError
from django.utils.translation import gettext as _

from inference.errors import InferenceError
from inference.memory.budget import available_memory_bytes, process_bytes
from penstock.config import config
from penstock.registry.models import ModelRelease
from penstock.serving.hosting.runs import begin_run, end_run, measure_run

if TYPE_CHECKING:
    from inference.engine import Engine

logger = logging.getLogger(__name__)

# Of what is free when a worker starts, so much is left to others where no budget is set.
RESERVE_BYTES = 1024**3
RESERVE_SHARE = 0.2
# An engine takes what it needs to keep its weights in memory, and of what is then left so much for its cache, so that
# another release can be loaded beside it.
CACHE_SHARE = 0.5


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
    run_id: int
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)


class EnginePool:
    """Thread-safe. All engines of a host share one memory budget; idle ones make room, the longest unused first."""

    def __init__(self, host: str = "") -> None:
        """host: the name under which runs are recorded, by default the machine's."""
        self.host = host or socket.gethostname()
        self._loaded: dict[str, Loaded] = {}
        self._lock = threading.Lock()  # guards _loaded and users; never held while loading
        self._loading = threading.Lock()  # one load at a time: two at once would both count the same free memory
        self._closed = False
        self._budget_bytes: int | None = None
        self.being_loaded = ""
        """The release that is being loaded just now, which may take minutes; "" where none is."""
        self._trouble: dict[str, str] = {}  # by release: why it could not be loaded when it was last wanted

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

    def run_id(self, release: ModelRelease) -> int | None:
        """The run of a release that is loaded."""
        with self._lock:
            found = self._loaded.get(release.digest)
            return None if found is None else found.run_id

    def run_ids(self) -> list[int]:
        """The runs of all that is loaded."""
        with self._lock:
            return [one.run_id for one in self._loaded.values()]

    def measure(self) -> None:
        """Writes what every loaded engine has done so far."""
        with self._lock:
            loaded = list(self._loaded.values())
        for one in loaded:
            measure_run(run_id=one.run_id, engine=one.engine)

    def state(self) -> list[dict[str, Any]]:
        """For each loaded engine: its release and the engine's own figures."""
        with self._lock:
            loaded = list(self._loaded.values())
        return [
            {"release": one.name, "digest": one.digest, "users": one.users, **asdict(one.engine.stats())}
            for one in loaded
        ]

    def trouble(self) -> dict[str, str]:
        """Releases that could not be loaded when they were last wanted, and why, in the engine's words."""
        with self._lock:
            return dict(self._trouble)

    @property
    def budget_bytes(self) -> int | None:
        """For all engines together; None before the first one is wanted."""
        return self._budget_bytes

    def close(self) -> None:
        """Stops every engine; what still ran in them ends as cancelled."""
        with self._lock:
            self._closed = True
            loaded = list(self._loaded.values())
            self._loaded.clear()
        for one in loaded:
            _end(one)

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
        started = time.monotonic()
        self.being_loaded = release.name
        try:
            engine = load_engine(release, memory_bytes=self._make_room(release))
        except InferenceError as error:
            with self._lock:
                self._trouble[release.name] = str(error)
            raise EngineUnavailable(
                _("The model release '%(name)s' cannot be loaded: %(why)s") % {"name": release.name, "why": error},
                passing=False,
            ) from error
        finally:
            self.being_loaded = ""
        learn_rates(engine, release)
        engine.start()
        seconds = time.monotonic() - started
        logger.info("loaded %s in %.1f s", release.name, seconds)
        try:
            run = begin_run(host=self.host, release=release, engine=engine, load_seconds=seconds)
        except BaseException:
            engine.stop()  # nobody would know of it, nor of its memory
            raise
        loaded = Loaded(release.name, release.digest, engine, run.pk, users=1)
        with self._lock:
            closed = self._closed
            if not closed:
                self._loaded[release.digest] = loaded
                self._trouble.pop(release.name, None)
        if closed:
            _end(loaded)
            raise EngineUnavailable(_("The engine host is stopping."), passing=True)
        return loaded

    def _make_room(self, release: ModelRelease) -> int:
        """Memory for one more engine, in bytes.

        Idle engines are given up until the release fits whole. What does not fit even then is given all that is left
        once no other engine is in use, and streams its layers.
        """
        needed = needed_bytes(release)
        while True:
            with self._lock:
                left = self._budget() - sum(one.engine.memory_bytes_at_most for one in self._loaded.values())
                if left >= needed:
                    return needed + int((left - needed) * CACHE_SHARE)
                idle = [(one.used_at, digest) for digest, one in self._loaded.items() if one.users == 0]
                if not idle:
                    if self._loaded:
                        raise EngineUnavailable(
                            _("Every engine of this host is busy with another model release."), passing=True
                        )
                    return max(1, left)
                given_up = self._loaded.pop(min(idle)[1])
            logger.info("giving up %s for another release", given_up.name)
            _end(given_up)
            del given_up
            gc.collect()

    def _budget(self) -> int:
        """For all engines together: the setting's less what the worker itself takes, or what was free at first."""
        if self._budget_bytes is None:
            allowed = config().memory_budget_bytes
            if allowed is not None:
                self._budget_bytes = allowed - process_bytes()
            else:
                free = available_memory_bytes()
                self._budget_bytes = free - max(RESERVE_BYTES, int(free * RESERVE_SHARE))
        return self._budget_bytes


def _end(loaded: Loaded) -> None:
    """Stops an engine and records it, if the database is there; else the host's next start does."""
    loaded.engine.stop()
    try:
        end_run(run_id=loaded.run_id, engine=loaded.engine)
    except (DatabaseError, InterfaceError) as error:
        logger.warning("the end of a run of %s is not recorded: %s", loaded.name, error)


def learn_rates(engine: "Engine", release: ModelRelease) -> None:
    """So that each run can be told what it should have taken. What fails here is a figure less, not an engine less."""
    try:
        engine.learn_rates()
    except (InferenceError, OSError, MemoryError) as error:
        logger.warning("nothing is predicted for %s: %s", release.name, error)


def needed_bytes(release: ModelRelease) -> int:
    """With so much memory the release is kept in it whole. Raises EngineUnavailable."""
    from inference.engine import DEFAULT_TOKEN_BUDGET
    from inference.loading import resident_bytes

    try:
        return resident_bytes(
            release.store_path, max_batch=config().max_running_requests, token_budget=DEFAULT_TOKEN_BUDGET
        )
    except InferenceError as error:
        raise EngineUnavailable(
            _("The model release '%(name)s' cannot be loaded: %(why)s") % {"name": release.name, "why": error},
            passing=False,
        ) from error


def load_engine(release: ModelRelease, *, memory_bytes: int) -> "Engine":
    """Raises inference.errors.InferenceError."""
    from inference.engine import Engine

    settings = config()
    return Engine.load(
        release.store_path,
        threads=settings.threads,
        max_batch=settings.max_running_requests,
        memory_bytes=memory_bytes,
        device=settings.device,
    )

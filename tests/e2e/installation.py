"""A whole installation, as an operator has it: `penstock up` in a home of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

PASSWORD = "correct horse battery 7"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, psycopg.Error):
            if value := condition():
                return value
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


@dataclass
class Installation:
    home: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None
    output: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            k: v for k, v in os.environ.items() if k not in {"DATABASE_URL", "BROKER_URL", "DJANGO_SETTINGS_MODULE"}
        }
        return {
            **kept,
            "PENSTOCK_HOME": str(self.home),
            "PENSTOCK_PORT": str(self.port),
            "PENSTOCK_ADMIN_PASSWORD": PASSWORD,
            "PENSTOCK_LANGUAGE": "en",
            "PENSTOCK_SHARD_ROWS": "16",
            "PENSTOCK_LEASE_SECONDS": "6",
            "PYTHONUNBUFFERED": "1",
        }

    def launch(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "up"],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def up(self) -> None:
        self.launch()
        self.wait_for_output(r"Dashboard: (http://\S+)", seconds=300)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line)

    def wait_for_output(self, pattern: str, seconds: float) -> None:
        start = len(self.output)

        def seen() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError("penstock up ended:\n" + "".join(self.output[-60:]))
            return any(re.search(pattern, line) for line in self.output[start:])

        try:
            wait_for(pattern, seen, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "".join(self.output[-60:])) from None

    def down(self, seconds: float = 60) -> int:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        code = self.process.wait(seconds)
        self.process = None
        return code

    def kill_supervisor(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)
        self.process = None

    def run(self, *arguments: str, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            cwd=cwd,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"penstock {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def services(self) -> dict[str, Any]:
        return dict(json.loads((self.home / "run" / "services.json").read_text()))

    def pid(self, name: str) -> int:
        """Process number of a program, `valkey`, or `postgres` (its postmaster)."""
        if name == "postgres":
            return int((self.home / "postgres" / "postmaster.pid").read_text().splitlines()[0])
        for entry in json.loads((self.home / "run" / "pids.json").read_text()):
            if entry["name"] == name:
                return int(entry["pid"])
        raise AssertionError(f"no process called {name}")

    @contextlib.contextmanager
    def database(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.services()["database_url"], autocommit=True) as connection:
            yield connection

    def query(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        with self.database() as connection:
            return connection.execute(sql, parameters).fetchall()

    def value(self, sql: str, *parameters: object) -> Any:
        return self.query(sql, *parameters)[0][0]

    def end(self) -> None:
        """Stops whatever of it still runs, however the test left it."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                self.down()
        for process in psutil.process_iter(["cmdline", "environ"]):
            with contextlib.suppress(psutil.Error):
                if (process.info["environ"] or {}).get("PENSTOCK_HOME") == str(self.home) or str(self.home) in " ".join(
                    process.info["cmdline"] or []
                ):
                    process.kill()


@contextlib.contextmanager
def signed_in(installation: Installation) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=installation.url, follow_redirects=True, timeout=60) as client:
        client.get("/sign-in/")
        answer = client.post(
            "/sign-in/",
            data={
                "username": "admin",
                "password": PASSWORD,
                "csrfmiddlewaretoken": client.cookies[f"penstock_csrf_{installation.port}"],
            },
            headers={"Referer": f"{installation.url}/sign-in/"},
        )
        assert answer.status_code == 200
        yield client

"""`penstock up`: one process that starts everything, keeps it running, and stops all of it.

1. Take the lock of `PENSTOCK_HOME`, end what a killed supervisor left behind.
2. Start the embedded servers (unless `DATABASE_URL`, `BROKER_URL` name others) and say where they listen.
3. Prepare: migrations, static files, starter model, administrator, sample. Each step does nothing the second time.
4. Start web, worker, control and scheduler; start again, with a doubling pause, whatever ends unasked.
5. On Ctrl-C or SIGTERM: programs first, then the broker, then the database.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil
from django.utils.translation import gettext as _
from rich.console import Console
from rich.text import Text

from penstock.config import Config
from penstock.operations.embedded import EmbeddedPostgres, EmbeddedValkey, forget_services, write_services

STOP_SECONDS = 20.0
READY_SECONDS = 120.0
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
COLOURS = {"web": "cyan", "worker": "green", "control": "magenta", "scheduler": "blue"}


class AlreadyRunning(Exception):
    """Another `penstock up` holds this home."""


class PortTaken(Exception):
    """Another program listens where the dashboard should."""


class PreparationFailed(Exception):
    """Migrations, the starter model or the sample could not be set up."""


@dataclass(slots=True)
class Program:
    """One child process: how it starts, and what is known of its life."""

    name: str
    command: list[str]
    process: subprocess.Popen[str] | None = None
    started_at: float = 0.0
    pause_seconds: float = FIRST_PAUSE_SECONDS
    restart_at: float = 0.0


@dataclass(slots=True)
class Supervisor:
    config: Config
    console: Console = field(default_factory=lambda: Console(highlight=False))
    postgres: EmbeddedPostgres | None = None
    valkey: EmbeddedValkey | None = None
    programs: list[Program] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: IO[str] | None = None

    @property
    def home(self) -> Path:
        return self.config.home

    @property
    def pids_file(self) -> Path:
        return self.home / "run" / "pids.json"

    def run(self) -> None:
        """Runs until asked to stop. Raises AlreadyRunning, PortTaken, PreparationFailed."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stopping.set())
        self.take_lock()
        self.end_leftovers()
        self.check_port()
        try:
            self.start_servers()
            self.prepare()
            if not self.stopping.is_set():
                self.start_programs()
                self.announce()
                self.watch()
        finally:
            self.stop()

    def say(self, text: str, style: str = "bold") -> None:
        self.show("penstock", text, style)

    def show(self, name: str, text: str, style: str) -> None:
        """One line, never wrapped: the terminal folds it, a log file keeps it whole."""
        self.console.print(Text(f"{name:<11}", style=style).append(text, style=""), soft_wrap=True)

    def take_lock(self) -> None:
        run = self.home / "run"
        run.mkdir(parents=True, exist_ok=True)
        run.chmod(0o700)
        self.lock = (run / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = _("Penstock runs already in %(home)s; stop it first, or set PENSTOCK_HOME to another folder.")
            raise AlreadyRunning(message % {"home": self.home}) from None

    def end_leftovers(self) -> None:
        """Ends programs that outlived a supervisor killed with SIGKILL: two workers would share one identity."""
        try:
            recorded = json.loads(self.pids_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return
        for entry in recorded:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                process = psutil.Process(entry["pid"])
                if abs(process.create_time() - entry["created"]) < 1:  # not a stranger who got the same number
                    self.say(_("Ending %(name)s, left by an earlier run.") % {"name": entry["name"]})
                    process.terminate()
                    try:
                        process.wait(5)
                    except psutil.TimeoutExpired:
                        process.kill()
                        process.wait(5)

    def check_port(self) -> None:
        """Whether the web server will be able to listen; whoever answers there instead would be taken for it."""
        host, port = self.config.host, self.config.port
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                message = _(
                    "Port %(port)d at %(host)s cannot be used: %(why)s. Choose another: PENSTOCK_PORT or --port."
                )
                raise PortTaken(message % {"port": port, "host": host, "why": error.strerror}) from error

    def record_pids(self, *others: tuple[str, int]) -> None:
        running = [(program.name, program.process.pid) for program in self.programs if program.process is not None]
        running += others
        if self.valkey is not None and (pid := self.valkey.pid()) is not None:
            running.append(("valkey", pid))
        entries = []
        for name, pid in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                entries.append({"name": name, "pid": pid, "created": psutil.Process(pid).create_time()})
        aside = self.pids_file.with_suffix(".tmp")
        aside.write_text(json.dumps(entries))
        aside.replace(self.pids_file)

    def start_servers(self) -> None:
        database_url, broker_url = self.config.database_url, self.config.broker_url
        if self.config.uses_embedded_database:
            self.postgres = EmbeddedPostgres(self.home)
            self.say(_("Starting PostgreSQL …"))
            database_url = self.postgres.start()
        if self.config.uses_embedded_broker:
            self.valkey = EmbeddedValkey(self.home)
            self.say(_("Starting Valkey …"))
            broker_url = self.valkey.start()
        self.environment = {
            **os.environ,
            "PENSTOCK_HOME": str(self.home),
            "DATABASE_URL": database_url,
            "BROKER_URL": broker_url,
            "PYTHONUNBUFFERED": "1",
        }
        write_services(
            self.config.services_file,
            {"database_url": database_url, "broker_url": broker_url, "port": self.config.port, "pid": os.getpid()},
        )
        self.record_pids()

    def prepare(self) -> None:
        """Runs `operations.prepare` as a process of its own: it may import torch, and this one must stay small.

        Asked to stop meanwhile, it is ended: each of its steps is whole or is done again at the next start. It is on
        record like the programs: were this supervisor killed, the next one ends it before it sets up the same things.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.operations.prepare"], env=self.environment, start_new_session=True
        )
        self.record_pids(("setup", process.pid))
        while process.poll() is None:
            if self.stopping.wait(0.1):
                process.terminate()
                process.wait()
                return
        if process.returncode:
            raise PreparationFailed(_("Setting up failed; what is wrong is told above."))

    def start_programs(self) -> None:
        python = sys.executable
        celery = [python, "-m", "celery", "-A", "penstock.celery", "--quiet"]
        run = self.home / "run"
        self.programs = [
            Program("web", [python, "-m", "penstock.operations.web"]),
            Program("worker", [python, "-m", "penstock.serving.worker"]),
            Program(
                "control",
                [*celery, "worker", "-n", "control@%h", "-Q", "control", "-P", "threads", "-c", "2", "-l", "WARNING",
                 "--without-gossip", "--without-mingle"],
            ),
            Program("scheduler", [*celery, "beat", "-l", "WARNING", "-s", str(run / "schedule"), "--pidfile="]),
        ]  # fmt: skip
        for program in self.programs:
            self.start(program)

    def start(self, program: Program) -> None:
        # A session of its own: Ctrl-C at the terminal reaches the supervisor alone, which stops things in order.
        program.process = subprocess.Popen(
            program.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        program.started_at = time.monotonic()
        threading.Thread(target=self.relay, args=(program, program.process), daemon=True).start()
        self.record_pids()

    def relay(self, program: Program, process: subprocess.Popen[str]) -> None:
        """Copies a program's output to the terminal, with its name in front, and to its log file."""
        logs = self.home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        assert process.stdout is not None
        with (logs / f"{program.name}.log").open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self.show(program.name, line.rstrip(), COLOURS[program.name])

    def announce(self) -> None:
        """Waits for the web server's first answer, then says where it is."""
        url = f"http://{self.config.host}:{self.config.port}"
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and not self.stopping.is_set():
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/sign-in/", timeout=2).status_code < 500:
                    self.say(_("Dashboard: %(url)s   (Ctrl-C stops everything)") % {"url": url}, style="bold green")
                    return
            if self.ended(self.programs[0]):
                self.say(_("The web server ended; its last lines above tell why."), style="bold red")
                return
            self.stopping.wait(0.3)

    def ended(self, program: Program) -> bool:
        return program.process is not None and program.process.poll() is not None

    def watch(self) -> None:
        while not self.stopping.wait(0.5):
            self.revive_servers()
            for program in self.programs:
                if program.process is None:
                    if time.monotonic() >= program.restart_at:
                        self.start(program)
                elif self.ended(program):
                    self.schedule_restart(program)

    def schedule_restart(self, program: Program) -> None:
        assert program.process is not None
        if time.monotonic() - program.started_at > LONGEST_PAUSE_SECONDS:
            program.pause_seconds = FIRST_PAUSE_SECONDS
        message = _("%(name)s ended with code %(code)s; starting it again in %(seconds)d s.") % {
            "name": program.name,
            "code": program.process.returncode,
            "seconds": program.pause_seconds,
        }
        self.say(message, style="bold yellow")
        program.process = None
        program.restart_at = time.monotonic() + program.pause_seconds
        program.pause_seconds = min(2 * program.pause_seconds, LONGEST_PAUSE_SECONDS)

    def revive_servers(self) -> None:
        """A killed server comes back at the same address, so the programs only have to reconnect."""
        for name, server in (("PostgreSQL", self.postgres), ("Valkey", self.valkey)):
            if server is not None and not server.is_running():
                self.say(_("%(name)s ended; starting it again.") % {"name": name}, style="bold yellow")
                try:
                    server.start()
                except Exception as error:
                    self.say(f"{name}: {error}", style="bold red")
                self.record_pids()

    def stop(self) -> None:
        self.stopping.set()
        running = [program for program in self.programs if program.process is not None and not self.ended(program)]
        if running:
            self.say(_("Stopping …"))
        for program in running:
            assert program.process is not None
            program.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for program in running:
            assert program.process is not None
            try:
                program.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.say(_("%(name)s did not stop in time and is killed.") % {"name": program.name})
                for process in family(program.process.pid):
                    process.kill()
                program.process.wait()
        if self.valkey is not None:
            self.valkey.stop()
        if self.postgres is not None:
            self.postgres.stop()
        forget_services(self.config.services_file)
        forget_services(self.pids_file)
        if running:
            self.say(_("Stopped."))


def family(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        yield from parent.children(recursive=True)
        yield parent

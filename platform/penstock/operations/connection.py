"""Connects a command to the installation's database."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from django.db import connections
from django.utils.translation import gettext as _
from psycopg.conninfo import conninfo_to_dict

from penstock.config import config


class DatabaseUnreachable(Exception):
    """Nothing answers at the configured address."""


@contextmanager
def connected_database() -> Iterator[None]:
    """The database of `DATABASE_URL`; else the embedded one, started for the time of the command if nobody runs it.

    Raises DatabaseUnreachable.
    """
    settings = config()
    url = settings.resolved_database_url()
    if url and reachable(url):
        use(url)
        yield
        return
    if not settings.uses_embedded_database:
        raise DatabaseUnreachable(
            _("Nothing answers at DATABASE_URL; is the server running, are name and password right?")
        )
    if not (settings.home / "postgres" / "PG_VERSION").exists():
        raise DatabaseUnreachable(
            _("Nothing is set up in %(home)s yet: run `penstock up` once (or set PENSTOCK_HOME).")
            % {"home": settings.home}
        )
    from penstock.operations.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(settings.home)
    use(server.start())
    try:
        yield
    finally:
        connections.close_all()
        if not settings.services_file.exists():  # `penstock up` may have been started meanwhile, and uses it
            server.stop()


def reachable(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=5):
            return True
    except psycopg.OperationalError:
        return False


def use(url: str) -> None:
    parts = conninfo_to_dict(url)
    connections["default"].close()
    connections["default"].settings_dict.update(
        NAME=parts.get("dbname") or "penstock",
        USER=parts.get("user") or "",
        PASSWORD=parts.get("password") or "",
        HOST=parts.get("host") or "",
        PORT=str(parts.get("port") or ""),
    )

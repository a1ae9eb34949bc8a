"""The `penstock` command without a running installation: help, and errors that say what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest


def penstock(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cleared = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "BROKER_URL"}}
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments],
        env={**cleared, "PENSTOCK_HOME": str(home), "PENSTOCK_LANGUAGE": "en", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_command_explains_itself() -> None:
    from penstock.cli import main

    def walk(command: click.Command, path: tuple[str, ...]) -> None:
        assert command.help, f"{' '.join(path)} has no help"
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                walk(child, (*path, name))

    walk(main, ("penstock",))


def test_a_command_before_the_first_start_says_what_to_run(tmp_path: Path) -> None:
    done = penstock("task", "list", home=tmp_path)
    assert done.returncode == 1
    assert "penstock up" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_database_of_ones_own_is_named(tmp_path: Path) -> None:
    done = penstock("task", "list", home=tmp_path, DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert done.returncode == 1
    assert "DATABASE_URL" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_on_an_empty_home_tells_each_remedy(tmp_path: Path) -> None:
    done = penstock("doctor", "--json", home=tmp_path)
    assert done.returncode == 1
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert not findings["PostgreSQL"]["ok"]
    assert "penstock up" in findings["PostgreSQL"]["remedy"]
    assert findings["Python"]["ok"]


def test_doctor_speaks_the_terminals_language(tmp_path: Path) -> None:
    assert "資料庫" in penstock("doctor", "--help", home=tmp_path, PENSTOCK_LANGUAGE="zh-hant").stdout or (
        "缺少" in penstock("doctor", "--help", home=tmp_path, PENSTOCK_LANGUAGE="zh-hant").stdout
    )


def test_an_unusable_port_is_refused_by_name(tmp_path: Path) -> None:
    done = penstock("doctor", home=tmp_path, PENSTOCK_PORT="99999")
    assert done.returncode != 0
    assert "PENSTOCK_PORT" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["LC_ALL", "LANG"])
def test_the_language_follows_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.operations.terminal import terminal_language

    for other in ("PENSTOCK_LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "zh_TW.UTF-8")
    assert terminal_language() == "zh-hant"
    monkeypatch.setenv(name, "en_GB.UTF-8")
    assert terminal_language() == "en"

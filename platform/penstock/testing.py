"""A pytest plugin: every run gets a throw-away home, PostgreSQL and Valkey of its own.

It is loaded by `-p penstock.testing`, before Django's settings are read, so that no test can touch the state of an
installation. The servers start when the first test asks for them.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(tempfile.mkdtemp(prefix="penstock-test-"))
HOME.chmod(0o755)
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
os.environ["PENSTOCK_HOME"] = str(HOME)
for name in ("DATABASE_URL", "BROKER_URL"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    from penstock.operations.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(HOME)
    yield server.start()
    server.stop()


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    from penstock.operations.embedded import EmbeddedValkey

    server = EmbeddedValkey(HOME)
    yield server.start()
    server.stop()

from typing import Any

import pytest
from registry_releases import make_release


@pytest.fixture
def release(db: None) -> Any:
    """A release as an import would register it; no weights lie behind it."""
    return make_release("small-model")

import hashlib
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def make_release(db: None) -> Callable[..., Any]:
    """Makes releases as an import would register them; no weights lie behind them."""
    from django.utils import timezone

    from penstock.registry.models import ModelRelease

    def make(name: str, status: str = "approved") -> ModelRelease:
        return ModelRelease.objects.create(
            name=name,
            status=status,
            digest=hashlib.sha256(name.encode()).hexdigest(),
            architecture="llama",
            parameters=1000,
            size_bytes=4000,
            context_tokens=2048,
            quantization="int4 group 32",
            tokenizer_digest="0" * 64,
            store_path=f"/nowhere/{name}",
            imported_by="admin",
            approved_at=timezone.now() if status == "approved" else None,
        )

    return make


@pytest.fixture
def release(make_release: Callable[..., Any]) -> Any:
    return make_release("small-model")

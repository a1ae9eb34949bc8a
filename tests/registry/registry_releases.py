"""Releases for tests that need a row, not weights."""

import hashlib
from typing import Any


def make_release(name: str, status: str = "approved") -> Any:
    from django.utils import timezone

    from penstock.registry.models import ModelRelease

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

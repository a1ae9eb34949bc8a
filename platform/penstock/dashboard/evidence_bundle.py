"""Evidence bundles as downloads."""

import tempfile
from pathlib import Path

from django.http import StreamingHttpResponse

from penstock.accounts.models import User
from penstock.dashboard.downloads import download
from penstock.registry.models import Task
from penstock.serving.models import Batch
from penstock.telemetry.evidence import export_evidence


def bundle(*, user: User, filename: str, batch: Batch | None = None, task: Task | None = None) -> StreamingHttpResponse:
    """Writes the bundle aside and sends it. Errors as `export_evidence`."""
    with tempfile.TemporaryDirectory(prefix="penstock-evidence-") as folder:
        destination = Path(folder) / filename
        export_evidence(user=user, destination=destination, batch=batch, task=task)
        size_bytes = destination.stat().st_size
        # The open file outlives its name.
        stream = destination.open("rb")
    return download(stream, filename=filename, size_bytes=size_bytes, content_type="application/zip")

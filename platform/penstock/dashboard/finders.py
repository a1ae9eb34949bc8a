"""Finds the static files that installed Python packages carry, so that nothing comes from elsewhere at run time."""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.contrib.staticfiles.finders import BaseFinder
from django.core.files.storage import FileSystemStorage
from django.core.files.storage.base import Storage

PLOTLY_SCRIPT = "plotly.min.js"
PREFIX = "vendor"


class PlotlyFinder(BaseFinder):
    """Plotly's own bundle, out of the `plotly` package's data: the file that `plotly.offline.get_plotlyjs()` reads.

    It is found without importing plotly, which would cost the web process a second at its start.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        spec = find_spec("plotly")
        if spec is None or spec.origin is None:
            raise RuntimeError("The package `plotly` is not installed: charts need its plotly.min.js.")
        self.folder = Path(spec.origin).parent / "package_data"

    def check(self, **kwargs: Any) -> list[Any]:
        return []

    def find(self, path: str, find_all: bool = False, **kwargs: Any) -> Any:
        found = [str(self.folder / PLOTLY_SCRIPT)] if path == f"{PREFIX}/{PLOTLY_SCRIPT}" else []
        if find_all:
            return found
        return found[0] if found else None

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterator[tuple[str, Storage]]:
        storage = FileSystemStorage(location=self.folder)
        storage.prefix = PREFIX  # type: ignore[attr-defined]  # collectstatic puts the file under it
        yield PLOTLY_SCRIPT, storage

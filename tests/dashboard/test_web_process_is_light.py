"""The web process never loads what only the engine needs."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import django
django.setup()
from django.urls import get_resolver

def walk(patterns):
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            walk(pattern.url_patterns)
        else:
            pattern.callback

walk(get_resolver().url_patterns)
import penstock.asgi
print([name for name in ("torch", "transformers", "plotly", "accelerate") if name in sys.modules])
"""


def test_loading_every_address_loads_no_torch() -> None:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "penstock.settings", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().splitlines()[-1] == "[]"

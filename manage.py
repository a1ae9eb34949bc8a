#!/usr/bin/env python
"""Django's own commands, for developers; operators use `penstock`."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent / "platform"))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)

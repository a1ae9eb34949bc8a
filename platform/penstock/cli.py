"""The `penstock` command: everything an operator does at a terminal. The commands are in `penstock.commands`."""

import os
import sys

import django
from django.utils import translation

from penstock.config import ConfigurationError
from penstock.operations.terminal import terminal_language


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")
    try:
        django.setup()
    except (ConfigurationError, OSError) as unusable:  # a home that cannot be written to, among others
        sys.exit(str(unusable))
    # Activated before the commands are imported, so that their help is in the terminal's language.
    translation.activate(terminal_language())
    from penstock.commands.root import penstock

    penstock(prog_name="penstock")


if __name__ == "__main__":
    main()

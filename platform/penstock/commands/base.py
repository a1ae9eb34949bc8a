"""What the commands share: options, the connection to the installation, and how things are printed."""

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

import click
from django.utils.translation import gettext as _

P = ParamSpec("P")
as_option = click.option("--as", "username", default="", metavar="NAME", help=_("Act as this person."))
json_option = click.option("--json", "as_json", is_flag=True, help=_("Print JSON, for scripts."))
team_option = click.option("--team", "team_slug", default="", help=_("Short name of the team; default: the first."))


def fail(message: object) -> NoReturn:
    raise click.ClickException(str(message))


def with_database(command: Callable[P, None]) -> Callable[P, None]:
    """Connects to the installation's database (starting the embedded one if `penstock up` is not running) and turns
    the errors that a person can act on into one line."""

    @wraps(command)
    def connected(*args: P.args, **kwargs: P.kwargs) -> None:
        from penstock.operations.connection import connected_database
        from penstock.operations.expected import EXPECTED_ERRORS

        try:
            with connected_database():
                command(*args, **kwargs)
        except EXPECTED_ERRORS as error:
            fail(describe(error))

    return connected


def describe(error: BaseException) -> str:
    messages = getattr(error, "messages", None)
    return "; ".join(map(str, messages)) if messages else str(error)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


# Of a line that no terminal shows: nothing is cut from what another program reads.
UNBOUNDED_COLUMNS = 10_000


def table(columns: list[str], rows: list[list[object]]) -> None:
    """The first column names the rows, and is never cut: names are what the next command is given."""
    from rich.console import Console
    from rich.table import Column, Table

    name, *others = columns
    drawn = Table(Column(name, no_wrap=True, overflow="fold"), *others, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        drawn.add_row(*["–" if cell is None else str(cell) for cell in row])
    Console(highlight=False, width=None if sys.stdout.isatty() else UNBOUNDED_COLUMNS).print(drawn)

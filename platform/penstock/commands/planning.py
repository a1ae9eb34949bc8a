"""`penstock hardware` and `penstock plan`: the engine's own commands, with releases known by name."""

import logging
import sys
from pathlib import Path

import click
from django.utils.translation import gettext as _

from penstock.commands.base import describe, fail

# Options, and `--help` with them, are the engine's: what it learns, these commands know.
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.command(
    "hardware",
    context_settings=PASSED_ON,
    help=_("Tell what this machine has and gives, measured: memory, disk, arithmetic."),
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def hardware(options: tuple[str, ...]) -> None:
    sys.exit(_engine("hardware", *options))


@click.command(
    "plan",
    context_settings=PASSED_ON,
    help=_(
        "Tell how a model, or a release by its name, would run in so much memory, and how fast, before it is loaded."
    ),
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def plan(context: click.Context, options: tuple[str, ...]) -> None:
    from penstock.config import config

    given = list(options)
    if given and not given[0].startswith("-") and not Path(given[0]).exists():
        given[0] = _store_of(given[0]) or given[0]
    budget = config().memory_budget_bytes
    if budget is not None and not any(option.split("=")[0] == "--memory" for option in given):
        given += ["--memory", str(budget)]
    if not any(option.split("=")[0] == "--device" for option in given):
        given += ["--device", config().device]
    sys.exit(_engine("plan", *given))


def _store_of(name: str) -> str | None:
    """The weight store of a release of that name."""
    from penstock.operations.connection import connected_database
    from penstock.operations.expected import EXPECTED_ERRORS

    try:
        with connected_database():
            from penstock.registry.models import ModelRelease

            return ModelRelease.objects.filter(name=name).values_list("store_path", flat=True).first()
    except EXPECTED_ERRORS as error:
        fail(describe(error))


def _engine(*arguments: str) -> int:
    from inference.__main__ import main

    # The command itself says what it does; its log is for a worker's file.
    logging.getLogger("inference").setLevel(logging.WARNING)
    return main(list(arguments))

"""`penstock pilot`: pilots at the terminal."""

from pathlib import Path

import click
from django.utils.translation import gettext as _

from penstock.commands.base import as_option, json_option, print_json, with_database
from penstock.operations.terminal import terminal_language


@click.group(help=_("Pilots: a baseline, a trial, and the return."))
def pilot() -> None:
    pass


@pilot.command(
    "run",
    help=_(
        "Measure a pilot: the baseline (transformers, unquantized, one item at a time), then the trial (a Penstock "
        "batch) over the same items, and print what follows. `penstock up` has to be running."
        "\n\nExample:  penstock pilot run --task product-descriptions --items products.jsonl --name shop-pilot"
    ),
)
@click.option("--name", required=True, help=_("Name of the pilot: a new one, or one to go on with."))
@click.option("--task", "task_name", default="", help=_("Name of the task, for a new pilot."))
@click.option("--items", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help=_("JSONL file of requests, for a new pilot; default: the task's last batch."))  # fmt: skip
@click.option("--sample", "sample_items", type=click.IntRange(1), default=16, show_default=True,
              help=_("How many of the items both ways run."))  # fmt: skip
@click.option("--pdf", type=click.Path(dir_okay=False, path_type=Path), help=_("Write the report here."))
@click.option("--language", type=click.Choice(["en", "zh-hant"]), default=None, help=_("Language of the report."))
@as_option
@json_option
@with_database
def pilot_run(
    name: str,
    task_name: str,
    items: Path | None,
    sample_items: int,
    pdf: Path | None,
    language: str | None,
    username: str,
    as_json: bool,
) -> None:
    from penstock.operations.acting import person
    from penstock.operations.pilot_run import find_or_create, findings, measure, summary, write_report

    user = person(username)
    chosen = find_or_create(user=user, name=name, task_name=task_name, items=items, sample_items=sample_items)
    measured = measure(user=user, pilot=chosen, quiet=as_json)
    if pdf is not None:
        write_report(measured, pdf, language or terminal_language())
    if as_json:
        print_json(summary(measured))
    else:
        for line in findings(measured):
            click.echo(line)
        if pdf is not None:
            click.echo(_("Written: %s") % pdf)

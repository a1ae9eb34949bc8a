"""`penstock batch`: batches at the terminal."""

import sys
from pathlib import Path

import click
from django.utils.translation import gettext as _

from penstock.commands.base import as_option, json_option, print_json, table, with_database


@click.group(help=_("Batches: many requests with one deadline."))
def batch() -> None:
    pass


@batch.command(
    "run",
    help=_(
        "Submit a JSONL file, follow it, and write the results."
        "\n\nEach line is a request of the OpenAI Batch format (custom_id, method, url, body), or any other JSON "
        "object: a record, which the task's prompt template turns into a prompt (its custom_id is the field "
        "`custom_id` or `id`, else the line number)."
        "\n\nCtrl-C stops following, not the batch; `--detach` does not follow at all. `penstock up` has to be running."
        "\n\nExample:  penstock batch run products.jsonl --task product-descriptions --output results.jsonl"
    ),
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--task", "task_name", required=True, help=_("Name of the task."))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path),
              help=_("Where the results go; default: FILE with .results.jsonl at its end."))  # fmt: skip
@click.option("--detach", is_flag=True, help=_("Print the batch's identifier and leave."))
@as_option
@json_option
@with_database
def batch_run(file: Path, task_name: str, output: Path | None, detach: bool, username: str, as_json: bool) -> None:
    from penstock.operations.acting import person
    from penstock.operations.batch_run import follow, submit, summary, summary_rows, write_results

    submitted = submit(user=person(username), file=file, task_name=task_name)
    if detach:
        print_json({"id": submitted.id, "status": submitted.status}) if as_json else click.echo(submitted.id)
        return
    finished = follow(submitted, quiet=as_json)
    written = write_results(finished, output or file.with_suffix(".results.jsonl"))
    if as_json:
        print_json(summary(finished) | {"files": [str(path) for path in written]})
    else:
        table([_("figure"), _("value")], summary_rows(finished))
        for path in written:
            click.echo(_("Written: %s") % path)
    sys.exit(0 if finished.status == finished.Status.COMPLETED else 1)

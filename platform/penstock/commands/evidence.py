"""`penstock evidence`: evidence at the terminal."""

import sys
from dataclasses import asdict
from pathlib import Path

import click
from django.utils.translation import gettext as _

from penstock.commands.base import as_option, fail, json_option, print_json, with_database


@click.group(help=_("Evidence: export it, and check it offline."))
def evidence() -> None:
    pass


@evidence.command(
    "export",
    help=_(
        "Write a bundle: ledger entries with proofs, signed checkpoint, measurements, control matrix, Statement of "
        "Applicability, and a verifier that needs only Python and `cryptography`."
        "\n\nExample:  penstock evidence export --batch batch_… --output evidence.zip"
    ),
)
@click.option("--batch", "batch_id", default="", help=_("Identifier of the batch."))
@click.option("--task", "task_name", default="", help=_("Name of the task: all of its batches and requests."))
@click.option("--output", type=click.Path(path_type=Path), help=_("File to write; default: evidence-….zip here."))
@click.option("--since", "since_size", type=click.IntRange(1), metavar="SIZE",
              help=_("Add a proof that nothing was rewritten since the checkpoint of this size."))  # fmt: skip
@as_option
@json_option
@with_database
def evidence_export(
    batch_id: str, task_name: str, output: Path | None, since_size: int | None, username: str, as_json: bool
) -> None:
    from penstock.operations.acting import person
    from penstock.registry.selectors import tasks_visible_to
    from penstock.serving.selectors import batches_visible_to
    from penstock.telemetry.evidence import export_evidence

    user = person(username)
    if bool(batch_id) == bool(task_name):
        fail(_("Name one thing to export: --batch ID or --task NAME."))
    batch = batches_visible_to(user).filter(pk=batch_id).first() if batch_id else None
    task = tasks_visible_to(user).filter(name=task_name).first() if task_name else None
    if batch is None and task is None:
        fail(_("There is no such batch or task: %s") % (batch_id or task_name))
    destination = output or Path(f"evidence-{batch_id or task_name}.zip")
    done = export_evidence(user=user, destination=destination, batch=batch, task=task, since_size=since_size)
    if as_json:
        print_json(asdict(done))
    else:
        click.echo(_("Written: %s") % destination)
        click.echo(_("Check it anywhere:  penstock evidence verify %s") % destination)


@evidence.command(
    "check",
    help=_(
        "Check this installation's whole ledger: every entry against its hash, the tree, and every signed head. Exit "
        "code 1 if anything was changed."
    ),
)
@json_option
@with_database
def evidence_check(as_json: bool) -> None:
    from governance.ledger.services import ledger_key
    from governance.ledger.verification import verify_database

    found = verify_database(key=ledger_key().verifier)
    if as_json:
        print_json(asdict(found) | {"intact": found.intact})
    else:
        for problem in found.problems:
            place = _("whole ledger") if problem.index is None else _("entry %d") % problem.index
            click.echo(f"{place}: {problem.message}")
        count = {"leaves": found.leaves, "heads": found.checkpoints, "root": found.root}
        verdict = (
            _("Intact: %(leaves)d entries and %(heads)d signed heads agree; root %(root)s.")
            if found.intact
            else _("CHANGED: %(leaves)d entries and %(heads)d signed heads do not agree.")
        )
        click.echo(verdict % count)
    sys.exit(0 if found.intact else 1)


@evidence.command(
    "verify",
    context_settings={"ignore_unknown_options": True},
    help=_(
        "Check a bundle offline, without database or network. The same verifier lies in the bundle as verify.py."
        "\n\nOptions: --key VKEY (the signer's key, known from elsewhere), --since OLD_BUNDLE, --json."
    ),
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED)
def evidence_verify(arguments: tuple[str, ...]) -> None:
    from governance.exports.verify import main as verify

    sys.exit(verify(list(arguments)))

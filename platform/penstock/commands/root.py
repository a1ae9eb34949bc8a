"""The `penstock` command itself, and what belongs to no group: up, doctor, password."""

import os
import sys

import click
from django.utils.translation import gettext as _

from penstock.commands.base import fail, json_option, print_json, with_database
from penstock.commands.batches import batch
from penstock.commands.evidence import evidence
from penstock.commands.keys import key
from penstock.commands.models import model
from penstock.commands.pilots import pilot
from penstock.commands.planning import hardware, plan
from penstock.commands.tasks import task


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    help=_(
        "Governed, high-throughput inference on the hardware you already have, with evidence that verifies offline."
        "\n\nStart with `penstock up`; `penstock doctor` tells what is missing."
    ),
)
@click.version_option(package_name="penstock")
def penstock() -> None:
    pass


@penstock.command(
    help=_(
        "Start everything: PostgreSQL, Valkey, web, worker, control and scheduler; Ctrl-C stops all of it."
        "\n\nState lives in PENSTOCK_HOME. DATABASE_URL and BROKER_URL point at servers of your own instead of the "
        "embedded ones. The dashboard is at http://127.0.0.1:8000 (PENSTOCK_HOST, PENSTOCK_PORT)."
    )
)
@click.option("--port", type=click.IntRange(1, 65535), help=_("Port of the dashboard and the API (PENSTOCK_PORT)."))
def up(port: int | None) -> None:
    from penstock.config import config
    from penstock.operations.embedded import ServerStartError
    from penstock.operations.supervisor import AlreadyRunning, PortTaken, PreparationFailed, Supervisor

    if port is not None:
        os.environ["PENSTOCK_PORT"] = str(port)
        config.cache_clear()
    try:
        Supervisor(config()).run()
    except (AlreadyRunning, PortTaken, PreparationFailed, ServerStartError, OSError) as error:
        fail(error)


@penstock.command(
    help=_("Tell what is configured, reachable and missing, each with its remedy. Exit code 1 if any is.")
)
@json_option
def doctor(as_json: bool) -> None:
    from penstock.operations.doctor import examine

    findings = examine()
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            mark = click.style(_("ok"), fg="green") if finding.ok else click.style(_("missing"), fg="red", bold=True)
            click.echo(f"{mark:<18} {finding.what}: {finding.found}")
            if not finding.ok and finding.remedy:
                click.echo(f"           → {finding.remedy}")
    sys.exit(0 if all(finding.ok for finding in findings) else 1)


@penstock.command(help=_("Set a person's password; it is asked for, or read from standard input."))
@click.argument("username")
@with_database
def password(username: str) -> None:
    from penstock.accounts.services import set_password
    from penstock.operations.acting import administrator, person

    secret = click.prompt(_("New password"), hide_input=True, confirmation_prompt=sys.stdin.isatty())
    set_password(actor=administrator(), user=person(username), password=secret)
    click.echo(_("The password of %s is changed.") % username)


for group in (key, model, task, batch, evidence, pilot, hardware, plan):
    penstock.add_command(group)

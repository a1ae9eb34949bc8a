"""The `penstock` command: everything an operator does at a terminal."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import click
import django
from django.utils import translation
from django.utils.translation import gettext as _

from penstock.config import ConfigurationError

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")
try:
    django.setup()
except (ConfigurationError, OSError) as unusable:  # a home that cannot be written to, among others
    sys.exit(str(unusable))

from penstock.operations.terminal import terminal_language

# Activated before the commands below are defined, so that their help is in the terminal's language.
translation.activate(terminal_language())

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


def table(columns: list[str], rows: list[list[object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        drawn.add_row(*["–" if cell is None else str(cell) for cell in row])
    Console(highlight=False).print(drawn)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    help=_(
        "Governed, high-throughput inference on the hardware you already have, with evidence that verifies offline."
        "\n\nStart with `penstock up`; `penstock doctor` tells what is missing."
    ),
)
@click.version_option(package_name="penstock")
def main() -> None:
    pass


@main.command(
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


@main.command(help=_("Tell what is configured, reachable and missing, each with its remedy. Exit code 1 if any is."))
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


@main.command(help=_("Set a person's password; it is asked for, or read from standard input."))
@click.argument("username")
@with_database
def password(username: str) -> None:
    from penstock.accounts.services import set_password
    from penstock.operations.acting import administrator, person

    secret = click.prompt(_("New password"), hide_input=True, confirmation_prompt=sys.stdin.isatty())
    set_password(actor=administrator(), user=person(username), password=secret)
    click.echo(_("The password of %s is changed.") % username)


@main.group(help=_("API keys for programs."))
def key() -> None:
    pass


@key.command(
    "create",
    help=_(
        "Make an API key and print it, alone, on standard output. It is shown this once: only its hash is kept."
        "\n\nExample:  export OPENAI_API_KEY=$(penstock key create --name nightly)"
    ),
)
@click.option("--name", required=True, help=_("What the key is for, so that it can be told apart later."))
@click.option("--task", "task_name", default="", help=_("Task that the key's requests count for if they name none."))
@team_option
@as_option
@json_option
@with_database
def key_create(name: str, task_name: str, team_slug: str, username: str, as_json: bool) -> None:
    from penstock.accounts.services import create_key
    from penstock.operations.acting import person, team
    from penstock.registry.selectors import tasks_visible_to

    user = person(username)
    if task_name and not tasks_visible_to(user).filter(name=task_name).exists():
        fail(_("There is no task called %s; `penstock task list` shows them.") % task_name)
    created, secret = create_key(user=user, team=team(team_slug), name=name, task_name=task_name)
    if as_json:
        print_json({"id": created.pk, "name": created.name, "prefix": created.prefix, "key": secret})
    else:
        click.echo(secret)


@main.group(help=_("Model releases: import weights, list what is there."))
def model() -> None:
    pass


@model.command(
    "import",
    help=_(
        "Import a GGUF file or a Hugging Face folder (safetensors) as a new, immutable release."
        "\n\nExample:  penstock model import ./Model-Q4_1.gguf --name my-model-q4 --licence Apache-2.0 --approve"
    ),
)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--name", required=True, help=_("Name of the release: lower-case letters, digits, hyphens."))
@click.option("--licence", default="", help=_("SPDX identifier of the licence, e.g. Apache-2.0."))
@click.option("--supplier", default="", help=_("Who supplied the weights."))
@click.option(
    "--quantize",
    type=click.Choice(["keep", "int4", "int8", "bf16"]),
    default="keep",
    show_default=True,
    help=_("Keep the source's own precision, or change it."),
)
@click.option("--group-size", type=click.Choice(["32", "64"]), default="32", show_default=True)
@click.option("--approve", is_flag=True, help=_("Approve the release at once (needs the role)."))
@as_option
@json_option
@with_database
def model_import(
    path: Path,
    name: str,
    licence: str,
    supplier: str,
    quantize: Any,
    group_size: str,
    approve: bool,
    username: str,
    as_json: bool,
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from penstock.operations.acting import person
    from penstock.registry.services import approve_release, import_release

    user = person(username)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(_("Importing"), total=None)
        release = import_release(
            user=user,
            source=path,
            name=name,
            licence=licence,
            supplier=supplier,
            quantize=quantize,
            group_size=int(group_size),
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if approve:
        release = approve_release(user=user, release=release)
    if as_json:
        print_json(release_as_dict(release))
    else:
        click.echo(_("Imported %(name)s, digest %(digest)s.") % {"name": release.name, "digest": release.digest})


def release_as_dict(release: Any) -> dict[str, object]:
    fields = ("name", "status", "digest", "architecture", "parameters", "size_bytes", "context_tokens", "quantization",
              "licence", "supplier", "source", "imported_at", "imported_by", "approved_at", "approved_by")  # fmt: skip
    return {name: getattr(release, name) for name in fields}


@model.command("list", help=_("List the model releases."))
@as_option
@json_option
@with_database
def model_list(username: str, as_json: bool) -> None:
    from penstock.operations.acting import person
    from penstock.registry.selectors import releases_visible_to

    releases = list(releases_visible_to(person(username)))
    if as_json:
        print_json([release_as_dict(release) for release in releases])
        return
    table(
        [_("name"), _("status"), _("quantization"), _("parameters"), _("size, bytes"), _("digest")],
        [[r.name, r.get_status_display(), r.quantization, f"{r.parameters:,}", f"{r.size_bytes:,}", r.digest[:16]]
         for r in releases],
    )  # fmt: skip


@main.group(help=_("Tasks: registered uses of AI."))
def task() -> None:
    pass


@task.command(
    "create",
    help=_(
        "Register a task."
        "\n\nExample:  penstock task create --name summaries --purpose 'Summaries of service tickets, for the desk' "
        "--class nearline --model smollm2-135m-instruct-q4 --activate"
    ),
)
@click.option("--name", required=True, help=_("Lower-case letters, digits and hyphens; programs use it."))
@click.option("--title", default="", help=_("Title for people; default: the name."))
@click.option("--purpose", required=True, help=_("What it decides or writes, for whom, and what it is not for."))
@click.option("--class", "latency_class", type=click.Choice(["realtime", "interactive", "nearline", "batch"]),
              default="batch", show_default=True, help=_("How long someone waits for the answer."))  # fmt: skip
@click.option("--risk", "risk_tier", type=click.Choice(["minimal", "limited", "high"]), default="minimal",
              show_default=True)  # fmt: skip
@click.option("--model", "model_name", required=True, help=_("Name of the model release."))
@click.option("--system", "system_prompt", default="", help=_("System prompt, for records rendered by the template."))
@click.option("--template", "prompt_template", default="", help=_("Prompt template; $field is a record's field."))
@click.option("--max-tokens", "max_output_tokens", type=click.IntRange(1), default=256, show_default=True,
              help=_("Most output tokens a request."))  # fmt: skip
@click.option("--owner", default="", metavar="NAME", help=_("Who answers for it; default: who creates it."))
@click.option("--activate", is_flag=True, help=_("Submit and activate it at once (needs the roles)."))
@team_option
@as_option
@json_option
@with_database
def task_create(
    model_name: str, owner: str, activate: bool, team_slug: str, username: str, as_json: bool, **fields: Any
) -> None:
    from penstock.operations.acting import person, team
    from penstock.registry.selectors import releases_visible_to
    from penstock.registry.services import activate_task, create_task, submit_task

    user = person(username)
    release = releases_visible_to(user).filter(name=model_name).first()
    if release is None:
        fail(_("There is no model release called %s; `penstock model list` shows them.") % model_name)
    fields["title"] = fields["title"] or fields["name"]
    if owner:
        fields["owner"] = person(owner)
    created = create_task(user=user, team=team(team_slug), model_release=release, **fields)
    if activate:
        created = activate_task(user=user, task=submit_task(user=user, task=created))
    if as_json:
        print_json(task_as_dict(created))
    else:
        click.echo(_("Registered task %(name)s, %(status)s.")
                   % {"name": created.name, "status": created.get_status_display()})  # fmt: skip


def task_as_dict(task: Any) -> dict[str, object]:
    fields = ("name", "title", "purpose", "status", "version", "latency_class", "risk_tier", "max_output_tokens")
    return {name: getattr(task, name) for name in fields} | {
        "owner": task.owner.username,
        "team": task.team.slug,
        "model_release": task.model_release.name,
    }


@task.command("list", help=_("List the tasks."))
@as_option
@json_option
@with_database
def task_list(username: str, as_json: bool) -> None:
    from penstock.operations.acting import person
    from penstock.registry.selectors import tasks_visible_to

    tasks = list(tasks_visible_to(person(username)).select_related("owner", "team", "model_release"))
    if as_json:
        print_json([task_as_dict(task) for task in tasks])
        return
    table(
        [_("name"), _("title"), _("status"), _("latency class"), _("risk tier"), _("owner"), _("model release")],
        [[t.name, t.title, t.get_status_display(), t.latency_class, t.risk_tier, t.owner.username,
          t.model_release.name] for t in tasks],
    )  # fmt: skip


@main.group(help=_("Batches: many requests with one deadline."))
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
    from penstock.operations.batch_run import follow, submit, summary, write_results

    submitted = submit(user=person(username), file=file, task_name=task_name)
    if detach:
        print_json({"id": submitted.id, "status": submitted.status}) if as_json else click.echo(submitted.id)
        return
    finished = follow(submitted, quiet=as_json)
    written = write_results(finished, output or file.with_suffix(".results.jsonl"))
    if as_json:
        print_json(summary(finished) | {"files": [str(path) for path in written]})
    else:
        for what, value in summary(finished).items():
            click.echo(f"{what}: {value}")
        for path in written:
            click.echo(_("Written: %s") % path)
    sys.exit(0 if finished.status == finished.Status.COMPLETED else 1)


@main.group(help=_("Evidence: export it, and check it offline."))
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


@main.group(help=_("Pilots: a baseline, a trial, and the return."))
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


if __name__ == "__main__":
    main()

"""`penstock key`: API keys at the terminal."""

import click
from django.utils.translation import gettext as _

from penstock.commands.base import as_option, fail, json_option, print_json, team_option, with_database


@click.group(help=_("API keys for programs."))
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

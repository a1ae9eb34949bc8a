"""`penstock task`: tasks at the terminal."""

from typing import Any

import click
from django.utils.translation import gettext as _

from penstock.commands.base import as_option, fail, json_option, print_json, table, team_option, with_database


@click.group(help=_("Tasks: registered uses of AI."))
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

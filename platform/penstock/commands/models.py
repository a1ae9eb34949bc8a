"""`penstock model`: model releases at the terminal."""

from pathlib import Path
from typing import Any

import click
from django.utils.translation import gettext as _

from penstock.commands.base import as_option, fail, json_option, print_json, table, with_database


@click.group(help=_("Model releases: import weights, list what is there."))
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
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    default="32",
    show_default=True,
    help=_("Weights that share a scale."),
)
@click.option(
    "--calibrate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=_("Text, UTF-8, by which int4 or int8 rounding is chosen to change the layers' outputs least."),
)
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
    calibrate: Path | None,
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
            calibrate=calibrate,
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


@model.command(
    "evaluate",
    help=_(
        "Measure a release against its reference on a held-out text, and record the figures on its page."
        "\n\nExample:  penstock model evaluate my-model-q4 --text heldout.txt --task questions.jsonl"
    ),
)
@click.argument("name")
@click.option(
    "--text",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=_("Held-out text, UTF-8: some thousand words that the model was not tuned on."),
)
@click.option(
    "--task",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=_('Questions, JSONL: {"context", "choices", "answer"} or {"context", "target"} a line.'),
)
@click.option(
    "--reference",
    type=click.Path(exists=True, path_type=Path),
    help=_("What to compare with: a store, GGUF file or folder; default: the source it was imported from."),
)
@click.option("--tokens", type=click.IntRange(min=2), help=_("Tokens of the text at most; default: all."))
@as_option
@json_option
@with_database
def model_evaluate(
    name: str,
    text: Path,
    task: Path | None,
    reference: Path | None,
    tokens: int | None,
    username: str,
    as_json: bool,
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from penstock.dashboard.evaluations import rows_of
    from penstock.operations.acting import person
    from penstock.registry.models import ModelRelease
    from penstock.registry.selectors import releases_visible_to
    from penstock.registry.services import evaluate_release

    user = person(username)
    try:
        release = releases_visible_to(user).get(name=name)
    except ModelRelease.DoesNotExist:
        fail(_("There is no model release named %(name)s.") % {"name": name})
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(_("Evaluating"), total=None)
        evaluation = evaluate_release(
            user=user,
            release=release,
            text=text,
            task=task,
            reference=reference,
            max_tokens=tokens,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if as_json:
        print_json(evaluation.figures)
        return
    table(
        [_("figure"), _("value"), _("95% interval")],
        [[row.label, row.value, row.interval or None] for row in rows_of(evaluation)],
    )


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

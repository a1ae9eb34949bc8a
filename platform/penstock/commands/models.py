"""`penstock model`: model releases at the terminal."""

from pathlib import Path
from typing import Any

import click
from django.utils.translation import gettext as _

from penstock.commands.base import as_option, json_option, print_json, table, with_database


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
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), default="32", show_default=True)
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

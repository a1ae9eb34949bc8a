"""Every read of tasks and model releases."""

from django.db.models import QuerySet

from penstock.accounts.access import Person, has_role, visible_to
from penstock.accounts.models import Team
from penstock.registry.models import ModelRelease, ReleaseEvaluation, Task, TaskVersion
from penstock.registry.transitions import TASK_TRANSITIONS


def tasks_visible_to(user: Person) -> QuerySet[Task]:
    return visible_to(user, Task.objects.select_related("team", "owner", "model_release"))


def releases_visible_to(user: Person) -> QuerySet[ModelRelease]:
    """Releases belong to the installation: whoever is signed in and active sees them all."""
    if not user.is_authenticated or not user.is_active:
        return ModelRelease.objects.none()
    return ModelRelease.objects.all()


def evaluations_of(release: ModelRelease) -> QuerySet[ReleaseEvaluation]:
    """A release's evaluations, the latest first. Who may see the release may see them."""
    return ReleaseEvaluation.objects.filter(release=release)


def task_versions_visible_to(user: Person) -> QuerySet[TaskVersion]:
    return visible_to(user, TaskVersion.objects.select_related("task"), team="task__team")


def version_of(task: Task, version: int | None = None) -> TaskVersion:
    """What the task said at a version (the present one by default). Raises TaskVersion.DoesNotExist."""
    return TaskVersion.objects.get(task=task, version=task.version if version is None else version)


def transitions_open_to(user: Person, task: Task) -> list[str]:
    """The names of the changes of state that this person could make now, in the order of the table."""
    return [
        name
        for name, transition in TASK_TRANSITIONS.items()
        if task.status in transition.sources and has_role(user, task.team, *transition.roles)
    ]


def tasks_usable_by_team(team: Team) -> QuerySet[Task]:
    """A team's active tasks on an approved release: what may be called by name. The unassigned ones are not listed."""
    return Task.objects.filter(
        team=team,
        status=Task.Status.ACTIVE,
        unassigned=False,
        model_release__status=ModelRelease.Status.APPROVED,
    ).select_related("model_release")

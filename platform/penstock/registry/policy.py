"""Which task and which weights a request runs under, or why it may not run."""

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from penstock.accounts.models import Team
from penstock.registry.models import ModelRelease, Task
from penstock.registry.services.tasks import create_unassigned_task, unassigned_name


class PolicyError(Exception):
    """A request that may not run: `code` for programs, `param` the field at fault, `message` for people."""

    def __init__(self, code: str, param: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.message = message


def resolve(*, team: Team, model: str, task_name: str = "") -> tuple[Task, ModelRelease]:
    """The task and the release for a request of `team` that names `model`, and perhaps a task.

    `model` is the name of a release, or of a task of the team, which then stands for its release. Without a task the
    request counts for the team's unassigned task on that release. Raises PolicyError.
    """
    release = ModelRelease.objects.filter(name=model).first()
    named_by_model = None
    if release is None:
        named_by_model = _task(team, model)
        if named_by_model is None:
            raise PolicyError(
                "model_not_found",
                "model",
                _("There is no model or task named %(name)s that this team may use.") % {"name": model},
            )
        release = named_by_model.model_release
    if release.status != ModelRelease.Status.APPROVED:
        raise PolicyError(
            "model_not_approved",
            "model",
            _("The model release %(name)s is not approved for use.") % {"name": release.name},
        )
    task = _task(team, task_name) if task_name else named_by_model
    if task_name and task is None:
        raise PolicyError(
            "task_not_found",
            "metadata.task",
            _("The team has no task named %(name)s.") % {"name": task_name},
        )
    if task is None:
        task = unassigned_task(team, release)
    if named_by_model is not None and task.pk != named_by_model.pk:
        raise PolicyError(
            "task_mismatch",
            "metadata.task",
            _("The model names the task %(model)s, the request the task %(task)s.")
            % {"model": model, "task": task.name},
        )
    if task.status != Task.Status.ACTIVE:
        raise PolicyError(
            "task_not_active",
            "metadata.task" if task_name else "model",
            _("The task %(name)s is not active: it is %(status)s.")
            % {"name": task.name, "status": task.get_status_display()},
        )
    if task.model_release_id != release.pk:
        raise PolicyError(
            "model_not_allowed",
            "model",
            _("The task %(task)s runs on the model release %(release)s, not on %(model)s.")
            % {"task": task.name, "release": task.model_release.name, "model": model},
        )
    return task, release


def unassigned_task(team: Team, release: ModelRelease) -> Task:
    """The team's task for requests that name none on this release; made when it is first needed."""
    name = unassigned_name(team, release)
    task = _task(team, name)
    if task is not None:
        return task
    try:
        return create_unassigned_task(team=team, model_release=release)
    except ValidationError:
        task = _task(team, name)  # another request made it at the same moment
        if task is None:
            raise
        return task


def _task(team: Team, name: str) -> Task | None:
    return Task.objects.select_related("model_release", "team").filter(team=team, name=name).first()

"""Every read of pilots."""

from django.db.models import QuerySet

from penstock.accounts.access import Person, has_role, visible_to
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.transitions import TRANSITIONS, WRITERS
from penstock.serving.models import Batch


def pilots_visible_to(user: Person) -> QuerySet[Pilot]:
    """The pilots of the tasks of a person's teams, newest first."""
    rows = Pilot.objects.select_related("task__team", "task__model_release", "items_file", "rate_card", "trial_batch")
    return visible_to(user, rows, team="task__team")


def latest_run(pilot: Pilot) -> BaselineRun | None:
    """The newest run, whatever became of it."""
    return pilot.baseline_runs.order_by("-created_at", "-pk").first()


def measured_run(pilot: Pilot) -> BaselineRun | None:
    """The newest run that completed: the one that figures come from."""
    return pilot.baseline_runs.filter(status=BaselineRun.Status.COMPLETED).order_by("-created_at", "-pk").first()


def has_open_run(pilot: Pilot) -> bool:
    return pilot.baseline_runs.filter(status__in=[BaselineRun.Status.QUEUED, BaselineRun.Status.RUNNING]).exists()


def trial_is_measured(pilot: Pilot) -> bool:
    return pilot.trial_batch is not None and pilot.trial_batch.status == Batch.Status.COMPLETED


def acts_open_to(user: Person, pilot: Pilot) -> list[str]:
    """What this person could do to the pilot now, in the order of the table; `update` first, while it is undecided."""
    if not has_role(user, pilot.task.team, *WRITERS) or pilot.status == Pilot.Status.DECIDED:
        return []
    possible = {
        "start_baseline": not has_open_run(pilot),
        "start_trial": measured_run(pilot) is not None
        and not has_open_run(pilot)
        and (pilot.trial_batch is None or pilot.trial_batch.status in TRIAL_MAY_BE_REPEATED_AFTER),
        "decide": trial_is_measured(pilot),
        "stop": True,
    }
    return ["update"] + [
        name for name, transition in TRANSITIONS.items() if pilot.status in transition.sources and possible[name]
    ]


TRIAL_MAY_BE_REPEATED_AFTER = (Batch.Status.FAILED, Batch.Status.EXPIRED, Batch.Status.CANCELLED)

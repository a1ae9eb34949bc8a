"""The state machines of tasks and of model releases: each is one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from django.utils.translation import gettext as _

from penstock.accounts.models import Role
from penstock.registry.models import ModelRelease, Task

S = TypeVar("S", Task.Status, ModelRelease.Status)


@dataclass(frozen=True, slots=True)
class Transition(Generic[S]):
    """From which states, into which one, by which roles, recorded as which kind of event."""

    sources: frozenset[S]
    target: S
    roles: tuple[Role, ...]
    kind: str


class TransitionError(Exception):
    """A change of state that its table does not hold. `status` is what the thing is now."""

    def __init__(self, name: str, status: str, allowed_from: str) -> None:
        super().__init__(
            _("%(name)s is %(status)s; this is possible only from: %(allowed)s.")
            % {"name": name, "status": status, "allowed": allowed_from}
        )
        self.status = status


_T = Task.Status
TASK_TRANSITIONS: Mapping[str, Transition[Task.Status]] = {
    "submit": Transition(frozenset({_T.DRAFT}), _T.SUBMITTED, (Role.OPERATOR, Role.TASK_OWNER), "task.submitted"),
    "activate": Transition(frozenset({_T.SUBMITTED, _T.SUSPENDED}), _T.ACTIVE, (Role.APPROVER,), "task.activated"),
    # Stopping has to be easy: whoever notices that something is wrong may do it.
    "suspend": Transition(
        frozenset({_T.ACTIVE}), _T.SUSPENDED, (Role.OPERATOR, Role.TASK_OWNER, Role.APPROVER), "task.suspended"
    ),
    "retire": Transition(
        frozenset({_T.DRAFT, _T.SUBMITTED, _T.ACTIVE, _T.SUSPENDED}),
        _T.RETIRED,
        (Role.TASK_OWNER, Role.APPROVER),
        "task.retired",
    ),
}

_R = ModelRelease.Status
RELEASE_TRANSITIONS: Mapping[str, Transition[ModelRelease.Status]] = {
    # Only an imported release becomes evaluated by it; an evaluated or approved one keeps its state.
    "evaluate": Transition(
        frozenset({_R.IMPORTED, _R.EVALUATED, _R.APPROVED}),
        _R.EVALUATED,
        (Role.OPERATOR, Role.APPROVER),
        "release.evaluated",
    ),
    "approve": Transition(frozenset({_R.IMPORTED, _R.EVALUATED}), _R.APPROVED, (Role.APPROVER,), "release.approved"),
    "withdraw": Transition(
        frozenset({_R.IMPORTED, _R.EVALUATED, _R.APPROVED}), _R.WITHDRAWN, (Role.APPROVER,), "release.withdrawn"
    ),
}


def check(transition: Transition[S], *, name: str, status: S) -> None:
    """Raises TransitionError unless the table allows the change from `status`."""
    if status not in transition.sources:
        allowed = ", ".join(str(source.label) for source in type(status) if source in transition.sources)
        raise TransitionError(name, str(status.label), allowed)

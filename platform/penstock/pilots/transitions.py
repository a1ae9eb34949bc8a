"""The state machine of pilots, as one table."""

from collections.abc import Mapping
from dataclasses import dataclass

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from penstock.accounts.models import Role
from penstock.pilots.models import Pilot

WRITERS = (Role.PILOT_MANAGER, Role.OPERATOR)


@dataclass(frozen=True, slots=True)
class Transition:
    """From which states, into which one, by which roles, recorded as which kind of event."""

    sources: frozenset[Pilot.Status]
    target: Pilot.Status
    roles: tuple[Role, ...]
    kind: str


_S = Pilot.Status
TRANSITIONS: Mapping[str, Transition] = {
    # Measured again from `baseline`: after a failure, or after other work disturbed it.
    "start_baseline": Transition(frozenset({_S.PLANNED, _S.BASELINE}), _S.BASELINE, WRITERS, "pilot.baseline_started"),
    # Again from `running`: after a batch that did not complete.
    "start_trial": Transition(frozenset({_S.BASELINE, _S.RUNNING}), _S.RUNNING, WRITERS, "pilot.trial_started"),
    "decide": Transition(frozenset({_S.RUNNING}), _S.DECIDED, WRITERS, "pilot.decided"),
    # Stopping needs no figures.
    "stop": Transition(frozenset({_S.PLANNED, _S.BASELINE, _S.RUNNING}), _S.DECIDED, WRITERS, "pilot.decided"),
}


class PilotStateError(ValidationError):
    """Something that cannot be done to a pilot as it is now."""


def check(transition: Transition, pilot: Pilot) -> None:
    """Raises PilotStateError unless the table allows the change."""
    status = Pilot.Status(pilot.status)
    if status not in transition.sources:
        allowed = ", ".join(str(source.label) for source in Pilot.Status if source in transition.sources)
        raise PilotStateError(
            _("The pilot %(name)s is in the state “%(status)s”; this is possible only in: %(allowed)s.")
            % {"name": pilot.name, "status": status.label, "allowed": allowed}
        )

"""Every write of tasks and model releases."""

from penstock.registry.services.evaluations import evaluate_release
from penstock.registry.services.releases import approve_release, import_release, withdraw_release
from penstock.registry.services.tasks import (
    activate_task,
    create_task,
    create_unassigned_task,
    retire_task,
    submit_task,
    suspend_task,
    update_task,
)

__all__ = [
    "activate_task",
    "approve_release",
    "create_task",
    "create_unassigned_task",
    "evaluate_release",
    "import_release",
    "retire_task",
    "submit_task",
    "suspend_task",
    "update_task",
    "withdraw_release",
]

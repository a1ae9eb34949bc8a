"""Whose figures a person may see, as governance asks for it."""

from governance.controls.sources import Scope
from penstock.accounts.access import is_administrator
from penstock.accounts.models import User
from penstock.registry.selectors import tasks_visible_to


def scope_of(user: User) -> Scope:
    if is_administrator(user):
        return Scope()
    return Scope(visible_task_ids=frozenset(tasks_visible_to(user).values_list("pk", flat=True)))

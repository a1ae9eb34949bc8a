"""Figures of what is registered: tasks, model releases, hosts, and who may reach them. These describe the present."""

from collections.abc import Mapping
from typing import Any

from django.db.models import Max, Min, Q, QuerySet

from governance.controls.sources import Measurement
from penstock.accounts.models import ApiKey, Team, User
from penstock.registry.models import ModelRelease, Task, TaskVersion
from penstock.serving.models import EngineHost
from penstock.telemetry.measurements.window import Figure, Window, narrowed


def active_tasks(key: str, window: Window) -> Measurement:
    count = _active(window).count()
    return window.measured(key, count, "count", count=count, at=window.end)


def tasks_with_owner_rate(key: str, window: Window) -> Measurement:
    """An owner who has left answers for nothing: the person must still be active here."""
    return _share(key, window, _active(window), Q(owner__is_active=True), "name")


def tasks_with_objectives_rate(key: str, window: Window) -> Measurement:
    return _share(key, window, _active(window), ~Q(objectives=[]), "name")


def releases_with_licence_rate(key: str, window: Window) -> Measurement:
    return _share(key, window, _releases(window), ~Q(licence=""), "name")


def releases_with_digest_rate(key: str, window: Window) -> Measurement:
    return _share(key, window, _releases(window), Q(digest__regex=r"^[0-9a-f]{64}$"), "name")


def release_approvals(key: str, window: Window) -> Measurement:
    """Releases that are approved now, whenever that was."""
    approved = _releases(window).filter(status=ModelRelease.Status.APPROVED)
    times = approved.aggregate(oldest=Min("approved_at"), newest=Max("approved_at"))
    count = approved.count()
    return window.measured(
        key, count, "count", count=count, at=times["newest"] or window.end, start=times["oldest"] or window.start
    )


def task_changes(key: str, window: Window) -> Measurement:
    """All versions on record, the first of each task among them."""
    versions = narrowed(TaskVersion.objects.all(), window.scope, "task")
    times = versions.aggregate(oldest=Min("created_at"), newest=Max("created_at"))
    count = versions.count()
    return window.measured(
        key, count, "count", count=count, at=times["newest"] or window.end, start=times["oldest"] or window.start
    )


def host_inventory(key: str, window: Window) -> Measurement:
    """Dated by the newest sign of life: a host that has fallen silent is a stale record."""
    hosts = EngineHost.objects.aggregate(newest=Max("heartbeat_at"), oldest=Min("started_at"))
    count = EngineHost.objects.count()
    return window.measured(
        key, count, "count", count=count, at=hosts["newest"] or window.end, start=hosts["oldest"] or window.start
    )


def active_users(key: str, window: Window) -> Measurement:
    users = User.objects.filter(is_active=True)
    if window.is_narrowed:
        users = users.filter(memberships__team__in=_teams(window)).distinct()
    count = users.count()
    return window.measured(key, count, "count", count=count, at=window.end)


def api_keys_active(key: str, window: Window) -> Measurement:
    """Keys that would open something now."""
    unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=window.end)
    keys = ApiKey.objects.filter(unexpired, revoked_at__isnull=True, user__is_active=True)
    if window.is_narrowed:
        keys = keys.filter(team__in=_teams(window))
    count = keys.count()
    return window.measured(key, count, "count", count=count, at=window.end)


def _active(window: Window) -> QuerySet[Task]:
    """The tasks that are in use; those made by the installation for requests without a task are nobody's plan."""
    return window.tasks.filter(status=Task.Status.ACTIVE, unassigned=False)


def _releases(window: Window) -> QuerySet[ModelRelease]:
    """Releases that are not withdrawn; for some tasks only, those that they run on."""
    releases = ModelRelease.objects.exclude(status=ModelRelease.Status.WITHDRAWN)
    return releases.filter(tasks__in=window.tasks).distinct() if window.is_narrowed else releases


def _teams(window: Window) -> QuerySet[Team]:
    return Team.objects.filter(tasks__in=window.tasks)


def _share(key: str, window: Window, rows: QuerySet[Any], condition: Q, name: str) -> Measurement:
    total, having = rows.count(), rows.filter(condition).count()
    lacking = list(rows.exclude(condition).order_by(name).values_list(name, flat=True)[:100])
    return window.measured(
        key,
        having / total if total else None,
        "ratio",
        count=total,
        at=window.end,
        lacking=lacking or None,
    )


REGISTRY_FIGURES: Mapping[str, Figure] = {
    "registry.active_tasks": active_tasks,
    "registry.tasks_with_owner_rate": tasks_with_owner_rate,
    "registry.tasks_with_objectives_rate": tasks_with_objectives_rate,
    "registry.releases_with_licence_rate": releases_with_licence_rate,
    "registry.releases_with_digest_rate": releases_with_digest_rate,
    "registry.release_approvals": release_approvals,
    "registry.task_changes": task_changes,
    "hosts.inventory": host_inventory,
    "access.active_users": active_users,
    "access.api_keys_active": api_keys_active,
}

"""Registering tasks, changing what they say, and moving them through their states."""

import hashlib
import re
from typing import Any

import rfc8785
from django.core.exceptions import NON_FIELD_ERRORS, PermissionDenied, ValidationError
from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.accounts.access import has_role, require_role
from penstock.accounts.models import Role, Team, User
from penstock.registry.contracts import (
    dump_objectives,
    parse_fairness_plan,
    parse_objectives,
    parse_output_contract,
)
from penstock.registry.models import LatencyClass, ModelRelease, Task, TaskVersion
from penstock.registry.prompts import PromptError, template_fields
from penstock.registry.transitions import TASK_TRANSITIONS, TransitionError, check

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
UNASSIGNED = "unassigned-"

# What a task says. Those of the second set may be adjusted while a task is active; the others decide what it does,
# so that only an approver may change them under a running task.
CONTENT_FIELDS = (
    "title",
    "purpose",
    "owner",
    "latency_class",
    "risk_tier",
    "model_release",
    "system_prompt",
    "prompt_template",
    "max_output_tokens",
    "output_contract",
    "objectives",
    "fairness_plan",
    "budget_amount",
    "budget_currency",
    "retention_days",
)
ADJUSTABLE_FIELDS = frozenset(
    {"title", "objectives", "fairness_plan", "budget_amount", "budget_currency", "retention_days"}
)


@transaction.atomic
def create_task(
    *,
    user: User,
    team: Team,
    name: str,
    title: str,
    purpose: str,
    latency_class: str,
    model_release: ModelRelease,
    **fields: Any,
) -> Task:
    """Registers a task as a draft, version 1. `fields`: any other of `CONTENT_FIELDS`; the owner is `user` by default.

    Raises PermissionDenied, or ValidationError naming each bad field.
    """
    require_role(user, team, Role.OPERATOR, Role.TASK_OWNER)
    _check_name(name)
    task = Task(name=name, team=team)
    content = {
        "owner": user,
        "title": title,
        "purpose": purpose,
        "latency_class": latency_class,
        "model_release": model_release,
        **fields,
    }
    _apply(task, content)
    task.fairness_plan = task.fairness_plan or parse_fairness_plan(None).model_dump(mode="json")
    return _register(task, actor=user.actor)


@transaction.atomic
def create_unassigned_task(*, team: Team, model_release: ModelRelease) -> Task:
    """The task that requests count for which name none: active from the start, made by the installation itself."""
    owner = (
        User.objects.filter(is_active=True, memberships__team=team)
        .order_by("memberships__role", "pk")  # administrator, approver, …: the most accountable first
        .first()
        or User.objects.filter(is_active=True, is_superuser=True).order_by("pk").first()
    )
    if owner is None:
        raise ValidationError({"owner": _("The team has no active member who could own the task.")})
    task = Task(
        name=unassigned_name(team, model_release),
        team=team,
        owner=owner,
        title=_("Not assigned to a task: %(release)s") % {"release": model_release.name},
        purpose=_("Requests that name no task. Register a task for each use, so that none stays here."),
        latency_class=LatencyClass.INTERACTIVE,
        model_release=model_release,
        status=Task.Status.ACTIVE,
        unassigned=True,
        max_output_tokens=model_release.context_tokens,
        fairness_plan=parse_fairness_plan(None).model_dump(mode="json"),
    )
    return _register(task, actor="system")


def unassigned_name(team: Team, model_release: ModelRelease) -> str:
    """`unassigned-<release>-<team>`, cut with a digest where it would be longer than a name may be."""
    name = f"{UNASSIGNED}{model_release.name}-{team.slug}".lower().replace("_", "-")
    if len(name) > 80:
        name = f"{name[:67].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return name


@transaction.atomic
def update_task(*, user: User, task: Task, **changes: Any) -> Task:
    """Changes what a task says, as a new version; nothing changed, no version.

    A submitted task goes back to draft, since an approver activates what was submitted. An active task's
    `ADJUSTABLE_FIELDS` may be changed by its operators and owners, the rest only by an approver. A retired task stays
    as it is. Raises PermissionDenied, TransitionError, or ValidationError naming each bad field.
    """
    task = _locked(task)
    if task.status == Task.Status.RETIRED:
        open_states = ", ".join(str(s.label) for s in Task.Status if s != Task.Status.RETIRED)
        raise TransitionError(task.name, str(task.get_status_display()), open_states)
    require_role(user, task.team, Role.OPERATOR, Role.TASK_OWNER, Role.APPROVER)
    before = snapshot(task)
    _apply(task, changes)
    after = snapshot(task)
    changed = sorted(field for field in after if after[field] != before[field])
    if not changed:
        return task
    beyond = [field for field in changed if field not in ADJUSTABLE_FIELDS]
    if task.status == Task.Status.ACTIVE and beyond and not has_role(user, task.team, Role.APPROVER):
        raise PermissionDenied(
            _("An active task's %(fields)s can be changed only by an approver; or suspend the task first.")
            % {"fields": ", ".join(beyond)}
        )
    if task.status == Task.Status.SUBMITTED:
        task.status = Task.Status.DRAFT
    task.version += 1
    _save_checked(task)
    version = _keep_version(task, user.actor)
    record(
        kind="task.updated",
        subject=task.name,
        payload={"version": task.version, "digest": version.digest, "changed": changed, "status": task.status},
        actor=user.actor,
    )
    if "fairness_plan" in changed:
        record(
            kind="thresholds.changed",
            subject=task.name,
            payload={"task": task.name, "before": before["fairness_plan"], "after": after["fairness_plan"]},
            actor=user.actor,
        )
    return task


def submit_task(*, user: User, task: Task, reason: str = "") -> Task:
    """Asks an approver to activate a draft. Raises PermissionDenied, TransitionError."""
    return _move(user=user, task=task, name="submit", reason=reason)


def activate_task(*, user: User, task: Task, reason: str = "") -> Task:
    """Lets a task run on its approved release. Raises PermissionDenied, TransitionError, ValidationError."""
    return _move(user=user, task=task, name="activate", reason=reason)


def suspend_task(*, user: User, task: Task, reason: str = "") -> Task:
    """Stops a task from taking requests, until it is activated again. Raises PermissionDenied, TransitionError."""
    return _move(user=user, task=task, name="suspend", reason=reason)


def retire_task(*, user: User, task: Task, reason: str = "") -> Task:
    """Ends a task for good; its records stay. Raises PermissionDenied, TransitionError."""
    return _move(user=user, task=task, name="retire", reason=reason)


def snapshot(task: Task) -> dict[str, Any]:
    """What a task says, as plain JSON; a version keeps this and its digest."""
    amount = task.budget_amount
    return {
        "title": task.title,
        "purpose": task.purpose,
        "owner": task.owner.username,
        "latency_class": str(task.latency_class),
        "risk_tier": str(task.risk_tier),
        "model_release": {"name": task.model_release.name, "digest": task.model_release.digest},
        "system_prompt": task.system_prompt,
        "prompt_template": task.prompt_template,
        "max_output_tokens": task.max_output_tokens,
        "output_contract": task.output_contract,
        "objectives": task.objectives,
        "fairness_plan": task.fairness_plan,
        "budget_amount": None if amount is None else f"{amount:.2f}",
        "budget_currency": task.budget_currency,
        "retention_days": task.retention_days,
    }


@transaction.atomic
def _move(*, user: User, task: Task, name: str, reason: str) -> Task:
    transition = TASK_TRANSITIONS[name]
    task = _locked(task)
    require_role(user, task.team, *transition.roles)
    check(transition, name=task.name, status=Task.Status(task.status))
    release = task.model_release
    if transition.target == Task.Status.ACTIVE and release.status != ModelRelease.Status.APPROVED:
        raise ValidationError(
            {"model_release": _("The model release %(name)s is not approved.") % {"name": release.name}}
        )
    before = task.status
    task.status = transition.target
    task.save(update_fields=["status", "updated_at"])
    record(
        kind=transition.kind,
        subject=task.name,
        payload={
            "version": task.version,
            "digest": TaskVersion.objects.values_list("digest", flat=True).get(task=task, version=task.version),
            "release": release.name,
            "release_digest": release.digest,
            "before": before,
            "after": str(transition.target),
            "reason": reason,
        },
        actor=user.actor,
    )
    return task


def _locked(task: Task) -> Task:
    """The row as it is now, held until the transaction ends, so that two changes follow one another."""
    related = Task.objects.select_related("team", "owner", "model_release")
    return related.select_for_update(of=("self",)).get(pk=task.pk)


def _check_name(name: str) -> None:
    problem = ""
    if not NAME.fullmatch(name):
        problem = _("Use lower-case letters, digits and single hyphens between them.")
    elif name.startswith(UNASSIGNED):
        problem = _("Names that begin with %(prefix)s are the installation's own.") % {"prefix": UNASSIGNED}
    elif ModelRelease.objects.filter(name=name).exists():
        problem = _("A model release has this name, and programs name either as their model.")
    if problem:
        raise ValidationError({"name": problem})


def _apply(task: Task, changes: dict[str, Any]) -> None:
    """Sets the fields, structured ones checked and in their stored form; collects all that is wrong."""
    unknown = sorted(set(changes) - set(CONTENT_FIELDS))
    if unknown:
        raise TypeError(f"a task has no such fields: {', '.join(unknown)}")
    problems: dict[str, Any] = {}
    for field, value in changes.items():
        try:
            setattr(task, field, _stored_form(task, field, value))
        except ValidationError as error:
            problems.update(error.message_dict)
    if problems:
        raise ValidationError(problems)


def _stored_form(task: Task, field: str, value: Any) -> Any:
    match field:
        case "objectives":
            return dump_objectives(parse_objectives(value))
        case "fairness_plan":
            return parse_fairness_plan(value).model_dump(mode="json")
        case "output_contract":
            return parse_output_contract(value).model_dump(mode="json", exclude_defaults=True)
        case "prompt_template":
            try:
                template_fields(value)
            except PromptError as error:
                raise ValidationError({field: str(error)}) from error
        case "model_release" if value.status == ModelRelease.Status.WITHDRAWN:
            raise ValidationError({field: _("The model release %(name)s is withdrawn.") % {"name": value.name}})
        case "owner" if not has_role(value, task.team, *Role):
            raise ValidationError({field: _("The owner must be a member of the task's team.")})
    return value


def _register(task: Task, *, actor: str) -> Task:
    _save_checked(task)
    version = _keep_version(task, actor)
    record(
        kind="task.created",
        subject=task.name,
        payload={
            "team": task.team.slug,
            "latency_class": str(task.latency_class),
            "risk_tier": str(task.risk_tier),
            "release": task.model_release.name,
            "version": task.version,
            "digest": version.digest,
            "unassigned": task.unassigned,
        },
        actor=actor,
    )
    return task


def _save_checked(task: Task) -> None:
    task.full_clean()
    try:
        with transaction.atomic():
            task.save()
    except IntegrityError as error:  # somebody took the name since it was checked
        raise ValidationError({NON_FIELD_ERRORS: _("A task with this name exists already.")}) from error


def _keep_version(task: Task, actor: str) -> TaskVersion:
    content = snapshot(task)
    digest = hashlib.sha256(rfc8785.dumps(content)).hexdigest()
    return TaskVersion.objects.create(task=task, version=task.version, content=content, digest=digest, created_by=actor)

"""People, teams, their roles in them, and the keys that programs use."""

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils.translation import gettext_lazy as _


class Role(models.TextChoices):
    OPERATOR = "operator", _("Operator")
    TASK_OWNER = "task_owner", _("Task owner")
    APPROVER = "approver", _("Approver")
    AUDITOR = "auditor", _("Auditor")
    PILOT_MANAGER = "pilot_manager", _("Pilot manager")
    ADMINISTRATOR = "administrator", _("Administrator")


class User(AbstractUser):
    """A person. `is_superuser` means administrator of the whole installation."""

    language = models.CharField(_("language"), max_length=10, blank=True)

    # The key that a program signed in with, for this request only; a person at a browser has none.
    acting_key: "ApiKey | None" = None

    class Meta:
        verbose_name = _("person")
        verbose_name_plural = _("people")

    @property
    def actor(self) -> str:
        """Who the ledger names: `key:<prefix>` for a program, else the person's user name."""
        return f"key:{self.acting_key.prefix}" if self.acting_key else self.username


class Team(models.Model):
    slug = models.SlugField(_("short name"), unique=True, max_length=60)
    name = models.CharField(_("name"), max_length=120)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("slug",)

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """One role of one person in one team; a person may hold several."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(_("role"), max_length=20, choices=Role)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "team", "role"], name="membership_once"),
            models.CheckConstraint(condition=models.Q(role__in=Role.values), name="membership_role_known"),
        ]


class ApiKey(models.Model):
    """A program's credential. Only the SHA-256 of the secret is kept; the key is shown once, when it is made."""

    name = models.CharField(_("name"), max_length=120)
    prefix = models.CharField(max_length=16, unique=True)
    secret_digest = models.CharField(max_length=64)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="api_keys")
    user = models.ForeignKey(User, on_delete=models.PROTECT, related_name="api_keys")
    task_name = models.SlugField(
        _("task"), max_length=80, blank=True, help_text=_("Requests that name no task count for this one.")
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(_("expires"), null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return f"{self.name} (pk_{self.prefix}…)"

"""The Django app that carries the governance tables."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class GovernanceConfig(AppConfig):
    name = "governance"
    label = "governance"
    verbose_name = _("Governance")
    default_auto_field = "django.db.models.BigAutoField"

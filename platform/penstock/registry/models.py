"""What may run: tasks and the model releases that they run on."""

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from penstock.accounts.models import Team


class LatencyClass(models.TextChoices):
    """How long someone waits; fixes queue, priority, default objectives and what the engine may trade."""

    REALTIME = "realtime", _("Realtime: a person watches the tokens")
    INTERACTIVE = "interactive", _("Interactive: a person waits for the answer")
    NEARLINE = "nearline", _("Nearline: a process waits minutes")
    BATCH = "batch", _("Batch: a deadline hours away")


class RiskTier(models.TextChoices):
    MINIMAL = "minimal", _("Minimal")
    LIMITED = "limited", _("Limited (transparency duties)")
    HIGH = "high", pgettext_lazy("risk tier", "High")


class ModelRelease(models.Model):
    """Immutable weights with their papers. Another quantization of the same model is another release."""

    class Status(models.TextChoices):
        IMPORTED = "imported", _("Imported")
        EVALUATED = "evaluated", _("Evaluated")
        APPROVED = "approved", _("Approved")
        WITHDRAWN = "withdrawn", _("Withdrawn")

    name = models.SlugField(_("name"), unique=True, max_length=80)
    status = models.CharField(_("status"), max_length=12, choices=Status, default=Status.IMPORTED)
    digest = models.CharField(_("digest (SHA-256)"), max_length=64)
    architecture = models.CharField(_("architecture"), max_length=60)
    parameters = models.BigIntegerField(_("parameters"))
    size_bytes = models.BigIntegerField(_("size on disk, bytes"))
    context_tokens = models.PositiveIntegerField(_("context, tokens"))
    quantization = models.CharField(_("quantization"), max_length=60)
    tokenizer_digest = models.CharField(_("tokenizer digest (SHA-256)"), max_length=64)
    licence = models.CharField(_("licence"), max_length=120, blank=True)
    supplier = models.CharField(_("supplier"), max_length=120, blank=True)
    source = models.CharField(_("source"), max_length=300, blank=True)
    source_digest = models.CharField(_("source digest (SHA-256)"), max_length=64, blank=True)
    store_path = models.CharField(max_length=500)
    source_path = models.CharField(max_length=500, blank=True)
    manifest = models.JSONField(default=dict)
    imported_at = models.DateTimeField(auto_now_add=True)
    imported_by = models.CharField(max_length=150)
    approved_at = models.DateTimeField(null=True, blank=True)
    approved_by = models.CharField(max_length=150, blank=True)
    withdrawn_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(
                condition=Q(status="approved", approved_at__isnull=False) | ~Q(status="approved"),
                name="release_approval_is_dated",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class ReleaseEvaluation(models.Model):
    """What one measurement of a release against a reference gave. Never changed; a release may have several.

    `figures` is `inference.evaluate.Evaluation` as JSON: values with their intervals, and what was run.
    """

    release = models.ForeignKey(ModelRelease, on_delete=models.PROTECT, related_name="evaluations")
    figures = models.JSONField()
    text_name = models.CharField(max_length=200)
    text_sha256 = models.CharField(max_length=64)
    task_sha256 = models.CharField(max_length=64, blank=True)
    reference_digest = models.CharField(max_length=64)
    evaluated_at = models.DateTimeField(auto_now_add=True)
    evaluated_by = models.CharField(max_length=150)

    class Meta:
        ordering = ("release", "-evaluated_at", "-id")

    def __str__(self) -> str:
        return f"{self.release} {self.evaluated_at:%Y-%m-%d}"


class Task(models.Model):
    """A registered use of AI."""

    class Status(models.TextChoices):
        DRAFT = "draft", _("Draft")
        SUBMITTED = "submitted", _("Submitted")
        ACTIVE = "active", _("Active")
        SUSPENDED = "suspended", _("Suspended")
        RETIRED = "retired", _("Retired")

    name = models.SlugField(
        _("name"),
        unique=True,
        max_length=80,
        help_text=_("Lower-case letters, digits and hyphens; programs use it."),
    )
    title = models.CharField(_("title"), max_length=160)
    purpose = models.TextField(
        _("purpose"), help_text=_("What it decides or writes, for whom, and what it is not for.")
    )
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.PROTECT,
        related_name="owned_tasks",
        verbose_name=_("owner"),
    )
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="tasks", verbose_name=_("team"))
    latency_class = models.CharField(_("latency class"), max_length=12, choices=LatencyClass)
    risk_tier = models.CharField(_("risk tier"), max_length=10, choices=RiskTier, default=RiskTier.MINIMAL)
    model_release = models.ForeignKey(
        ModelRelease, on_delete=models.PROTECT, related_name="tasks", verbose_name=_("model release")
    )
    system_prompt = models.TextField(_("system prompt"), blank=True)
    prompt_template = models.TextField(
        _("prompt template"),
        blank=True,
        help_text=_("Used for records that are not yet prompts: $field is replaced by the record's field."),
    )
    max_output_tokens = models.PositiveIntegerField(_("most output tokens a request"), default=256)
    output_contract = models.JSONField(_("output contract"), default=dict, blank=True)
    objectives = models.JSONField(_("objectives"), default=list, blank=True)
    fairness_plan = models.JSONField(_("fairness plan"), default=dict, blank=True)
    budget_amount = models.DecimalField(_("budget a month"), max_digits=14, decimal_places=2, null=True, blank=True)
    budget_currency = models.CharField(_("currency"), max_length=3, blank=True)
    retention_days = models.PositiveIntegerField(_("retention, days"), default=184)
    unassigned = models.BooleanField(default=False, editable=False)
    status = models.CharField(_("status"), max_length=10, choices=Status, default=Status.DRAFT)
    version = models.PositiveIntegerField(_("version"), default=1)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(condition=Q(latency_class__in=LatencyClass.values), name="task_class_known"),
            models.CheckConstraint(condition=Q(risk_tier__in=RiskTier.values), name="task_risk_known"),
            models.CheckConstraint(
                condition=Q(budget_amount__isnull=True) | ~Q(budget_currency=""),
                name="task_budget_has_currency",
            ),
        ]

    def __str__(self) -> str:
        return self.title


class TaskVersion(models.Model):
    """What a task said at one version; requests and evidence refer to it. Never changed."""

    task = models.ForeignKey(Task, on_delete=models.PROTECT, related_name="versions")
    version = models.PositiveIntegerField()
    content = models.JSONField()
    digest = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=150)

    class Meta:
        ordering = ("task", "-version")
        constraints = [models.UniqueConstraint(fields=["task", "version"], name="task_version_once")]

"""Pilots: a baseline, a trial, and the return that follows from both."""

from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from penstock.registry.models import Task
from penstock.serving.models import Batch, File
from penstock.telemetry.models import RateCard


class Pilot(models.Model):
    class Status(models.TextChoices):
        PLANNED = "planned", _("Planned")
        BASELINE = "baseline", _("Measuring the baseline")
        RUNNING = "running", _("Trial running")
        DECIDED = "decided", _("Decided")

    class Decision(models.TextChoices):
        SCALE = "scale", _("Scale up")
        REDESIGN = "redesign", _("Redesign")
        STOP = "stop", _("Stop")

    name = models.SlugField(_("name"), unique=True, max_length=80)
    title = models.CharField(_("title"), max_length=160)
    task = models.ForeignKey(Task, on_delete=models.PROTECT, related_name="pilots", verbose_name=_("task"))
    items_file = models.ForeignKey(File, on_delete=models.PROTECT, related_name="+", verbose_name=_("items"))
    sample_items = models.PositiveIntegerField(
        _("items compared"),
        default=16,
        validators=[MinValueValidator(1)],
        help_text=_("The first so many items run both ways; figures compare these same items."),
    )
    status = models.CharField(_("status"), max_length=10, choices=Status, default=Status.PLANNED)
    trial_batch = models.ForeignKey(
        Batch,
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="pilots",
        verbose_name=_("trial batch"),
    )
    rate_card = models.ForeignKey(RateCard, on_delete=models.PROTECT, related_name="+", verbose_name=_("rate card"))
    items_per_month = models.PositiveIntegerField(_("items a month"), default=10_000)
    introduction_cost = models.DecimalField(
        _("cost of introduction"),
        max_digits=14,
        decimal_places=2,
        default=Decimal("0"),
        validators=[MinValueValidator(Decimal("0"))],
        help_text=_("What it takes to introduce it, once, in the rate card's currency: staff, training, set-up."),
    )
    discount_rate = models.DecimalField(
        _("discount rate a year"),
        max_digits=5,
        decimal_places=4,
        default=Decimal("0.05"),
        validators=[MinValueValidator(Decimal("0"))],
        help_text=_("As a share: 0.05 is 5 % a year. It makes later savings worth less in the net present value."),
    )
    trial_days = models.PositiveIntegerField(_("trial, days"), default=90)
    starts_on = models.DateField(_("starts on"))
    decision = models.CharField(_("decision"), max_length=10, choices=Decision, blank=True)
    decision_reason = models.TextField(_("reason"), blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    decided_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=150)

    class Meta:
        ordering = ("-created_at",)

    def __str__(self) -> str:
        return self.title


class BaselineRun(models.Model):
    """The naive way, measured: transformers `generate`, unquantized, one prompt at a time.

    `attempts` counts the claims and is the fence: each write carries the number of the claim that it belongs to.
    """

    class Status(models.TextChoices):
        QUEUED = "queued", _("Queued")
        RUNNING = "running", _("Running")
        COMPLETED = "completed", _("Completed")
        FAILED = "failed", _("Failed")

    pilot = models.ForeignKey(Pilot, on_delete=models.CASCADE, related_name="baseline_runs")
    status = models.CharField(max_length=10, choices=Status, default=Status.QUEUED)
    attempts = models.PositiveIntegerField(default=0)
    method = models.JSONField(default=dict)
    error_message = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, blank=True)
    heartbeat_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-created_at",)
        constraints = [
            # Two runs at once would disturb each other.
            models.UniqueConstraint(
                fields=["pilot"], condition=Q(status__in=["queued", "running"]), name="one_open_baseline_run"
            ),
        ]


class BaselineItem(models.Model):
    run = models.ForeignKey(BaselineRun, on_delete=models.CASCADE, related_name="items")
    custom_id = models.CharField(max_length=255)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()
    finish_reason = models.CharField(max_length=20, blank=True)
    prompt_tokens = models.PositiveIntegerField()
    output_tokens = models.PositiveIntegerField()
    ttft_seconds = models.FloatField(null=True, blank=True)
    duration_seconds = models.FloatField()
    output_text = models.TextField()
    output_digest = models.CharField(max_length=64)
    valid = models.BooleanField(null=True, blank=True)
    violations = models.JSONField(default=list, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "custom_id"], name="baseline_item_once")]

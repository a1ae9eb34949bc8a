"""What happened, as figures: usage and cost of each request, and the rates they were reckoned with."""

from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from penstock.accounts.models import Team
from penstock.registry.models import ModelRelease, Task
from penstock.serving.models import Batch, Request

POSITIVE = [MinValueValidator(Decimal("0"))]


class RateCard(models.Model):
    """What an hour of the host costs. A change makes a new card, so that an old figure keeps its own rates."""

    name = models.CharField(_("name"), max_length=80)
    currency = models.CharField(_("currency"), max_length=3, default="TWD")
    hardware_price = models.DecimalField(
        _("hardware price"),
        max_digits=14,
        decimal_places=2,
        validators=POSITIVE,
        help_text=_("What the host cost, new."),
    )
    lifetime_years = models.DecimalField(
        _("years of use"), max_digits=5, decimal_places=2, validators=[MinValueValidator(Decimal("0.25"))]
    )
    utilization = models.DecimalField(
        _("share of hours in use"),
        max_digits=4,
        decimal_places=3,
        default=Decimal("1"),
        validators=[MinValueValidator(Decimal("0.01"))],
        help_text=_("Between 0.01 and 1: idle hours are paid for by the busy ones."),
    )
    power_watts = models.DecimalField(_("power under load, watts"), max_digits=8, decimal_places=1, validators=POSITIVE)
    electricity_price_per_kwh = models.DecimalField(
        _("electricity price a kWh"), max_digits=8, decimal_places=4, validators=POSITIVE
    )
    carbon_kg_per_kwh = models.DecimalField(
        _("carbon, kg a kWh"), max_digits=6, decimal_places=4, validators=POSITIVE, default=Decimal("0.474")
    )
    current = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=150)

    class Meta:
        ordering = ("-created_at",)
        constraints = [
            models.UniqueConstraint(fields=["current"], condition=Q(current=True), name="one_current_rate_card"),
            models.CheckConstraint(
                condition=Q(utilization__gt=0, utilization__lte=1), name="rate_card_utilization_is_a_share"
            ),
            models.CheckConstraint(condition=Q(lifetime_years__gt=0), name="rate_card_lifetime_positive"),
        ]

    def __str__(self) -> str:
        return self.name


class Usage(models.Model):
    """What one finished request used and cost, written in the transaction that recorded its result."""

    class EnergySource(models.TextChoices):
        MEASURED = "measured", _("Measured")
        ESTIMATED = "estimated", _("Estimated")

    request = models.OneToOneField(Request, on_delete=models.CASCADE, primary_key=True, related_name="usage")
    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, null=True, blank=True, related_name="usage")
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="+")
    task = models.ForeignKey(Task, on_delete=models.PROTECT, related_name="usage")
    model_release = models.ForeignKey(ModelRelease, on_delete=models.PROTECT, related_name="+")
    finished_at = models.DateTimeField()
    prompt_tokens = models.PositiveIntegerField()
    output_tokens = models.PositiveIntegerField()
    compute_seconds = models.FloatField()
    cost = models.DecimalField(max_digits=18, decimal_places=10)
    currency = models.CharField(max_length=3)
    energy_kwh = models.DecimalField(max_digits=18, decimal_places=12)
    energy_source = models.CharField(max_length=10, choices=EnergySource)
    rate_card = models.ForeignKey(RateCard, on_delete=models.PROTECT, related_name="+")

    class Meta:
        indexes = [
            # A task's cost and energy over a window.
            models.Index(fields=["task", "finished_at"], name="usage_task_finished"),
        ]

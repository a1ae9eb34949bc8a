import datetime
from decimal import Decimal

import django.core.validators
from django.db import migrations, models

BEGINNING = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


class Migration(migrations.Migration):
    dependencies = [("pilots", "0003_initial")]

    operations = [
        migrations.AddField(
            model_name="pilot",
            name="discount_rate",
            field=models.DecimalField(
                decimal_places=4,
                default=Decimal("0.05"),
                help_text="As a share: 0.05 is 5 % a year. It makes later savings worth less in the net present value.",
                max_digits=5,
                validators=[django.core.validators.MinValueValidator(Decimal("0"))],
                verbose_name="discount rate a year",
            ),
        ),
        migrations.AddField(model_name="baselinerun", name="attempts", field=models.PositiveIntegerField(default=0)),
        migrations.AddConstraint(
            model_name="baselinerun",
            constraint=models.UniqueConstraint(
                condition=models.Q(("status__in", ["queued", "running"])),
                fields=("pilot",),
                name="one_open_baseline_run",
            ),
        ),
        migrations.AddField(
            model_name="baselineitem",
            name="started_at",
            field=models.DateTimeField(default=BEGINNING),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="baselineitem",
            name="finished_at",
            field=models.DateTimeField(default=BEGINNING),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="baselineitem", name="finish_reason", field=models.CharField(blank=True, max_length=20)
        ),
        migrations.AddField(
            model_name="baselineitem", name="violations", field=models.JSONField(blank=True, default=list)
        ),
    ]

"""Measurements and thresholds of controls as people read them; governance words them for its exports too."""

from django import template
from django.utils.safestring import SafeString

from governance.controls.figures import measurement_text, threshold_text
from governance.controls.rules import Threshold
from governance.controls.sources import Measurement
from penstock.dashboard.templatetags.figures import nothing

register = template.Library()


@register.simple_tag
def measured(measurement: Measurement | None) -> str | SafeString:
    if measurement is None or measurement.value is None:
        return nothing()
    return measurement_text(measurement)


@register.simple_tag
def threshold(limit: Threshold | None) -> str | SafeString:
    return nothing() if limit is None else threshold_text(limit)

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    name = "penstock.telemetry"
    label = "telemetry"

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    name = "penstock.telemetry"
    label = "telemetry"

    def ready(self) -> None:
        from governance.controls.sources import register_source
        from penstock.serving.completion import register_recorder
        from penstock.telemetry.measurements import SOURCE
        from penstock.telemetry.recorder import record_usage

        register_recorder(record_usage)
        register_source(SOURCE)

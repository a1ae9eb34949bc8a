from django.apps import AppConfig


class PilotsConfig(AppConfig):
    name = "penstock.pilots"
    label = "pilots"

    def ready(self) -> None:
        from governance.controls.sources import register_source
        from penstock.pilots.measurements import SOURCE

        register_source(SOURCE)

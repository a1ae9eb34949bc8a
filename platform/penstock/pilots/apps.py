from django.apps import AppConfig


class PilotsConfig(AppConfig):
    name = "penstock.pilots"
    label = "pilots"

from django.apps import AppConfig


class ServingConfig(AppConfig):
    name = "penstock.serving"
    label = "serving"

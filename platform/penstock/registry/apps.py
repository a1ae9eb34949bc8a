from django.apps import AppConfig


class RegistryConfig(AppConfig):
    name = "penstock.registry"
    label = "registry"

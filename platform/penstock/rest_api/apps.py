from django.apps import AppConfig


class RestApiConfig(AppConfig):
    name = "penstock.rest_api"
    label = "rest_api"

    def ready(self) -> None:
        from penstock.rest_api import schema  # noqa: F401 - registers itself with drf-spectacular

from django.apps import AppConfig


class RestApiConfig(AppConfig):
    name = "penstock.rest_api"
    label = "rest_api"

from django.apps import AppConfig


class OpenaiApiConfig(AppConfig):
    name = "penstock.openai_api"
    label = "openai_api"

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "penstock.accounts"
    label = "accounts"

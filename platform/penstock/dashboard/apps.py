from django.apps import AppConfig


class DashboardConfig(AppConfig):
    name = "penstock.dashboard"
    label = "dashboard"

"""The Django app: installs the library and its system checks when Django starts."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register

from .celery_app import install_in_apps


class CeleryUniqueConfig(AppConfig):
    name = "celery_unique.contrib.django"
    label = "celery_unique"
    verbose_name = "Unique tasks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from .checks import check_project

        install_in_apps()
        register(check_project, "celery_unique")

"""A Django project as Celery's guide shows it, with this library in INSTALLED_APPS."""

from .celery import app as celery_app

__all__ = ["celery_app"]

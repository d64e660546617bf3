"""The Celery app of the project: not a word of this library."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.django.shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["tests.django.shop"])
app.autodiscover_tasks(["tests.django.shop"], related_name="background")

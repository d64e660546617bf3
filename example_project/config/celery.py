import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

# The task class notes calls and runs down for the page to show. Your project needs none.
app = Celery("shop", task_cls="shop.activity:WatchedTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

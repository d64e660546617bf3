"""For ``manage.py test``: broker and locks in memory, with the same rules as everywhere."""

from .settings import *  # noqa: F403
from .settings import DATA, DATABASES

CELERY_BROKER_URL = "memory://"
CELERY_BROKER_TRANSPORT = None
CELERY_BROKER_TRANSPORT_OPTIONS = {"polling_interval": 0.01}
CELERY_UNIQUE_STORE_URL = "memory://"
CELERY_WORKER_HIJACK_ROOT_LOGGER = False

# A file, since a worker in another thread must see it.
DATABASES["default"]["TEST"] = {"NAME": DATA / "test.sqlite3"}
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
WORK_S = 0

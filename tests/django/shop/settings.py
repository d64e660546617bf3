"""The settings. Where the servers are comes from the environment, as in a deployment."""

import json
import os

SECRET_KEY = "for tests only"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-gb"
ROOT_URLCONF = "tests.django.shop.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    *os.environ.get("SHOP_APPS", "").split(),
    "celery_unique.contrib.django",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASES = json.loads(
    os.environ.get(
        "SHOP_DATABASES",
        '{"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}',
    )
)
CACHES = json.loads(
    os.environ.get(
        "SHOP_CACHES",
        '{"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}',
    )
)

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER_URL", "memory://")
CELERY_RESULT_BACKEND = os.environ.get("SHOP_RESULT_BACKEND")
CELERY_RESULT_EXTENDED = True
CELERY_TASK_TRACK_STARTED = True
if "SHOP_STORE_URL" in os.environ:
    CELERY_UNIQUE_STORE_URL = os.environ["SHOP_STORE_URL"]
    # The machine that runs the tests may be busy with others.
    CELERY_UNIQUE_STORE_TIMEOUT = 20
    CELERY_UNIQUE_GATE_TIMEOUT = 5

TASKS = {
    "default": {
        "BACKEND": "celery_unique.contrib.django.task_backend.CeleryBackend",
        "QUEUES": ["default", "slow"],
    },
    "windowed": {
        "BACKEND": "celery_unique.contrib.django.task_backend.CeleryBackend",
        "OPTIONS": {"unique": True, "unique_for": "PT10M", "unique_states": "window"},
    },
}

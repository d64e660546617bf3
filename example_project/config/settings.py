"""Settings of the shop.

Read from the environment:

SHOP_REDIS_URL       messages and locks are in this Redis; without it in files and in SQLite
SHOP_DATA            the directory for the database, mails and messages (default: var/)
SHOP_WORK_S          how many seconds the tasks pretend to work (default: 3)
SHOP_REPORT_EVERY_S  how often beat calls the "nightly" report (default: 20)
SHOP_FLOWER_URL      where Flower is, for the link on the page
"""

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("SHOP_DATA", BASE_DIR / "var"))
REDIS_URL = os.environ.get("SHOP_REDIS_URL", "")
FLOWER_URL = os.environ.get("SHOP_FLOWER_URL", "")
WORK_S = float(os.environ.get("SHOP_WORK_S", "3"))
REPORT_EVERY_S = float(os.environ.get("SHOP_REPORT_EVERY_S", "20"))

DATA.mkdir(parents=True, exist_ok=True)

# -- Celery and celery_unique ----------------------------------------------------------------------

if REDIS_URL:
    CELERY_BROKER_URL = REDIS_URL  # locks are kept there too, unless CELERY_UNIQUE_STORE_URL is set
else:
    MESSAGES = DATA / "messages"
    MESSAGES.mkdir(exist_ok=True)
    CELERY_BROKER_URL = "filesystem://localhost"
    CELERY_BROKER_TRANSPORT = "config.file_broker:Transport"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(MESSAGES),
        "data_folder_out": str(MESSAGES),
        "control_folder": str(DATA / "control"),
        "polling_interval": 0.05,
    }
    CELERY_UNIQUE_STORE_URL = "django-db://default"

CELERY_RESULT_BACKEND = "django-db"  # django-celery-results: a page of results in the admin
CELERY_RESULT_EXTENDED = True
CELERY_TASK_TRACK_STARTED = True
CELERY_WORKER_SEND_TASK_EVENTS = True
CELERY_BEAT_SCHEDULE_FILENAME = str(DATA / "beat-schedule")

# "Nightly" is every 20 seconds here, so that there is something to see. A real shop would say
# crontab(hour=2), and a window of some hours: shop/tasks.py has it.
CELERY_BEAT_SCHEDULE = {
    "nightly-report": {"task": "shop.tasks.nightly_report", "schedule": REPORT_EVERY_S},
}

# -- Django ----------------------------------------------------------------------------------------

# For this machine only. A real project takes SECRET_KEY from its environment and has no DEBUG.
SECRET_KEY = "an example, not a secret"
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_results",
    "celery_unique.contrib.django",  # all that the project needs, besides unique=True
    "shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "shop.middleware.ContentSecurityPolicy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"

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

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA / "shop.sqlite3",
        "OPTIONS": {
            # Web server, worker and beat write at the same time: wait instead of "database is
            # locked", and take the lock at the beginning of a transaction, not in its middle.
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

EMAIL_BACKEND = "django.core.mail.backends.filebased.EmailBackend"
EMAIL_FILE_PATH = DATA / "mail"

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"

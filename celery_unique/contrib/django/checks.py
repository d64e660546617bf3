"""System checks of the configuration. They do not connect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  Django's name

from celery_unique.config.app_state import is_installed
from celery_unique.config.settings import DEFAULT_SETTINGS, SETTINGS, read_settings
from celery_unique.config.store_url import store_url
from celery_unique.exceptions import ConfigurationError, nearest
from celery_unique.stores import open_store

from .celery_app import project_app, project_apps

PREFIX = "CELERY_UNIQUE_"
_NAMES = (*SETTINGS, *DEFAULT_SETTINGS)


def check_installed_apps(**_: Any) -> list[CheckMessage]:
    """Registered on import of this library: without its Django app, nothing else of it runs."""
    if apps.is_installed("celery_unique.contrib.django"):
        return []
    found = sorted(
        name
        for app in project_apps()
        if not is_installed(app)
        for name, task in app.tasks.items()
        if getattr(task, "unique", False)
    )
    if not found:
        return []
    return [
        Warning(
            "celery_unique.contrib.django is not in INSTALLED_APPS, so that duplicates run of "
            f"{', '.join(found[:5])}{', ...' if len(found) > 5 else ''}.",
            hint="Add 'celery_unique.contrib.django' to INSTALLED_APPS.",
            id="celery_unique.W006",
        )
    ]


def check_project(**_: Any) -> list[CheckMessage]:
    """All checks; in a project without a Celery app, only that."""
    try:
        app = project_app()
    except ConfigurationError as error:
        what, _dot, cure = str(error).partition(". ")
        return [Warning(f"{what}.", hint=cure, id="celery_unique.W003")]
    return [
        *_check_names(),
        *_check_prefix(app),
        *_check_that_they_are_read(app),
        *_check_values(app),
    ]


def _given() -> dict[str, Any]:
    return {name: getattr(settings, name) for name in dir(settings) if name.startswith(PREFIX)}


def _check_names() -> Iterator[CheckMessage]:
    for name in _given():
        setting = name.removeprefix("CELERY_").lower()
        if setting not in _NAMES:
            near = nearest(setting, _NAMES)
            hint = f"Did you mean CELERY_{near.upper()}?" if near else None
            yield Warning(
                f"{name} is not a setting of celery_unique: nothing reads it.",
                hint=hint or "The settings reference of celery_unique lists all settings.",
                id="celery_unique.W001",
            )


def _check_prefix(app: Any) -> Iterator[CheckMessage]:
    """Names without ``CELERY_``. One that resembles no setting belongs to another app."""
    for name in dir(settings):
        if not name.startswith("UNIQUE_"):
            continue
        near = nearest(name.lower(), _NAMES)
        if near is not None and app.conf.get(near) != getattr(settings, name):
            yield Warning(
                f"{name} has no effect: Celery reads settings of celery_unique only with the "
                "prefix CELERY_.",
                hint=f"Write {_spelled(near)}.",
                id="celery_unique.W005",
            )


def _check_that_they_are_read(app: Any) -> Iterator[CheckMessage]:
    unread = sorted(
        name
        for name, value in _given().items()
        if (setting := name.removeprefix("CELERY_").lower()) in _NAMES
        and app.conf.get(setting) != value
    )
    if unread:
        yield Warning(
            f"The Celery app {app.main!r} does not read {', '.join(unread)}.",
            hint="Configure it with "
            "app.config_from_object('django.conf:settings', namespace='CELERY'), "
            "or set the same values on the app itself.",
            id="celery_unique.W004",
        )


def _check_values(app: Any) -> Iterator[CheckMessage]:
    try:
        found = read_settings(app)
    except ConfigurationError as error:
        if error.setting == "unique_store_url":
            yield _store_error(error, "")
        else:
            yield Error(
                str(error),
                hint=f"Correct {_spelled(error.setting)} in the settings.",
                id="celery_unique.E002",
            )
        return
    url = ""
    try:
        url, options = store_url(app, found)
        open_store(url, namespace=found.namespace, **options).close()
    except (ConfigurationError, ImportError) as error:
        yield _store_error(error, url)
        return
    if url.startswith("memory:") and not _stays_in_one_process(app):
        yield Warning(
            "Every process has its own lock store memory://, so a call in the web process does not "
            "see a lock of a worker or of another web process.",
            hint=f"Outside tests, set {PREFIX}STORE_URL to a shared store, such as "
            "'redis://localhost:6379/1', 'django-cache://default' or 'django-db://default'.",
            id="celery_unique.W002",
        )


def _store_error(error: Exception, url: str) -> CheckMessage:
    scheme = url.partition("://")[0]
    command = re.search(r"pip install .+$", str(error))
    number, hint = {
        "django-cache": ("E003", "Name a cache of CACHES whose backend is Redis."),
        "django-db": ("E004", "Name a database of DATABASES that is PostgreSQL or SQLite."),
    }.get(scheme, ("E001", f"Set {PREFIX}STORE_URL to the URL of a lock store."))
    hint = f"Run {command[0]}" if command else hint
    return Error(str(error), hint=hint, id=f"celery_unique.{number}")


def _stays_in_one_process(app: Any) -> bool:
    """Whether tasks run where they are called, or the broker is in this process, as in tests."""
    broker = app.conf.broker_write_url
    return bool(app.conf.task_always_eager) or str(broker).startswith("memory:")


def _spelled(setting: str | None) -> str:
    return f"CELERY_{(setting or '').upper()}"

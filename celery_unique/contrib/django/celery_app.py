"""The Celery app of a Django project: finds it, and installs the library in it."""

from __future__ import annotations

from typing import Any

from celery import Celery, _state

from celery_unique.exceptions import ConfigurationError
from celery_unique.installation import install
from celery_unique.installation.fixup import FIXUP

#: The name of the app that Celery creates where a project has none.
_FALLBACK = "default"

NOT_FOUND = (
    "No Celery app was found. Create one in a module such as shop/celery.py and import it in "
    "shop/__init__.py, as Celery's guide for Django shows."
)
SEVERAL = (
    "There are several Celery apps, and none is the default one. Call set_default() on the "
    "project's."
)


def install_in_apps() -> None:
    """Install in every app that exists, and in each that is created later.

    The app of a project exists before its Django apps are ready: the package of the settings
    imports it, or it has called ``django.setup()``.
    """
    for app in _apps():
        install(app)
    # As Celery adds its own support for Django to every app.
    Celery.builtin_fixups = {*Celery.builtin_fixups, FIXUP}


def project_app() -> Any:
    """The app of the project's tasks, with the library installed.

    If there are several, it is Celery's default app, as for ``shared_task``.
    """
    app = _state.default_app
    if app is None or _is_fallback(app):
        apps = _apps()
        if len(apps) != 1:
            raise ConfigurationError(SEVERAL if apps else NOT_FOUND, setting=None)
        [app] = apps
    return install(app)


def project_apps() -> list[Any]:
    """All apps but Celery's fallback, as they are."""
    return _apps()


def _apps() -> list[Any]:
    return [app for app in list(_state._get_active_apps()) if not _is_fallback(app)]


def _is_fallback(app: Any) -> bool:
    return app.main == _FALLBACK and not app.set_as_current

"""The Celery app of a Django project: finding it, and installing the library in it."""

from __future__ import annotations

from typing import Any

from celery import Celery, _state

from celery_unique.exceptions import ConfigurationError
from celery_unique.installation import install
from celery_unique.installation.fixup import FIXUP

#: The name of the app that Celery makes up where a project has none.
_FALLBACK = "default"

NOT_FOUND = (
    "No Celery app was found. Make one in a module such as shop/celery.py and import it in "
    "shop/__init__.py, as Celery's guide for Django shows."
)


def install_in_apps() -> None:
    """Install in every app there is now, and in each that is made later.

    A project's app is there before its Django apps are ready: the package of the settings
    imports it, or it is the app that called ``django.setup()``.
    """
    for app in _apps():
        install(app)
    # As Celery's own support for Django comes to every app.
    Celery.builtin_fixups = {*Celery.builtin_fixups, FIXUP}


def project_app() -> Any:
    """The app that the project's tasks belong to, with the library installed.

    Where a project has several, it is Celery's default one, as for ``shared_task``.
    """
    app = _state.default_app
    if app is None or _is_fallback(app):
        apps = _apps()
        if len(apps) != 1:
            raise ConfigurationError(
                NOT_FOUND
                if not apps
                else "There are several Celery apps, and none is the default one. Call "
                "set_default() on the project's.",
                setting=None,
            )
        [app] = apps
    return install(app)


def _apps() -> list[Any]:
    return [app for app in list(_state._get_active_apps()) if not _is_fallback(app)]


def _is_fallback(app: Any) -> bool:
    return app.main == _FALLBACK and not app.set_as_current

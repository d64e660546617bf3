from __future__ import annotations

from typing import Any

from celery_unique.config.settings import check_setting_names

from .fixup import FIXUP, UniqueFixup


def install(app: Any, **settings: Any) -> Any:
    """Make every task of ``app`` understand ``unique=...``, and return the app.

    Idempotent, and connects to nothing. ``settings`` are the ``unique_*`` settings,
    with or without their prefix.
    """
    app = getattr(app, "_get_current_object", lambda: app)()
    named = {
        name if name.startswith("unique_") else f"unique_{name}": value
        for name, value in settings.items()
    }
    check_setting_names(named)
    if named:
        app.conf.update(named)
    if not any(isinstance(fixup, UniqueFixup) for fixup in app._fixups):
        app.fixups = {*app.fixups, FIXUP}
        app._fixups.append(UniqueFixup(app))
    return app

"""The conformance manifest of the Open Job Spec, section 8.3."""

from __future__ import annotations

from typing import Any

from celery_unique import __version__
from celery_unique.config.app_state import state_of
from celery_unique.publish.atomic import why_two_steps

__all__ = ["manifest"]

OJS_VERSION = "1.0.0-rc.1"
#: Levels describe a job backend with an interface of its own. This library is none: of the
#: specification it has unique jobs, as in `capabilities`.
CONFORMANCE_LEVEL = 0


def manifest(app: Any) -> dict[str, Any]:
    """Return the manifest of the app, with the strength of its configured store.

    Opens no connection. Raises ConfigurationError where no store is configured.
    """
    app = getattr(app, "_get_current_object", lambda: app)()
    app_state = state_of(app)
    store = app_state.store
    why = why_two_steps(app, app_state.settings, store)
    return {
        "ojs_version": OJS_VERSION,
        "implementation": {
            "name": "celery-unique-tasks",
            "version": __version__,
            "language": "python",
        },
        "conformance_level": CONFORMANCE_LEVEL,
        "capabilities": {
            "unique_jobs": {"strength": store.guarantee, "mechanism": store.mechanism},
            "atomic_publish": {"used": not why, "reason": why},
        },
    }

"""``install``: how an app comes to know this library.

Registered as one of the app's fix-ups, which Celery pickles with the app and runs
again where the app is rebuilt: an attribute set on the app alone would be lost in
the children of a pool that spawns.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import signals

from .definitions import Definitions
from .events import with_sent_event
from .exceptions import CeleryUniqueError, ConfigurationError
from .publish import hook
from .result_meta import carry_in
from .results import result_class
from .runtime import Runtime, make_runtime
from .settings import check_setting_names
from .task import adopt
from .worker.body import connect_body_end

#: Named, not imported: a client that never revokes needs no remote control.
CONTROL = "celery_unique.revoking:UniqueControl"
CELERYS_CONTROL = "celery.app.control:Control"

logger = logging.getLogger("celery_unique")

FIXUP = "celery_unique.installation:UniqueFixup"


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


class UniqueFixup:
    """Puts the hooks into one app, in every process in which the app comes to be."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.runtime = make_runtime(app)
        self._keep_alive: list[Any] = []
        runtime = self.runtime
        send_task = with_sent_event(app, app.send_task, lambda: runtime.tells_what_is_sent)
        app.send_task = hook(runtime, send_task)
        app.AsyncResult = result_class(app)
        carry_in(app)
        if app.control_cls == CELERYS_CONTROL:  # a user's own class is left alone
            app.control_cls = CONTROL
            app.__dict__.pop("control", None)
        Definitions(self.runtime, app).watch()
        # A name for each: up to 5.6, Celery takes the methods of two apps for one receiver.
        signals.celeryd_init.connect(self.on_celeryd_init, dispatch_uid=object())
        signals.worker_init.connect(self.on_worker_init, dispatch_uid=object())
        signals.beat_init.connect(self.on_beat_init, dispatch_uid=object())
        signals.worker_process_shutdown.connect(
            self.on_worker_process_shutdown, dispatch_uid=object()
        )
        self._keep_alive.append(connect_body_end(self.runtime))

    def on_celeryd_init(self, instance: Any = None, **_: Any) -> None:
        """Before Celery makes the broker's transport: without the redis package it fails there,
        in words that do not say what to install."""
        if instance is not None and instance.app is self.app:
            _check_package(self.runtime)

    def on_worker_init(self, sender: Any = None, **_: Any) -> None:
        """Before the pool is made: children must inherit what is done here."""
        if sender is None or sender.app is not self.app:
            return
        from .worker.lifecycle import WorkerLife  # a client needs none of celery.worker

        for task in self.app.tasks.values():
            adopt(self.runtime, task)
        _check_store(self.runtime)
        life = WorkerLife(self.runtime, sender)
        life.connect()
        self._keep_alive.append(life)

    def on_worker_process_shutdown(self, **_: Any) -> None:
        """A process of the pool leaves without its exit handlers: what it has told the
        store one way must be told before."""
        self.runtime.flush()

    def on_beat_init(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self.app:
            _check_store(self.runtime)


def _check_store(runtime: Runtime) -> None:
    """A worker or beat without a usable store stops where somebody sees it, if any of
    its tasks needs one. (A signal's receiver cannot raise an ordinary exception.)"""
    try:
        _ = runtime.store
    except ConfigurationError as error:
        if _has_unique_tasks(runtime):
            raise SystemExit(f"celery_unique: {error}") from None
        logger.info("no lock store is configured, and no task is unique")
    except CeleryUniqueError as error:
        raise SystemExit(f"celery_unique: {error}") from None


def _check_package(runtime: Runtime) -> None:
    """Only of a store that the broker or the result backend is taken for: a receiver that Celery
    calls after this one may set another URL."""
    try:
        if runtime.settings.store_url is None:
            _ = runtime.store
    except ConfigurationError as error:
        if isinstance(error.__cause__, ImportError) and _has_unique_tasks(runtime):
            raise SystemExit(f"celery_unique: {error}") from None


def _has_unique_tasks(runtime: Runtime) -> bool:
    defaults = runtime.settings.app_defaults
    return any(
        runtime.policies.of(name, task, {}, defaults)[0] is not None
        for name, task in runtime.app.tasks.items()
        if not name.startswith("celery.")
    )

"""The fix-up that patches one app and connects the signals of workers and beat.

Celery pickles the names of fix-ups with the app and applies them where the app is rebuilt: a
plain attribute of the app would be lost in the children of a pool that spawns.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from celery import signals

from celery_unique.config.app_state import AppState, make_state
from celery_unique.exceptions import CeleryUniqueError, ConfigurationError
from celery_unique.publish.before_publish import before_publish
from celery_unique.publish.results import result_class
from celery_unique.publish.stored_meta import carry_in
from celery_unique.worker.release_signals import ReleaseSignals

from .definitions import Definitions
from .wrap_task import wrap_task

logger = logging.getLogger("celery_unique")


#: Named, not imported: a client that never revokes needs no remote control.
CONTROL = "celery_unique.publish.revoke:UniqueControl"
CELERYS_CONTROL = "celery.app.control:Control"

FIXUP = "celery_unique.installation:UniqueFixup"


class UniqueFixup:
    """Patches one app, in every process that builds it."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.app_state = make_state(app)
        self._keep_alive: list[Any] = []
        app.send_task = before_publish(self.app_state, app.send_task)
        app.AsyncResult = result_class(app)
        carry_in(app)
        if app.control_cls == CELERYS_CONTROL:  # a user's own class stays
            app.control_cls = CONTROL
            app.__dict__.pop("control", None)
        Definitions(self.app_state, app).patch()
        # A uid for each: up to 5.6, Celery takes the methods of two apps for one receiver.
        signals.celeryd_init.connect(self.on_celeryd_init, dispatch_uid=object())
        signals.worker_init.connect(self.on_worker_init, dispatch_uid=object())
        signals.beat_init.connect(self.on_beat_init, dispatch_uid=object())
        if app.on_after_finalize is not None:  # not made yet in the copy of a spawned process
            app.on_after_finalize.connect(self.on_finalize, weak=False, dispatch_uid=object())
        signals.worker_process_shutdown.connect(
            self.on_worker_process_shutdown, dispatch_uid=object()
        )
        self.release_signals = ReleaseSignals(self.app_state)
        self.release_signals.connect()

    def on_celeryd_init(self, instance: Any = None, **_: Any) -> None:
        """Runs before Celery makes the broker's transport, which fails without the redis package
        and does not name what to install."""
        if instance is not None and instance.app is self.app:
            _check_package(self.app_state)

    def on_worker_init(self, sender: Any = None, **_: Any) -> None:
        """Runs before the pool is made, so that its children inherit the wrapped tasks."""
        if sender is None or sender.app is not self.app:
            return
        from celery_unique.worker.bootstrap import WorkerBootstrap  # loads celery.worker

        for task in self.app.tasks.values():
            wrap_task(self.app_state, task)
        _check_store(self.app_state)
        bootstrap = WorkerBootstrap(self.app_state, sender)
        bootstrap.connect()
        self._keep_alive.append(bootstrap)

    def on_worker_process_shutdown(self, **_: Any) -> None:
        """Send what is queued for the store: a pool process leaves without exit handlers."""
        self.app_state.flush()

    def on_beat_init(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self.app:
            _check_store(self.app_state)
            self._hook_schedulers(type(sender.scheduler))

    def on_finalize(self, **_: Any) -> None:
        """For a scheduler that runs without Celery's beat service."""
        with suppress(ConfigurationError):  # raised by the first call, or by a worker
            self._hook_schedulers(None)

    def _hook_schedulers(self, scheduler: type[Any] | None) -> None:
        if self.app_state.settings.beat:
            from celery.beat import Scheduler

            from celery_unique.publish.beat_ticks import align_intervals, publish_ticks_once

            publish_ticks_once(scheduler or Scheduler)
            if scheduler is not None:
                align_intervals()


def _check_store(app_state: AppState) -> None:
    """Stop a worker or beat whose tasks need a store and have none. (The receiver of a signal
    cannot raise an ordinary exception.)"""
    try:
        _ = app_state.settings  # wrong whatever the tasks are
    except ConfigurationError as error:
        raise SystemExit(f"celery_unique: {error}") from None
    try:
        _ = app_state.store
    except ConfigurationError as error:
        if _has_unique_tasks(app_state):
            raise SystemExit(f"celery_unique: {error}") from None
        logger.info("no lock store is configured, and no task is unique")
    except CeleryUniqueError as error:
        raise SystemExit(f"celery_unique: {error}") from None


def _check_package(app_state: AppState) -> None:
    """Checked only for a store that is the broker or the result backend: a later receiver of this
    signal may set another URL."""
    try:
        if app_state.settings.store_url is None:
            _ = app_state.store
    except ConfigurationError as error:
        if isinstance(error.__cause__, ImportError) and _has_unique_tasks(app_state):
            raise SystemExit(f"celery_unique: {error}") from None


def _has_unique_tasks(app_state: AppState) -> bool:
    defaults = app_state.settings.app_defaults
    return any(
        app_state.policies.of(name, task, {}, defaults)[0] is not None
        or app_state.is_guarded(name, task)
        for name, task in app_state.app.tasks.items()
        if not name.startswith("celery.")
    )

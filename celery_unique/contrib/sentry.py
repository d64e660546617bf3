"""Check-ins and spans for Sentry.

One line beside ``celery_unique.install(app)``::

    celery_unique.contrib.sentry.install(app)

A tick of beat that is a duplicate is not published, so no worker would close the check-in that
Sentry's integration has opened for it, and the monitor would report a missed run: it is closed as
OK. Operations of the lock store are spans of the current transaction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from celery import signals as celery_signals

from celery_unique.config.app_state import state_of
from celery_unique.exceptions import ConfigurationError, DuplicateTask, install_command

from ._store_acts import watch_acts

try:
    import sentry_sdk
    from sentry_sdk.crons import capture_checkin
    from sentry_sdk.crons.consts import MonitorStatus
except ImportError:
    raise ConfigurationError(
        f"celery_unique.contrib.sentry needs sentry-sdk: {install_command('sentry')}",
        setting=None,
    ) from None

ORIGIN = "auto.db.celery_unique"
#: Headers that Sentry's integration for Celery adds to the message of a monitored entry.
SLUG, CHECK_IN, CONFIG = (f"sentry-monitor-{name}" for name in ("slug", "check-in-id", "config"))

_installed: weakref.WeakSet[Any] = weakref.WeakSet()


def install(app: Any) -> None:
    """Close the check-ins of skipped ticks, and show the lock operations of ``app`` as spans.

    Before or after ``sentry_sdk.init``. Idempotent; does not connect.
    """
    app_state = state_of(app)  # raises where the library is not installed
    if app in _installed:
        return
    _installed.add(app)
    app_state.watch_stores(lambda store: watch_acts(store, _add_span))

    def on_beat_init(sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is app:
            scheduler = sender.scheduler
            scheduler.apply_async = _closing(scheduler.apply_async)

    celery_signals.beat_init.connect(on_beat_init, weak=False, dispatch_uid=object())


def _add_span(act: str, began: float, seconds: float, error: BaseException | None) -> None:
    parent = sentry_sdk.get_current_span()
    if parent is None:
        return
    span = parent.start_child(
        op="db.lock", name=f"celery_unique {act}", origin=ORIGIN, start_timestamp=began
    )
    if error is not None:
        span.set_status("internal_error")
    span.finish(end_timestamp=began + seconds)


def _closing(apply_async: Callable[..., Any]) -> Callable[..., Any]:
    """``scheduler.apply_async``, closing the check-in of a tick that is not published."""

    def apply_tick(entry: Any, *args: Any, **options: Any) -> Any:
        try:
            result = apply_async(entry, *args, **options)
        except Exception as error:
            if isinstance(error.__context__, DuplicateTask):  # in beat's own error
                _close(entry)
            raise
        if getattr(result, "deduplicated", False):
            _close(entry)
        return result

    return apply_tick


def _close(entry: Any) -> None:
    headers = (entry.options or {}).get("headers") or {}
    if CHECK_IN in headers:
        capture_checkin(
            monitor_slug=headers[SLUG],
            check_in_id=headers[CHECK_IN],
            monitor_config=headers.get(CONFIG),
            status=MonitorStatus.OK,
        )

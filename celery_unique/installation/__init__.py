"""Hooks the library into a Celery app.

Every change that the library makes to objects of Celery:

==================================  =============================  ==============================
object                              replaced or set by             for
==================================  =============================  ==============================
``app.send_task``                   ``fixup``                      the before-publish hook
``app.AsyncResult``                 ``fixup``                      ``UniqueResult``
``app.control_cls``                 ``fixup``                      ``revoke()`` frees keys
``app._get_backend``                ``publish.stored_meta``        facts in the stored result
``backend._get_result_meta``        ``publish.stored_meta``        facts in the stored result
``backend.encode, backend._set``    ``publish.stored_meta``        result and release in one act
``backend._store_result``           ``publish.stored_meta``        the same, without a read before
``app.task, register_task``         ``definitions``                options, checked where defined
``app._task_from_fun, finalize``    ``definitions``                options, checked when made
``task.apply``                      ``wrap_task``                  eager calls
``task.run`` or its ``__call__``    ``wrap_task``                  the body under its lock
``Context.unique``                  ``wrap_task``                  ``self.request.unique``
``app.amqp.create_task_message``    ``publish.overlapped_acquire`` the header, as late as possible
``Channel._put`` of kombu's Redis   ``publish.atomic``             lock and message in one act
``task.Request``                    ``worker.request``             the gate
``message.ack, message.reject``     ``worker.ack``                 the end of a delivery
``qos.append, ack`` of a channel    ``worker.ack``                 records of unique messages
``qos.reject, restore_by_tag``      ``worker.ack``                 the same
``consumer.on_decode_error``        ``worker.bootstrap``           messages that cannot be read
remote control ``revoke``           ``worker.bootstrap``           revokes of other programs
``apply_async`` of a scheduler      ``publish.beat_ticks``         ``unique_beat``
``is_due`` of Celery's intervals    ``publish.beat_ticks``         ``unique_beat``
==================================  =============================  ==============================

All of them are of one app, or of an object of it, except ``Context.unique``, ``_put`` and those of
``beat_ticks``; those of ``worker`` exist only in a worker, ``is_due`` only in a beat. Everything
else is a receiver of a documented signal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_unique.config.settings import check_setting_names

from .fixup import FIXUP, UniqueFixup

if TYPE_CHECKING:
    from .types import UniqueApp


def install(app: Any, **settings: Any) -> UniqueApp:
    """Make every task of ``app`` accept ``unique=...``, and return the app.

    Call it where the app is made, before the first use of a task. Idempotent, and connects to
    nothing. ``settings`` are the ``unique_*`` settings, with or without their prefix.
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
    return app  # type: ignore[no-any-return]

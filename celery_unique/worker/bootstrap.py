"""Connects a worker to the locks of an installed app: its start, its shutdown, and the messages
that never become a task."""

from __future__ import annotations

from typing import Any

from celery import signals
from celery.utils.functional import maybe_list
from celery.worker.control import Panel

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import HEADER, DeliveryName, LockHeader
from celery_unique.publish.revoke import cancel
from celery_unique.stores.record import State
from celery_unique.worker import remote_control  # noqa: F401  makes unique_held known

from .deliveries import Deliveries
from .delivery import on_received
from .held_requests import held_requests
from .lock_client import WorkerLockClient
from .reaper import Reaper
from .renewal import Renewer
from .request import use_unique_requests


class WorkerBootstrap:
    """For one worker. Kept alive by the app's fixup, since Celery's signals hold their receivers
    weakly."""

    def __init__(self, app_state: AppState, worker: Any) -> None:
        self._app_state = app_state
        self._worker = worker
        self._renewer: Renewer | None = None
        self._reaper: Reaper | None = None

    def connect(self) -> None:
        for name, task in self._app_state.app.tasks.items():
            if not name.startswith("celery."):
                use_unique_requests(self._app_state, task)
        for signal, receiver in (
            (signals.worker_ready, self._on_ready),
            (signals.worker_shutting_down, self._on_shutting_down),
            (signals.worker_shutdown, self._on_shutdown),
            (signals.task_unknown, self._on_rejected),
            (signals.task_rejected, self._on_rejected),
        ):
            # Named: up to 5.6, Celery takes the methods of two workers for one receiver.
            signal.connect(receiver, dispatch_uid=object())
        signals.task_received.connect(on_received, dispatch_uid=on_received.__qualname__)
        self._wrap_revoke()

    def _wrap_revoke(self) -> None:
        """A revoke may be sent by a process without this library: release the keys of the
        messages that this worker holds and has not started."""
        original = Panel.data["revoke"]

        def revoke(state: Any, task_id: Any, *args: Any, **kwargs: Any) -> Any:
            reply = original(state, task_id, *args, **kwargs)
            if state.app is self._app_state.app:
                self._release_held(set(maybe_list(task_id) or ()))
            return reply

        Panel.data["revoke"] = revoke

    def _release_held(self, task_ids: set[str]) -> None:
        for request in held_requests(self._worker):
            delivery = request.unique_delivery
            if request.id in task_ids and not delivery.started:
                key = delivery.header.key
                try:
                    cancel(self._app_state, key, request.id)
                except StoreUnavailable as error:
                    reporting.store_error(
                        self._app_state.app, "cancel", error, request.name, request.id, key
                    )

    def _on_ready(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self._app_state.app and self._renewer is None:
            self._renewer = Renewer(self._app_state, self._worker)
            self._renewer.start()
            self._app_state.register_waiting = self._renewer.received
            self._reaper = Reaper(self._app_state)
            self._reaper.start()
            self._wrap_decode_errors(sender)

    def _wrap_decode_errors(self, consumer: Any) -> None:
        """A body that cannot be read: Celery drops the message and sends no signal."""
        original = consumer.on_decode_error

        def on_decode_error(message: Any, exc: Exception) -> None:
            original(message, exc)
            self._on_unusable(consumer, message)

        consumer.on_decode_error = on_decode_error
        consumer.task_consumer.on_decode_error = on_decode_error

    def _on_shutting_down(self, **_: Any) -> None:
        if self._renewer is not None:
            self._renewer.hurry()

    def _on_shutdown(self, sender: Any = None, **_: Any) -> None:
        if self._renewer is not None:
            self._app_state.register_waiting = None
            self._renewer.stop()
            self._renewer.return_unstarted()
            self._renewer = None
        if self._reaper is not None:
            self._reaper.stop()
            self._reaper = None
        # The pool is gone. What it has not taken goes back to the queue, and must not wait
        # there for the lease of a delivery that never ran.
        on_the_way = self._app_state.part(Deliveries).on_the_way
        while on_the_way:
            on_the_way.popitem()[1].keep()
        for request in held_requests(self._worker):
            request.settle_unread()
        self._app_state.part(WorkerLockClient).events.flush()

    def _on_rejected(self, sender: Any = None, message: Any = None, **_: Any) -> None:
        """Unregistered, or invalid: a worker that knows the task may get it from a dead letter
        exchange."""
        self._on_unusable(sender, message, rejected=True)

    def _on_unusable(self, sender: Any, message: Any, *, rejected: bool = False) -> None:
        """The message cannot become a task here, and was dropped."""
        headers = getattr(message, "headers", None) or {}
        header, wrong = LockHeader.read(headers.get(HEADER))
        task_name, client = str(headers.get("task")), self._app_state.part(WorkerLockClient)
        if wrong:
            reporting.unreadable_header(
                self._app_state.app, task_name, str(headers.get("id")), wrong, runs=False
            )
        if header is None or header.task_id != headers.get("id"):
            return
        header.receive_as(str(DeliveryName.new(getattr(sender, "hostname", None))))
        state = State.DISCARDED
        finished = client.finish(header, task_name, state, backstop=True, rejected=rejected)
        if finished is not None and finished.settle:
            client.settle(header, task_name, state, rejected=rejected)

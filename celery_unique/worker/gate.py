"""The gate: whether a unique message may run now, must wait, or is dropped.

Passed once by each message, in the worker's main loop, when Celery is about to hand the task to
the pool. It costs one act of the store, with a time-out of its own.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

from celery.worker import state as worker_state

from celery_unique import reporting
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.followers.call import FollowerCall
from celery_unique.followers.complete import Outcome, complete, reason_of
from celery_unique.followers.promote import reap_orphans
from celery_unique.header import HEADER, DeliveryName
from celery_unique.stores.base import Started

from .delivery import Delivery, DeliveryState
from .monitor_events import DUPLICATE

logger = logging.getLogger("celery_unique")

#: How long a held back delivery waits before it comes to the gate again: twice as long each
#: time, since a retry waits for milliseconds and a twin for the end of a long task.
WAIT_S = 0.02
LONGEST_WAIT_S = 1.0


def let_through(request: Any, delivery: Delivery) -> bool:
    """Start the task in the store. Returns whether it runs; else it waits, or is dropped."""
    delivery.alive_at = time.monotonic()
    started = _start(request, delivery)
    if started.verdict == "run":
        if request.unique_delivery is not None:
            delivery.start(started.token)
            # One that continues a task with other arguments (``self.replace``) has its own values.
            if started.payload and (delivery.header.merge or not delivery.header.sent_by):
                delivery.header.payload = started.payload
            request.request_dict[HEADER] = delivery.header.as_message()  # for the body
        return True
    if started.verdict == "wait":
        if not started.wait_ms:
            _look_ahead(request, delivery, started.by)
        _hold_back(request, delivery, started.wait_ms / 1000)
    elif started.verdict == "done":
        _drop_done(request, delivery)
    else:
        _drop_superseded(request, delivery, started)
    return False


def _start(request: Any, delivery: Delivery) -> Started:
    header, client = delivery.header, delivery.client
    try:
        # A retry often arrives while the body that sent it is still ending. No second
        # message of its own: it waits without the mark that a twin would leave.
        sent_from_body = header.sent_by and not delivery.may_exist_twice()
        if sent_from_body and client.is_run_by_its_sender(header):
            return Started("wait", by=header.sent_by)
        return client.start(header, request.name, bool(request.task.acks_late))
    except StoreUnavailable as error:
        app = delivery.app_state.app
        reporting.store_error(app, "start", error, request.name, request.id, header.key)
        if isinstance(error, UnreadableRecord):
            # Nothing of this key can be renewed or released: it runs as a task without a lock,
            # whose header has no delivery, and its retry comes to the gate again.
            request.unique_delivery = None
            request.request_dict[HEADER] = replace(header, delivery="").as_message()
        elif header.merge:
            # The store has values of other calls: they would be dropped when it has run without.
            return Started("wait")
        else:
            # The task was admitted when it was published: it is not lost over this.
            delivery.blind = True
        return Started("run")


def _look_ahead(request: Any, delivery: Delivery, sender: str) -> None:
    """Report what the message waits for; if that is a delivery whose worker has died on this
    machine, end its lease. (After a restart this is the worker's own predecessor.)"""
    client, header = delivery.client, delivery.header
    try:
        if delivery.state is not DeliveryState.WAITING:
            delivery.state = DeliveryState.WAITING
            if sender:  # it is ending: soon this message runs
                delivery.behind, until = DeliveryName.parse(sender), "it has sent this retry"
            else:
                delivery.behind, until = client.blocker(header)
            reporting.held_back(request.name, request.id, until=until)
        if delivery.behind is not None and delivery.behind.has_died():
            client.end_delivery(header, request.name, delivery.behind)
            delivery.waited = 0
            delivery.behind = None
    except StoreUnavailable as error:
        app = delivery.app_state.app
        reporting.store_error(app, "read", error, request.name, request.id, header.key)


def _hold_back(request: Any, delivery: Delivery, wait_s: float = 0.0) -> None:
    """As Celery holds an ETA: no pool slot, no retry counted. ``wait_s``: how long in any case."""
    consumer = delivery.consumer
    consumer.qos.increment_eventually()
    pause_s = wait_s or min(WAIT_S * 2**delivery.waited, LONGEST_WAIT_S)
    entry = consumer.timer.call_after(pause_s, consumer.apply_eta_task, (request,), priority=6)
    request._eta_timer_entry = entry
    worker_state.reserved_requests.discard(request)
    if hasattr(worker_state, "task_scheduled"):  # since Celery 5.7
        worker_state.task_scheduled(request)
    delivery.state = DeliveryState.WAITING
    delivery.waited = 0 if wait_s else min(delivery.waited + 1, 16)  # a power of two


def _drop_done(request: Any, delivery: Delivery) -> None:
    """This id has ended under another delivery: touch neither its result nor its state."""
    reporting.dropped(request.name, request.id, reason="it has already finished")
    delivery.state = DeliveryState.DROPPED
    worker_state.task_ready(request)
    request.acknowledge()


def _drop_superseded(request: Any, delivery: Delivery, started: Started) -> None:
    reason = reason_of(started.mark, started.by)
    if started.mark == "superseded" and is_in_canvas(request):
        _follow_replacement(request, delivery, started.by, reason)
        return
    reporting.dropped(request.name, request.id, reason=reason)
    delivery.state = DeliveryState.DROPPED
    delivery.dropped_as = reason
    delivery.superseded_by = started.by or None
    request._announce_revoked(reason, False, None, False)
    delivery.once_acknowledged(delivery.forget_mark)


def is_in_canvas(request: Any) -> bool:
    """Whether something continues, or fails, with this very id."""
    try:
        context = request._context
    except Exception:
        logger.exception("cannot read the message of superseded task %s", request.id)
        return False
    waits = (context.chord, context.group, context.chain, context.callbacks, context.errbacks)
    return any(waits)


def _follow_replacement(request: Any, delivery: Delivery, by: str, reason: str) -> None:
    """Its canvas would hang, or lose its tail: it gets the outcome of its replacement.

    The message is acknowledged when the store, or the result backend, has all of it.
    """
    app_state, header = delivery.app_state, delivery.header
    app = app_state.app
    try:
        call = FollowerCall.of_request(app, request, header, app_state.leases)
        if app_state.settings.conceal_holder:
            # The result of another caller's task is concealed from it.
            complete(app, call, Outcome.revoked(reason))
        else:
            message = call.dumps(app_state.settings.follower_codec)
            if not delivery.client.follow(header, request.name, message, by):
                _hold_back(request, delivery)
                return
    except StoreUnavailable as error:
        reporting.store_error(app, "follow", error, request.name, request.id, header.key)
        _hold_back(request, delivery)
        return
    except Exception:
        logger.exception("superseded task %s does not follow yet; it is retried", request.id)
        _hold_back(request, delivery)
        return
    reporting.joined_replacement(request.name, request.id, by=by)
    delivery.state = DeliveryState.DROPPED
    request.send_event(DUPLICATE, result=reason)
    worker_state.task_ready(request)
    request.acknowledge()
    delivery.once_acknowledged(delivery.forget_mark)
    # Where its replacement has ended already, no other process would soon reap.
    app_state.in_background(partial(reap_orphans, app_state, header.key))

"""Gives the followers of an ended task its outcome, and runs one of those whose task has died;
and publishes parked calls that have their turn."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from celery import states

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import delay_ms
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import BOOT, LockHeader
from celery_unique.stores.base import Called, Held, Orphan
from celery_unique.stores.record import State

from .call import FollowerCall
from .complete import Outcome, complete, may_work_later, stored_outcome

logger = logging.getLogger("celery_unique")


def end_with_followers(
    app_state: AppState,
    lock: LockHeader,
    task_name: str,
    outcome: Outcome | None,
    settle: Callable[[], None],
) -> None:
    """Share the outcome, then settle the record; or, where there is none to share (it
    expired, it was ignored), settle and let the first of the followers run."""
    if outcome is not None and complete_all(app_state, lock, task_name, outcome):
        settle()
        return
    settle()
    try:
        app_state.store.flush()  # settled fire-and-forget: the reaper must not be faster
        reap_orphans(app_state, lock.key)
    except StoreUnavailable as error:
        reporting.store_error(app_state.app, "reap", error, task_name, lock.task_id, lock.key)


def complete_all(app_state: AppState, lock: LockHeader, task_name: str, outcome: Outcome) -> bool:
    """Complete all followers of the task, and those that join meanwhile. Whether all are.

    Called after the task's own result is stored and before its record is settled: until
    then only this delivery completes them, while its lease holds.
    """
    store, seen, all_done = app_state.store, set[str](), True
    run_ms = app_state.leases.run_ms
    alive_until = _half_a_lease_from_now(app_state)
    try:
        while waiting := [
            follower
            for follower in store.followers(lock.key, lock.task_id)
            if follower[0] not in seen
        ]:
            for follower_id, follower in waiting:
                if time.monotonic() > alive_until:
                    store.renew([Held(lock.key, lock.task_id, lock.delivery, run_ms, run_ms)])
                    alive_until = _half_a_lease_from_now(app_state)
                seen.add(follower_id)
                all_done &= _complete(app_state, lock.key, follower_id, follower.message, outcome)
    except StoreUnavailable as error:
        reporting.store_error(app_state.app, "followers", error, task_name, lock.task_id, lock.key)
        return False
    return all_done


def _half_a_lease_from_now(app_state: AppState) -> float:
    return time.monotonic() + app_state.leases.run_ms / 2000


def _complete(
    app_state: AppState, key: str, follower_id: str, message: str, outcome: Outcome
) -> bool:
    """Whether it has its outcome now. If not, it stays where it is, for the next round."""
    try:
        complete(app_state.app, call_of(app_state, message), outcome)
    except Exception:
        logger.exception("task %s does not have its outcome yet; it is retried", follower_id)
        return False
    # Only now: a crash before this completes it once more, instead of never.
    app_state.store.complete_follower(key, follower_id)
    return True


def call_of(app_state: AppState, message: str) -> FollowerCall:
    """The call of a follower, from what the store has of it."""
    return FollowerCall.loads(app_state.app, message, app_state.settings.follower_codec)


def readable_call(app_state: AppState, follower_id: str, message: str) -> FollowerCall | None:
    """The same, or None where this process cannot read it: that must not delay the others."""
    try:
        return call_of(app_state, message)
    except Exception:
        logger.exception("cannot read the message of task %s", follower_id)
        return None


def publish_called(app_state: AppState, key: str, called: Sequence[Called]) -> None:
    """Publish parked calls that have their turn, from the worker that has made room for them.

    If this fails, or its process dies, the message is still in the store: once the grace has
    passed, a reaper publishes it again.
    """

    def publish() -> None:
        made_room = False
        for one in called:
            made_room |= _publish_one(app_state, key, one)
        if made_room:
            reap_orphans(app_state, key)

    if app_state.app.current_worker_task is None:
        app_state.in_background(publish)
    else:
        # In the process of a pool. In a thread of its own, or Celery would take the task that has
        # just ended for the parent of these.
        thread = threading.Thread(target=publish, name="celery_unique.called")
        thread.start()
        thread.join()


def _publish_one(app_state: AppState, key: str, called: Called) -> bool:
    """Whether it has ended instead, and has made room for the next one."""
    app, store, task_id = app_state.app, app_state.store, called.task_id
    call = None
    try:
        call = call_of(app_state, called.message)
        # It may have run while the store was unavailable.
        if called.again and stored_outcome(app, call.name, task_id) is not None:
            _leave_lane(app_state, key, task_id)
            return True
        if call.has_expired(app):
            # RabbitMQ would drop the message, and the call would never end.
            complete(app, call, Outcome.revoked("expired"))
            logger.info("parked %s[%s] has expired", call.name, task_id)
            _leave_lane(app_state, key, task_id)
            return True
        if called.again:
            reporting.called_again(call.name, task_id)
        call.publish(app)
        store.confirm(key, task_id, call.lease_ms)
    except StoreUnavailable as error:  # started, it is confirmed
        assert call is not None
        reporting.store_error(app, "confirm", error, call.name, task_id, key)
    except Exception as error:
        call = call or FollowerCall.unreadable(task_id, key, called.message)
        # Another worker may know its queue, or read its message: it gets a second turn.
        if not called.again or may_work_later(app, call.name, error):
            logger.exception("task %s has its turn and cannot be published; it is retried", task_id)
            return False
        return _fail(app_state, key, call, error)
    reporting.called(call.name, task_id, app=app, key=key, parked=True)
    return False


def _fail(app_state: AppState, key: str, call: FollowerCall, error: Exception) -> bool:
    """End a parked call that can never be published, or its lane would wait for ever. Whether it
    has made room for the next one."""
    app, task_id = app_state.app, call.task_id
    try:
        complete(app, call, Outcome(states.FAILURE, error))
        _leave_lane(app_state, key, task_id)
    except Exception:
        logger.exception("task %s does not have its outcome yet; it is retried", task_id)
        return False
    ended, why = str(State.DISCARDED), repr(error)
    reporting.unpublishable(call.name, task_id, error=why, reason=ended, key=key, app=app)
    return True


def _leave_lane(app_state: AppState, key: str, task_id: str) -> None:
    app_state.store.cancel(key, task_id, app_state.leases.queue_ms)
    app_state.store.complete_follower(key, task_id)


def reap_orphans(app_state: AppState, key: str) -> bool:
    """Complete or run the followers of the key whose task is gone, and publish parked calls that
    have their turn. Whether there were any.

    The reaper's claim on the key excludes others, while it lasts.
    """
    reaper = f"{socket.gethostname()}/{os.getpid()}/{BOOT}"
    found = False
    while orphans := app_state.store.reap(key, reaper, app_state.leases.run_ms):
        found = True
        if not _Round(app_state, key, reaper).go_through(orphans):
            break
    return found


class _Round:
    """What one reaper does with the orphans of one key."""

    def __init__(self, app_state: AppState, key: str, reaper: str) -> None:
        self._app_state = app_state
        self._key = key
        self._reaper = reaper
        self._outcomes: dict[str, Outcome | None] = {}
        #: Tasks whose followers follow another now.
        self._left: set[str] = set()
        self._claimed_until = _half_a_lease_from_now(app_state)

    def go_through(self, orphans: list[Orphan]) -> bool:
        """Whether there may be more that can be reaped now."""
        progress = False
        for orphan in orphans:
            if time.monotonic() > self._claimed_until:
                break  # claim the rest again, before another reaper does
            if orphan.called is not None:
                _publish_one(self._app_state, self._key, orphan.called)
                progress = True
                continue
            call = readable_call(self._app_state, orphan.follower_id, orphan.message)
            if call is None or orphan.holder in self._left:
                continue
            outcome = self._outcome_for(orphan, call)
            if outcome is None:
                self._promote(orphan, call)
            elif not _complete(
                self._app_state, self._key, orphan.follower_id, orphan.message, outcome
            ):
                return False
            progress = True
        return progress

    def _outcome_for(self, orphan: Orphan, call: FollowerCall) -> Outcome | None:
        """The outcome of its task, if it is known. A promoted one is its own task: it may
        have run without the store."""
        if orphan.holder not in self._outcomes:
            outcome = stored_outcome(self._app_state.app, call.name, orphan.holder)
            if outcome is None and orphan.fate == "revoked":
                outcome = Outcome.revoked()
            self._outcomes[orphan.holder] = outcome
        return self._outcomes[orphan.holder]

    def _promote(self, orphan: Orphan, call: FollowerCall) -> None:
        """It becomes a task itself, and the others that followed its task follow it."""
        app, store, leases = self._app_state.app, self._app_state.store, self._app_state.leases
        grace_ms = max(call.grace_ms, leases.grace_ms)
        verdict = store.promote(
            self._key, orphan.follower_id, self._reaper, grace_ms, leases.queue_ms
        )
        if verdict != "gone":
            self._left.add(orphan.holder)
        if verdict == "publish":
            reporting.promoted(call.name, orphan.follower_id, by=orphan.holder)
            # If this fails, or its process dies, the message is still in the store: once
            # the grace has passed, the next reaper publishes it again.
            call.publish(app)
            lease_ms = call.lease_ms + delay_ms(app, call.options)
            store.confirm(self._key, orphan.follower_id, lease_ms)

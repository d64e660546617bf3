"""Who follows a task gets its outcome; whose task has died is run in its place."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import LockHeader
from celery_unique.stores.base import Held, Orphan

from .call import FollowerCall
from .complete import Outcome, complete, stored_outcome

logger = logging.getLogger("celery_unique")


#: Differs between two lives of a process with the same number.
_BOOT = f"{time.time_ns():x}"


def call_of(app_state: AppState, message: str) -> FollowerCall:
    """The call of a follower, from what the store has of it."""
    return FollowerCall.loads(app_state.app, message, app_state.settings.follower_codec)


def complete_all(app_state: AppState, lock: LockHeader, task_name: str, outcome: Outcome) -> bool:
    """Complete everybody who follows the task, and whoever joins meanwhile. Whether all are.

    Called after the task's own result is stored and before its record is settled: until
    then it is this delivery's to complete them, and nobody else's while its lease holds.
    """
    store, seen, all_done = app_state.store, set[str](), True
    alive_until = _half_a_lease_from_now(app_state)
    try:
        while waiting := [
            follower
            for follower in store.followers(lock.key, lock.task_id)
            if follower[0] not in seen
        ]:
            for follower_id, follower in waiting:
                if time.monotonic() > alive_until:
                    store.renew([_still_here(app_state, lock)])
                    alive_until = _half_a_lease_from_now(app_state)
                seen.add(follower_id)
                all_done &= _complete(app_state, lock.key, follower_id, follower.message, outcome)
    except StoreUnavailable as error:
        reporting.store_error(app_state.app, "followers", error, task_name, lock.task_id, lock.key)
        return False
    return all_done


def _half_a_lease_from_now(app_state: AppState) -> float:
    return time.monotonic() + app_state.leases.run_ms / 2000


def _still_here(app_state: AppState, lock: LockHeader) -> Held:
    run_ms = app_state.leases.run_ms
    return Held(lock.key, lock.task_id, lock.delivery, run_ms, run_ms)


def _complete(
    app_state: AppState, key: str, follower_id: str, message: str, outcome: Outcome
) -> bool:
    """Whether it has its outcome now. If not it stays where it is, for whoever looks next."""
    try:
        complete(app_state.app, call_of(app_state, message), outcome)
    except Exception:
        logger.exception("task %s does not have its outcome yet; it is retried", follower_id)
        return False
    # Only now: a crash before this completes it once more, instead of never.
    app_state.store.complete_follower(key, follower_id)
    return True


def reap_orphans(app_state: AppState, key: str) -> bool:
    """Complete or run the followers of the key whose task is gone. Whether there were any.

    Excluded from doing it twice by the reaper's claim on the key, while that lasts.
    """
    me = f"{socket.gethostname()}/{os.getpid()}/{_BOOT}"
    claim_ms = app_state.leases.run_ms
    found = False
    while orphans := app_state.store.reap(key, me, claim_ms):
        found = True
        if not _Round(app_state, key, me).go_through(orphans):
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
        """Whether it is worth asking for more at once."""
        progress = False
        for orphan in orphans:
            if time.monotonic() > self._claimed_until:
                break  # claim the rest anew, before another does
            call = self._call_of(orphan)
            if call is None or orphan.holder in self._left:
                continue
            if not self._take_care_of(orphan, call):
                return False
            progress = True
        return progress

    def _call_of(self, orphan: Orphan) -> FollowerCall | None:
        """One that cannot be read here must not keep the others waiting."""
        try:
            return call_of(self._app_state, orphan.message)
        except Exception:
            logger.exception("cannot read the message of task %s", orphan.follower_id)
            return None

    def _take_care_of(self, orphan: Orphan, call: FollowerCall) -> bool:
        outcome = self._outcome_for(orphan, call)
        if outcome is not None:
            return _complete(
                self._app_state, self._key, orphan.follower_id, orphan.message, outcome
            )
        self._promote(orphan, call)
        return True

    def _outcome_for(self, orphan: Orphan, call: FollowerCall) -> Outcome | None:
        """What its task came to, if anybody knows. A promoted one is its own task: it may
        have run without telling the store."""
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
            # the grace has passed, whoever looks publishes it again.
            call.publish(app)
            lease_ms = call.lease_ms + call.delay_ms(app)
            store.confirm(self._key, orphan.follower_id, lease_ms)


def end_with_followers(
    app_state: AppState, lock: LockHeader, task_name: str, outcome: Outcome | None, settle: Any
) -> None:
    """Share the outcome, then settle the record; or, where there is none to share (it
    expired, it was ignored), settle and let the first of the followers run."""
    if outcome is None or not complete_all(app_state, lock, task_name, outcome):
        settle()
        try:
            app_state.store.flush()  # told one way: the reaper must not be faster
            reap_orphans(app_state, lock.key)
        except StoreUnavailable as error:
            reporting.store_error(app_state.app, "reap", error, task_name, lock.task_id, lock.key)
    else:
        settle()

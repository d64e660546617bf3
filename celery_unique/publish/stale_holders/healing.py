"""Releases the key of a stale holder, when a duplicate finds it; or has one published again that
values of other calls were merged into.

Ordinary duplicates do not come here: only those of a holder that has waited for longer than
``unique_check_after``, and of one key at most once in that time. The holder is checked in a thread,
for which the call waits for a bounded time: a result backend may take minutes to fail.
"""

from __future__ import annotations

import logging
import sys
import threading
from functools import cached_property
from time import monotonic, sleep
from typing import NamedTuple

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.followers.promote import publish_called
from celery_unique.stores.base import Finish, Held, Holder, holder_of
from celery_unique.stores.bounded import BoundedDict

from .ended import END_OF
from .lock_view import LockView
from .lost_messages import Missing, ended_here, missing_messages
from .queues import Limits
from .workers import NoAnswer

logger = logging.getLogger("celery_unique")

#: How many keys are remembered as checked.
REMEMBERED = 10_000
#: How many holders are checked at a time.
AT_ONCE = 4
#: How long a worker may take to reply. One that does not reply proves nothing.
REPLY_S = 0.5
#: A broker is inspected no sooner than this after it has proven nothing: a backlog has many keys.
PAUSE_S = 10.0
#: What a call may read of a broker: with more, the message may well wait there.
OF_A_CALL = Limits(messages=1000, keys=10_000, walk_s=0.3, same_routes=False)


class StaleHolders:
    """Checks the holders that the calls of one app find."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        settings = app_state.settings
        self._every_s = settings.check_after.total_seconds()
        self._wait_s = settings.store_timeout.total_seconds()
        self._checked_at: BoundedDict[str, float] = BoundedDict(REMEMBERED)
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self._broker = threading.Lock()
        self._broker_from = self._from = 0.0

    @cached_property
    def _is_inspectable(self) -> bool:
        transport = self._app_state.app.connection_for_read().get_transport_cls()
        return transport.driver_type in ("redis", "amqp")

    def heal(self, key: str, task_id: str) -> Healed | None:
        """What has become of the holder, if it was stale."""
        now = monotonic()
        checked_at = self._checked_at.get(key)
        if now < self._from or (checked_at is not None and now < checked_at + self._every_s):
            return None
        if not self._free.acquire(blocking=False):
            return None
        self._checked_at.remember(key, now)
        healed: list[Healed] = []
        done = threading.Event()

        def check() -> None:
            try:
                found = self._check(key, task_id)
                if found is not None:
                    self._checked_at.pop(key, None)
                    healed.append(found)
            except StoreUnavailable as error:
                logger.debug("holder %s was not checked: %s", task_id, error)
            finally:
                self._free.release()
                done.set()
                _close_connections()

        threading.Thread(target=check, name="celery_unique.holder", daemon=True).start()
        if not done.wait(self._wait_s):
            logger.warning(
                "holder %s was not checked within %g s: the result backend or the broker does not "
                "reply. The next check is in %g s",
                task_id,
                self._wait_s,
                self._every_s,
            )
            self._from = monotonic() + self._every_s
        return healed[0] if healed else None

    def _check(self, key: str, task_id: str) -> Healed | None:
        app_state = self._app_state
        record, now = app_state.store.read(key)
        entry = record.tasks.get(task_id)
        if entry is None or entry.released:
            return Healed()
        # The first in line may be the one that is stale: the others wait for it.
        while (before := record.tasks.get(entry.after)) is not None and before.waiting:
            task_id, entry = entry.after, before
        # A worker with this library has renewed its lease, or has it in hand.
        if not entry.waiting or entry.by or entry.held_until > now:
            return None
        lock = LockView(key, task_id, entry, now)
        ended = ended_here(app_state, lock)
        missing: Missing | None = None
        if ended:
            missing = Missing(lock, ended=ended)
        elif not entry.is_abandoned(now):  # such a one is published again
            missing = self._in_broker(lock)
        return resolve(app_state, missing) if missing is not None else None

    def _in_broker(self, lock: LockView) -> Missing | None:
        if not self._is_inspectable or not self._broker.acquire(blocking=False):
            return None
        try:
            if monotonic() < self._broker_from:
                return None
            try:
                found = list(missing_messages(self._app_state, [lock], REPLY_S, limits=OF_A_CALL))
            except NoAnswer as error:
                found = []
                logger.debug("holder %s was not found or missed: %s", lock.task_id, error)
            proven = [each for each in found if not each.unless]
            if not proven:
                self._broker_from = monotonic() + PAUSE_S
            return proven[0] if proven else None
        finally:
            self._broker.release()


class Healed(NamedTuple):
    """The key no longer has the holder: acquire again. Or ``lost``: publish this one again."""

    lost: Holder | None = None
    #: It had ended without a trace in the store: what was merged into it since never ran.
    ended: bool = False


def resolve(app_state: AppState, missing: Missing) -> Healed | None:
    """Release the key of a holder that is proven stale, unless that has changed; or have it
    published again, if calls have returned whose values are stored with it alone."""
    lock, store, leases = missing.lock, app_state.store, app_state.leases
    lost, what = None, "is released"
    if lock.entry.merges and not lock.entry.in_canvas:
        # As if the worker that had its message had died, which is when a copy may be published.
        store.renew([Held(lock.key, lock.task_id, "", 0, held_ms=1)])
        sleep(0.01)  # by the store's clock, too
        lost, what = holder_of(lock.task_id, lock.entry, lock.now), "is published again"
    elif missing.ended:
        # As the worker would have done it: a policy may keep the ended task, and its followers
        # get its result.
        finish = Finish(
            task_id=lock.task_id,
            delivery="",
            state=END_OF[missing.ended],
            retention_ms=leases.retention_ms,
            mark_ms=leases.queue_ms,
            merge=lock.entry.merges,
        )
        finished = store.finish(lock.key, finish)
        if finished.verdict != "ended":
            return None
        if finished.called:
            publish_called(app_state, lock.key, finished.called)
        if finished.settle and not finished.followers:
            store.settle(lock.key, finish, mark_done=True)
    elif not store.release(lock.key, lock.task_id, lock.entry.lease):
        return None
    reporting.lost(
        lock.entry.task_name,
        lock.task_id,
        app=app_state.app,
        key=lock.key,
        reason=f"it was stale and {what}: {missing.why}",
    )
    return Healed(lost, ended=lost is None and bool(missing.ended))


def _close_connections() -> None:
    """Django keeps the connections of a thread until that closes them."""
    database = sys.modules.get("django.db")
    if database is not None:
        database.connections.close_all()

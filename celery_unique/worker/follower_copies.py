"""Copies of the calls that follow the tasks of this worker.

Followers are kept in the lock store alone, and a store can lose its data: by a flush, a restart
without persistence, an eviction, a fail-over. So each renewal that returns another number of
followers than are known here reads them. When the task has ended, those that the store no longer
has, and that have no result, become its followers again, and are completed from its result.

Called from the renewing thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass, field

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable
from celery_unique.followers.complete import has_ended
from celery_unique.followers.promote import readable_call, reap_orphans
from celery_unique.header import LockHeader

from .lock_client import WorkerLockClient

logger = logging.getLogger("celery_unique")


#: How many followers one worker remembers, and how many characters their messages may have.
MOST_FOLLOWERS = 10_000
MOST_CHARACTERS = 16 * 1024 * 1024


@dataclass(slots=True)
class _Known:
    lock: LockHeader
    count: int = 0  # as the store returned last
    messages: dict[str, str] = field(default_factory=dict)
    #: The store has reported that the lock is gone while the task was not known to have ended.
    lost: bool = False


class KnownFollowers:
    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._known: dict[str, _Known] = {}  # by delivery
        self._is_full = False

    def renewed(self, lock: LockHeader, followers: int) -> None:
        """The lease of this task is renewed, and so many calls follow it."""
        known = self._known.get(lock.delivery)
        if followers == (known.count if known else 0):
            return
        if known is None:
            known = self._known[lock.delivery] = _Known(lock)
        if followers > known.count and self._has_room(followers):
            # One that is gone stays known: it has its result, or else is checked at the end.
            store = self._app_state.store
            for follower_id, follower in store.followers(lock.key, lock.task_id):
                known.messages[follower_id] = follower.message
        known.count = followers

    def lost(self, lock: LockHeader) -> None:
        """The store does not know the task any more: it has ended, or was lost."""
        if known := self._known.get(lock.delivery):
            known.lost = True

    def check(self, held: Container[str]) -> None:
        """Restore the lost followers of each task that this worker has no more."""
        problem: StoreUnavailable | None = None
        for delivery in [each for each in self._known if each not in held]:
            try:
                self._restore(self._known[delivery])
            except StoreUnavailable as error:
                problem = error  # retried in the next round
            else:
                del self._known[delivery]
        if problem is not None:
            raise problem

    def _has_room(self, more: int) -> bool:
        messages = [each.messages for each in self._known.values()]
        count = sum(map(len, messages)) + more
        characters = sum(len(text) for each in messages for text in each.values())
        fits = count <= MOST_FOLLOWERS and characters < MOST_CHARACTERS
        if not fits and not self._is_full:
            self._is_full = True
            logger.warning(
                "this worker keeps no copies of more than %d calls that follow its tasks "
                "(logged once): if the lock store loses its data, the others are lost",
                MOST_FOLLOWERS,
            )
        return fits

    def _restore(self, known: _Known) -> None:
        if not known.messages:
            return
        app_state, lock = self._app_state, known.lock
        # In this order: one that is completed meanwhile has its result when that is read.
        stored = {follower_id for follower_id, _ in app_state.store.followers(lock.key)}
        missing = [i for i in known.messages if i not in stored and self._is_lost(known, i)]
        for follower_id in missing:
            call = readable_call(self._app_state, follower_id, known.messages[follower_id])
            if call is None:
                continue
            message = known.messages[follower_id]
            if app_state.part(WorkerLockClient).follow_again(
                call.header, call.name, message, lock.task_id
            ):
                reporting.lost(
                    call.name,
                    follower_id,
                    app=app_state.app,
                    key=lock.key,
                    reason=f"the lock store lost this follower of task {lock.task_id}",
                )
        if missing:
            reap_orphans(app_state, lock.key)

    def _is_lost(self, known: _Known, follower_id: str) -> bool:
        """Whether it has no result. Where that cannot be read, it is taken for completed, unless
        the store was seen without the lock of its task."""
        call = readable_call(self._app_state, follower_id, known.messages[follower_id])
        if call is None:
            return False
        ended = has_ended(self._app_state.app, call)
        return known.lost if ended is None else not ended

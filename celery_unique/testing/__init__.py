"""Fixtures for the tests of your tasks: real locks, in memory, with a clock that you can move.

Keys, policies, leases and windows are those of every other store.

With pytest, enable the fixtures in the root ``conftest.py``::

    pytest_plugins = ["celery_unique.testing"]

With unittest or Django, use :func:`locks_in_memory` as a context manager.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery import current_app

from celery_unique.config.app_state import state_of
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.followers.call import decoded
from celery_unique.header import LockHeader
from celery_unique.keys.merge import lists_in
from celery_unique.locks import Lock, lock_of, lookup
from celery_unique.policy.durations import parse_duration
from celery_unique.policy.task_options import signature_of
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker.lock_client import WorkerLockClient

from .idempotency import assert_idempotent, call_text

__all__ = [
    "UniqueLocks",
    "assert_created",
    "assert_duplicate",
    "assert_idempotent",
    "assert_merged",
    "assert_queued",
    "locks_in_memory",
]

#: The worker of deliveries in tests.
_WORKER = "test"


@contextmanager
def locks_in_memory(app: Any = None) -> Iterator[UniqueLocks]:
    """Replace the store of ``app`` (the current app) by an empty one in memory.

    The app's own store is not used meanwhile, and is restored afterwards.
    """
    app = current_app if app is None else app
    app = getattr(app, "_get_current_object", lambda: app)()
    app_state = state_of(app)
    store = MemoryStore()
    before = app_state.use_store(store)
    try:
        yield UniqueLocks(app, store)
    finally:
        app_state.use_store(before)


class UniqueLocks:
    """The locks of an app during a test."""

    def __init__(self, app: Any, store: MemoryStore) -> None:
        self.app = app
        self._store = store
        self._deliveries: dict[str, LockHeader] = {}

    # -- time ----------------------------------------------------------------

    def advance(self, by: Any) -> None:
        """Let time pass for locks: seconds, a ``timedelta`` or ISO 8601 text such as
        ``"PT10M"``. Windows and leases end; ``datetime.now()`` stays what it is."""
        passed = parse_duration(by, "by")
        self._store.clock_offset_ms += round(passed.total_seconds() * 1000)

    # -- acts of a worker ------------------------------------------------------

    def start(self, result: Any) -> None:
        """Start the task of this result, as a worker does."""
        header = LockHeader(result.id, _key_of(result), delivery=self._delivery(result))
        holding = state_of(self.app).part(WorkerLockClient)
        verdict = holding.start(header, self._name(result), False).verdict
        if verdict != "run":
            raise AssertionError(f"task {result.id} may not start now: {verdict}")
        self._deliveries[result.id] = header

    def end(self, result: Any, state: str = "completed") -> None:
        """Finish the task of this result as ``completed``, ``discarded`` (it failed) or
        ``cancelled`` (revoked). It is started first, unless it runs or is cancelled."""
        if result.id not in self._deliveries and state != "cancelled":
            self.start(result)
        header = self._deliveries.pop(
            result.id, LockHeader(result.id, _key_of(result), delivery=self._delivery(result))
        )
        holding, name = state_of(self.app).part(WorkerLockClient), self._name(result)
        finished = holding.finish(header, name, State(state))
        if finished is None or finished.verdict != "ended":
            raise AssertionError(f"task {result.id} holds no lock to release")
        if finished.settle:
            holding.settle(header, name, State(state))

    def _delivery(self, result: Any) -> str:
        return f"{_WORKER}/0/0/{result.id}"

    def _name(self, result: Any) -> str:
        record, _ = self._store.read(_key_of(result))
        task = record.tasks.get(result.id)
        return task.task_name if task is not None else ""

    # -- assertions ------------------------------------------------------------

    def held(self, task: Any = None) -> list[Lock]:
        """The locks that are held, of one task (or its name) or of all, oldest first."""
        name = getattr(task, "name", task)
        records = [(key, *self._store.read(key)) for key, _ in self._store.walk()]
        found = [lock_of(key, record, now) for key, record, now in records]
        locks = [lock for lock in found if lock is not None and name in (None, lock.task_name)]
        return sorted(locks, key=lambda lock: lock.created_at)

    def parked(
        self, task: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[str]:
        """The ids of the calls that wait for their turn under the key of such a call, the next one
        first (``unique_on_conflict="queue"``)."""
        lock = lookup(task, args, kwargs, app=self.app)
        return self._store.parked(lock.key) if lock is not None else []

    def merged(
        self, task: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, list[Any]]:
        """The lists with which the holder of the key of such a call runs, by the name of their
        parameter (``unique_on_conflict="merge"``); not one that no call has given."""
        lock = lookup(task, args, kwargs, app=self.app)
        if lock is None:
            return {}
        decode = partial(decoded, state_of(self.app).settings.follower_codec)
        known = self.app.tasks.get(lock.task_name)
        signature = signature_of(known) if known is not None else None
        return lists_in(self._store.payload(lock.key, lock.task_id), decode, signature)

    def assert_held(
        self,
        task: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        by: Any = None,
        state: str | None = None,
    ) -> Lock:
        """Assert that a call with these arguments would find its key held: by this result's task
        and in this state, where they are given. Returns the lock."""
        lock = lookup(task, args, kwargs, app=self.app)
        call = call_text(task, args, kwargs)
        if lock is None:
            raise AssertionError(f"the key of {call} is free")
        if by is not None and lock.task_id != by.id:
            raise AssertionError(f"the key of {call} is held by task {lock.task_id}, not {by.id}")
        if state is not None and lock.state != state:
            raise AssertionError(f"the holder of the key of {call} is {lock.state}, not {state}")
        return lock

    def assert_free(
        self, task: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Assert that a call with these arguments would find its key free."""
        lock = lookup(task, args, kwargs, app=self.app)
        if lock is not None:
            raise AssertionError(
                f"the key of {call_text(task, args, kwargs)} is held by task {lock.task_id}, "
                f"which is {lock.state}"
            )


def assert_created(result: Any) -> None:
    """Assert that this call acquired its key and was published, or replaced another one."""
    if result.deduplicated or result.outcome not in ("created", "replaced", "rerun"):
        raise AssertionError(f"the call was {result.outcome}; its task is {result.id}")


def assert_queued(result: Any) -> None:
    """Assert that this call is parked, and runs under its own id when its turn comes."""
    if result.outcome != "queued":
        raise AssertionError(f"the call was {result.outcome}; its task is {result.id}")


def assert_merged(result: Any, into: Any = None) -> None:
    """Assert that another task runs with the values of this call: that of the result ``into``, if
    it is given."""
    if result.outcome != "merged":
        raise AssertionError(f"the call was {result.outcome}; its task is {result.id}")
    if into is not None and result.id != into.id:
        raise AssertionError(f"the call was merged into task {result.id}, not into {into.id}")


def assert_duplicate(result: Any, of: Any = None) -> None:
    """Assert that this call is a duplicate, of the task of that result if it is given."""
    if not result.deduplicated:
        raise AssertionError(f"the call was no duplicate, but {result.outcome}")
    if of is not None and result.id != of.id:
        raise AssertionError(f"the call is a duplicate of task {result.id}, not of {of.id}")


def _key_of(result: Any) -> str:
    key: str | None = result.unique_key
    if key is None:
        raise CeleryUniqueError(f"The call of task {result.id} was not unique: it has no lock.")
    return key


if "pytest" in sys.modules:  # not needed with unittest and Django
    import pytest

    @pytest.fixture
    def unique_app() -> Any:
        """The app of ``unique_locks``. Override it where it is not the current app."""
        return current_app._get_current_object()

    @pytest.fixture
    def unique_locks(unique_app: Any) -> Iterator[UniqueLocks]:
        """Empty locks in memory for one test, with a clock to move."""
        with locks_in_memory(unique_app) as locks:
            yield locks

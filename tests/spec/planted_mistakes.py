"""Mistakes in a store, a caller and a worker that the simulation must find.

Each is planted in the library's own code while it is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_unique.config.app_state import state_of
from celery_unique.followers import promote
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from celery_unique.publish.store_client import CallerStoreClient
from celery_unique.stores.base import Held, Started
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State, TaskEntry
from celery_unique.worker import body, gate, lock_client, reaper, renewal
from celery_unique.worker.delivery import Delivery
from celery_unique.worker.lock_client import WorkerLockClient
from tests.spec.rules_left_out import broken_stores

Patch = pytest.MonkeyPatch


def confirms_before_publish(patch: Patch) -> None:
    send = UniqueTaskCoordinator.send

    def confirm_and_send(self: Any, request: Any, acquired: Any, began: float) -> Any:
        self.client.confirm(request, request.task_id)
        return send(self, request, acquired, began)

    patch.setattr(UniqueTaskCoordinator, "send", confirm_and_send)


def names_a_pending_holder(patch: Patch) -> None:
    """A duplicate returns at once, although its holder is not published."""
    patch.setattr(
        UniqueTaskCoordinator, "_surely_published", lambda self, request, holder, now: holder
    )


def keeps_the_lock(patch: Patch) -> None:
    patch.setattr(CallerStoreClient, "withdraw", lambda self, request: None)


def withdraws_what_it_publishes(patch: Patch) -> None:
    """A call that was published without a reply of the store takes its lock back later."""
    patch.setattr(CallerStoreClient, "confirm_later", CallerStoreClient.withdraw_later)


def settles_before_the_acknowledgement(patch: Patch) -> None:
    patch.setattr(Delivery, "once_acknowledged", lambda self, act: act())
    finish = WorkerLockClient.finish

    def finish_and_settle(self: Any, header: Any, name: str, state: Any, **options: Any) -> Any:
        finished = finish(self, header, name, state, **options)
        if finished is not None and finished.settle:
            self.settle(header, name, state)
        return finished

    patch.setattr(WorkerLockClient, "finish", finish_and_settle)


def runs_what_waits(patch: Patch) -> None:
    start = gate._start

    def start_anyway(request: Any, delivery: Any) -> Started:
        started = start(request, delivery)
        return Started("run", token=1) if started.verdict == "wait" else started

    patch.setattr(gate, "_start", start_anyway)


def runs_what_is_superseded(patch: Patch) -> None:
    start = gate._start

    def start_anyway(request: Any, delivery: Any) -> Started:
        started = start(request, delivery)
        return Started("run", token=1) if started.verdict == "superseded" else started

    patch.setattr(gate, "_start", start_anyway)


def suspects_no_copies(patch: Patch) -> None:
    patch.setattr(Delivery, "may_exist_twice", lambda self: False)


def renews_nothing(patch: Patch) -> None:
    patch.setattr(renewal.Renewer, "renew_once", lambda self: 0)


def finishes_after_the_result(patch: Patch) -> None:
    patch.setattr(body, "finish", lambda delivery, request, end: None)


def reaps_nothing(patch: Patch) -> None:
    patch.setattr(reaper.Reaper, "reap", lambda self: None)


def releases_at_a_retry(patch: Patch) -> None:
    def finish(self: Any, header: Any, name: str, delay_ms: int, *, copies: bool) -> None:
        self.finish(header, name, State.COMPLETED)

    patch.setattr(WorkerLockClient, "retry", finish)


def completes_before_the_result(patch: Patch) -> None:
    """A follower is removed from the store before it has its result."""
    complete = promote.complete

    def remove_and_complete(app: Any, call: Any, outcome: Any) -> None:
        state_of(app).store.complete_follower(call.header.key, call.task_id)
        complete(app, call, outcome)

    patch.setattr(promote, "complete", remove_and_complete)


def forgets_a_revoked_retry(patch: Patch) -> None:
    patch.setattr(WorkerLockClient, "_outlive_the_dead", lambda *_: None)


def gives_up_retries(patch: Patch) -> None:
    """What the store did not answer is not repeated in the background."""
    patch.setattr(lock_client.RetryQueue, "retry", lambda *_, **__: None)


class RenewCreates(MemoryStore):
    """A renewal of what is gone brings it back."""

    def _renew_one(self, held: Held) -> int:
        def act(record: Any, us: int) -> None:
            if held.task_id not in record.tasks:
                lease = us // 1000 + held.lease_ms
                record.tasks[held.task_id] = TaskEntry(
                    task_name="shop.rebuild", stored_state=State.AVAILABLE, lease=lease
                )

        self._act(held.key, act)
        return super()._renew_one(held)


@contextmanager
def planted(name: str) -> Iterator[type[MemoryStore]]:
    """The library with this mistake: the store to simulate it with."""
    stores = {"RenewCreates": RenewCreates, **broken_stores()}
    with pytest.MonkeyPatch.context() as patch:
        if name in stores:
            yield stores[name]
        else:
            globals()[name](patch)
            yield MemoryStore

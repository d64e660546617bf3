"""cancel and release: somebody else ends what a caller began."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import Finished, LockStore, Started
from celery_unique.stores.record import LETTER_OF, Mark, Record, State
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    UNTIL_DONE,
    about,
    advance,
    bring_to,
    claim,
    finish,
    now_of,
    publish,
    record_of,
    run,
    running,
    start,
    task_of,
)

NOT_RUNNING = [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]


class CancelContract:
    # -- cancel -------------------------------------------------------------

    @pytest.mark.parametrize("state", NOT_RUNNING)
    def test_cancel_frees_the_key_of_a_task_that_waits_and_marks_its_id_revoked(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "cancelled"
        assert record_of(store, key) == Record(
            token=record_of(store, key).token,
            marks={"first": Mark("revoked", about(now_of(store) + QUEUE_LEASE))},
        )
        assert store.acquire(key, claim("second")).outcome == "created"

    def test_cancel_leaves_a_task_alone_whose_delivery_lives(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        before = record_of(store, key)

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "active"
        assert record_of(store, key) == before

    def test_cancel_ends_a_task_whose_delivery_died(self, store: LockStore, key: str) -> None:
        run(store, key, "first")
        advance(store, RUN_LEASE)

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "cancelled"
        assert list(record_of(store, key).tasks) == []
        assert store.start(key, start("first", "d2")) == Started("superseded", mark="revoked")

    @pytest.mark.parametrize("delivery_died", [False, True])
    def test_cancel_leaves_an_ending_task_alone(
        self, store: LockStore, key: str, delivery_died: bool
    ) -> None:
        run(store, key, "first")
        store.finish(key, finish("first", settle_later=True))
        advance(store, RUN_LEASE if delivery_died else 0)
        before = record_of(store, key)

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "active"
        assert record_of(store, key) == before

    @pytest.mark.parametrize("state", FINAL)
    def test_cancel_leaves_an_ended_task_alone(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "active"
        assert record_of(store, key) == before

    def test_cancel_of_an_unknown_task_leaves_a_mark_for_its_message(
        self, store: LockStore, key: str
    ) -> None:
        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "cancelled"
        assert record_of(store, key) == Record(
            marks={"first": Mark("revoked", about(now_of(store) + QUEUE_LEASE))}
        )

    def test_cancel_twice_is_as_once(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        store.cancel(key, "first", QUEUE_LEASE)
        before = record_of(store, key)

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "cancelled"
        mark = Mark("revoked", about(before.marks["first"].until))
        assert record_of(store, key) == replace(before, marks={"first": mark})

    def test_cancel_touches_only_its_own_task(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        publish(store, key, "second", states="")
        before = task_of(store, key, "first")

        store.cancel(key, "second", QUEUE_LEASE)

        assert record_of(store, key).tasks == {"first": before}

    # -- release ------------------------------------------------------------

    @pytest.mark.parametrize("state", [s for s in State if LETTER_OF[s] in UNTIL_DONE])
    def test_a_released_task_blocks_nobody_and_stays_recorded(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        count = store.release(key)

        assert count == 1
        released = replace(before.tasks["first"], flags="o")
        assert record_of(store, key) == replace(before, tasks={"first": released})
        assert store.acquire(key, claim("second", states=EVERY_STATE)).outcome == "created"

    @pytest.mark.parametrize("state", FINAL)
    def test_release_forgets_a_task_that_has_ended(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)

        count = store.release(key)

        assert count == 1
        assert not record_of(store, key)

    def test_release_counts_every_task_of_the_key(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        publish(store, key, "second", states="")

        assert store.release(key) == 2

    def test_release_of_one_task_leaves_the_others(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        publish(store, key, "second", states="")

        count = store.release(key, "first")

        flags = {i: task.flags for i, task in record_of(store, key).tasks.items()}
        assert count == 1
        assert flags == {"first": "o", "second": ""}

    def test_release_does_not_count_what_is_released_already(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        store.release(key)

        assert store.release(key) == 0
        assert store.release(key, "first") == 0

    def test_release_of_a_free_key_releases_nothing(self, store: LockStore, key: str) -> None:
        assert store.release(key) == 0
        assert store.release(key, "first") == 0
        assert record_of(store, key) == Record()

    def test_release_does_not_count_a_task_that_lapsed(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        advance(store, QUEUE_LEASE)

        assert store.release(key) == 0

    def test_release_leaves_marks(self, store: LockStore, key: str) -> None:
        store.cancel(key, "first", QUEUE_LEASE)
        before = record_of(store, key)

        store.release(key)

        assert record_of(store, key) == before

    def test_a_released_task_can_still_finish(self, store: LockStore, key: str) -> None:
        run(store, key, "first")
        store.release(key)

        reply = store.finish(key, finish("first"))

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert not record_of(store, key)

    def test_a_renewal_does_not_revive_a_released_task(self, store: LockStore, key: str) -> None:
        run(store, key, "first")
        store.release(key)

        store.renew([running(key, "first")])

        assert store.acquire(key, claim("second")).outcome == "created"

    def test_a_released_task_that_waits_still_runs(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        store.release(key)
        advance(store, MINUTE)

        started = store.start(key, start("first"))

        assert (started.verdict, started.lost) == ("run", False)

    def test_a_revoke_does_not_turn_a_task_that_has_ended_into_a_revoked_one(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        store.finish(key, finish("first", settle_later=True))
        store.settle(key, finish("first"), mark_done=True)
        store.flush()

        reply = store.cancel(key, "first", QUEUE_LEASE)

        assert reply == "active"
        assert store.start(key, start("first", "d2")).verdict == "done"

    def test_a_second_revoke_does_not_shorten_the_mark_of_the_first(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        store.cancel(key, "first", QUEUE_LEASE)

        store.cancel(key, "first", MINUTE)
        advance(store, QUEUE_LEASE - MINUTE)

        assert store.start(key, start("first")).mark == "revoked"

"""cancel and release: a task is ended from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import Finished, Started
from celery_unique.stores.record import LETTER_OF, Mark, Record, State
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    UNTIL_DONE,
    Key,
    about,
    finish,
)

NOT_RUNNING = [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]


class CancelContract:
    # -- cancel -------------------------------------------------------------

    @pytest.mark.parametrize("state", NOT_RUNNING)
    def test_cancel_frees_the_key_of_a_task_that_waits_and_marks_its_id_revoked(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)

        verdict = key.cancel("first")

        assert verdict == "cancelled"
        assert key.record() == Record(
            token=key.record().token,
            marks={"first": Mark("revoked", about(key.now() + QUEUE_LEASE))},
        )
        assert key.acquire("second").outcome == "created"

    def test_cancel_leaves_a_task_alone_whose_delivery_lives(self, key: Key) -> None:
        key.run("first")
        before = key.record()

        verdict = key.cancel("first")

        assert verdict == "active"
        assert key.record() == before

    def test_cancel_ends_a_task_whose_delivery_died(self, key: Key) -> None:
        key.run("first")
        key.advance(RUN_LEASE)

        verdict = key.cancel("first")

        assert verdict == "cancelled"
        assert list(key.record().tasks) == []
        assert key.start("first", "d2") == Started("superseded", mark="revoked")

    @pytest.mark.parametrize("delivery_died", [False, True])
    def test_cancel_leaves_an_ending_task_alone(self, key: Key, delivery_died: bool) -> None:
        key.run("first")
        key.finish("first", settle_later=True)
        key.advance(RUN_LEASE if delivery_died else 0)
        before = key.record()

        verdict = key.cancel("first")

        assert verdict == "active"
        assert key.record() == before

    @pytest.mark.parametrize("state", FINAL)
    def test_cancel_leaves_an_ended_task_alone(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()

        verdict = key.cancel("first")

        assert verdict == "active"
        assert key.record() == before

    def test_cancel_of_an_unknown_task_leaves_a_mark_for_its_message(self, key: Key) -> None:
        verdict = key.cancel("first")

        assert verdict == "cancelled"
        assert key.record() == Record(
            marks={"first": Mark("revoked", about(key.now() + QUEUE_LEASE))}
        )

    def test_cancel_twice_is_as_once(self, key: Key) -> None:
        key.publish("first")
        key.cancel("first")
        before = key.record()

        verdict = key.cancel("first")

        assert verdict == "cancelled"
        mark = Mark("revoked", about(before.marks["first"].until))
        assert key.record() == replace(before, marks={"first": mark})

    def test_cancel_touches_only_its_own_task(self, key: Key) -> None:
        key.publish("first")
        key.publish("second", states="")
        before = key.task("first")

        key.cancel("second")

        assert key.record().tasks == {"first": before}

    # -- release ------------------------------------------------------------

    @pytest.mark.parametrize("state", [s for s in State if LETTER_OF[s] in UNTIL_DONE])
    def test_a_released_task_blocks_nobody_and_stays_recorded(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()

        count = key.release()

        assert count == 1
        released = replace(before.tasks["first"], flags="o")
        assert key.record() == replace(before, tasks={"first": released})
        assert key.acquire("second", states=EVERY_STATE).outcome == "created"

    @pytest.mark.parametrize("state", FINAL)
    def test_release_forgets_a_task_that_has_ended(self, key: Key, state: State) -> None:
        key.bring_to("first", state)

        count = key.release()

        assert count == 1
        assert not key.record()

    def test_release_counts_every_task_of_the_key(self, key: Key) -> None:
        key.publish("first")
        key.publish("second", states="")

        assert key.release() == 2

    def test_release_of_one_task_leaves_the_others(self, key: Key) -> None:
        key.publish("first")
        key.publish("second", states="")

        count = key.release("first")

        flags = {i: task.flags for i, task in key.record().tasks.items()}
        assert count == 1
        assert flags == {"first": "o", "second": ""}

    def test_release_does_not_count_what_is_released_already(self, key: Key) -> None:
        key.publish("first")
        key.release()

        assert key.release() == 0
        assert key.release("first") == 0

    @pytest.mark.parametrize("state", [State.AVAILABLE, State.RETRYABLE])
    def test_release_of_a_lease_that_was_read_releases_what_has_not_changed(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)
        lease = key.record().tasks["first"].lease

        assert key.release("first", lease - 1) == 0
        assert key.release("first", lease) == 1
        assert key.acquire("second").outcome == "created"

    def test_release_of_a_lease_that_was_read_leaves_a_task_that_started(self, key: Key) -> None:
        key.bring_to("first", State.AVAILABLE)
        lease = key.record().tasks["first"].lease
        key.start("first")
        running = key.record().tasks["first"].lease

        assert key.release("first", lease) == key.release("first", running) == 0
        assert key.acquire("second").outcome == "duplicate"

    def test_release_of_a_free_key_releases_nothing(self, key: Key) -> None:
        assert key.release() == 0
        assert key.release("first") == 0
        assert key.record() == Record()

    def test_release_does_not_count_a_task_that_lapsed(self, key: Key) -> None:
        key.publish("first")
        key.advance(QUEUE_LEASE)

        assert key.release() == 0

    def test_release_leaves_marks(self, key: Key) -> None:
        key.cancel("first")
        before = key.record()

        key.release()

        assert key.record() == before

    def test_a_released_task_can_still_finish(self, key: Key) -> None:
        key.run("first")
        key.release()

        reply = key.finish("first")

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert not key.record()

    def test_a_renewal_does_not_revive_a_released_task(self, key: Key) -> None:
        key.run("first")
        key.release()

        key.store.renew([key.running("first")])

        assert key.acquire("second").outcome == "created"

    def test_a_released_task_that_waits_still_runs(self, key: Key) -> None:
        key.publish("first")
        key.release()
        key.advance(MINUTE)

        started = key.start("first")

        assert (started.verdict, started.lost) == ("run", False)

    def test_a_revoke_does_not_turn_a_task_that_has_ended_into_a_revoked_one(
        self, key: Key
    ) -> None:
        key.run("first")
        key.finish("first", settle_later=True)
        key.store.settle(key.text, finish("first"), mark_done=True)
        key.store.flush()

        reply = key.cancel("first")

        assert reply == "active"
        assert key.start("first", "d2").verdict == "done"

    def test_a_second_revoke_does_not_shorten_the_mark_of_the_first(self, key: Key) -> None:
        key.publish("first")
        key.cancel("first")

        key.cancel("first", MINUTE)
        key.advance(QUEUE_LEASE - MINUTE)

        assert key.start("first").mark == "revoked"

    def test_each_message_of_a_helped_task_finds_that_it_was_revoked(self, key: Key) -> None:
        key.acquire("first")
        assert key.help("first") == "go"
        key.confirm("first")
        key.cancel("first")

        assert key.start("first", "d1") == Started("superseded", mark="revoked")
        key.forget("first")

        assert key.start("first", "d2") == Started("superseded", mark="revoked")

    def test_a_revoke_of_a_helped_and_superseded_task_leaves_its_mark_to_both_messages(
        self, key: Key
    ) -> None:
        key.acquire("first")
        assert key.help("first") == "go"
        key.acquire("second", on_conflict="replace")
        key.confirm("second")

        key.cancel("first")
        key.forget("first")

        assert key.start("first", "d2") == Started("superseded", mark="revoked")

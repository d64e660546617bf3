"""finish and settle: a body is over, then its result and acknowledgement are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import Finished, LockStore
from celery_unique.stores.record import LETTER_OF, Mark, Record, State
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    RETENTION,
    RUN_LEASE,
    SUCCESS,
    UNTIL_DONE,
    about,
    advance,
    bring_to,
    claim,
    finish,
    now_of,
    publish,
    record_of,
    retry,
    run,
    settle,
    start,
    task_of,
)

FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]
EVERY_END = "".join(LETTER_OF[state] for state in FINAL)


class FinishContract:
    # -- finish at once -----------------------------------------------------

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_frees_the_key(self, store: LockStore, key: str, state: State) -> None:
        run(store, key, "first", "d1")

        reply = store.finish(key, finish("first", "d1", state=state))

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert not record_of(store, key)
        assert store.acquire(key, claim("second")).outcome == "created"

    def test_finish_tells_how_many_duplicates_were_absorbed(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        for task_id in ("second", "third"):
            store.acquire(key, claim(task_id))

        reply = store.finish(key, finish("first", "d1"))

        assert reply == Finished("ended", settle=False, duplicates=2)

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_keeps_the_task_when_its_policy_names_the_final_state(
        self, store: LockStore, key: str, state: State
    ) -> None:
        run(store, key, "first", "d1", keep=LETTER_OF[state])
        before = task_of(store, key, "first")

        reply = store.finish(key, finish("first", "d1", state=state))

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert task_of(store, key, "first") == replace(
            before,
            state=LETTER_OF[state],
            lease=about(now_of(store) + RETENTION),
            delivery_lease=0,
        )

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_forgets_the_task_when_its_policy_names_only_other_final_states(
        self, store: LockStore, key: str, state: State
    ) -> None:
        run(store, key, "first", "d1", keep=EVERY_END.replace(LETTER_OF[state], ""))

        store.finish(key, finish("first", "d1", state=state))

        assert not record_of(store, key)

    def test_a_kept_task_stays_until_its_own_window_ends(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1", keep=SUCCESS, window_ms=30 * MINUTE)
        window_ends = task_of(store, key, "first").window_ends
        store.finish(key, finish("first", "d1"))
        advance(store, 29 * MINUTE)
        within = record_of(store, key)
        advance(store, MINUTE)

        after = record_of(store, key)

        assert within.tasks["first"].lease == window_ends
        assert not after

    def test_a_kept_task_without_a_window_stays_for_the_retention(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1", keep=SUCCESS)
        store.finish(key, finish("first", "d1"))
        asked = claim("second", states=SUCCESS)
        advance(store, RETENTION - MINUTE)
        within = store.acquire(key, asked)
        advance(store, MINUTE)

        after = store.acquire(key, asked)

        assert (within.outcome, after.outcome) == ("duplicate", "created")

    def test_a_kept_end_holds_although_nobody_lives_to_settle_it(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1", keep=SUCCESS, window_ms=30 * MINUTE)

        store.finish(key, finish("first", "d1", settle_later=True))
        advance(store, 29 * MINUTE)

        assert store.acquire(key, claim("second", states=SUCCESS)).outcome == "duplicate"

    def test_a_task_that_ends_after_its_window_is_not_kept(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1", keep=SUCCESS, window_ms=3 * MINUTE)
        advance(store, 3 * MINUTE)

        reply = store.finish(key, finish("first", "d1"))

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert not record_of(store, key)

    # -- who may finish -----------------------------------------------------

    def test_finish_by_another_delivery_changes_nothing(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        before = record_of(store, key)

        reply = store.finish(key, finish("first", "d2"))

        assert reply == Finished("not_yours")
        assert record_of(store, key) == before

    def test_finish_of_an_unknown_task_changes_nothing(self, store: LockStore, key: str) -> None:
        reply = store.finish(key, finish("first"))

        assert reply == Finished("not_yours")
        assert record_of(store, key) == Record()

    @pytest.mark.parametrize(
        "state", [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
    )
    def test_finish_ends_a_task_that_no_delivery_has_started(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)

        reply = store.finish(key, finish("first", "d7", state=State.CANCELLED))

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert task_of(store, key, "first").state == LETTER_OF[State.CANCELLED]

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_of_a_kept_task_changes_nothing(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        replies = [store.finish(key, finish("first", delivery)) for delivery in ("d1", "d2")]

        assert replies == [Finished("not_yours"), Finished("not_yours")]
        assert record_of(store, key) == before

    def test_finish_touches_only_its_own_task(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        run(store, key, "second", "d2", states="")
        before = task_of(store, key, "first")

        store.finish(key, finish("second", "d2"))

        assert record_of(store, key).tasks == {"first": before}

    # -- finish now, settle later -------------------------------------------

    def test_finish_before_the_acknowledgement_shows_the_final_state_and_keeps_the_delivery(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        before = task_of(store, key, "first")

        reply = store.finish(key, finish("first", "d1", settle_later=True))

        assert reply == Finished("ended", settle=True, duplicates=0)
        assert task_of(store, key, "first") == replace(before, state="c", flags="e")

    def test_finish_asks_for_settle_when_there_may_be_a_second_message(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.start(key, start("first", "d2"))

        reply = store.finish(key, finish("first", "d1"))

        assert reply == Finished("ended", settle=True, duplicates=0)

    def test_an_ending_task_blocks_only_calls_that_name_its_final_state(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))

        named = store.acquire(key, claim("second", states=SUCCESS))
        unnamed = store.acquire(key, claim("third", states=UNTIL_DONE))

        assert (named.outcome, unnamed.outcome) == ("duplicate", "created")
        assert named.holder is not None
        assert named.holder.state is State.COMPLETED

    def test_finishing_twice_is_as_once(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        first = store.finish(key, finish("first", "d1", settle_later=True))
        before = record_of(store, key)

        second = store.finish(key, finish("first", "d1", settle_later=True, state=State.DISCARDED))

        assert second == first
        assert record_of(store, key) == before

    def test_finish_by_another_delivery_does_not_end_an_ending_task(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        before = record_of(store, key)

        reply = store.finish(key, finish("first", "d2"))

        assert reply == Finished("not_yours")
        assert record_of(store, key) == before

    # -- settle -------------------------------------------------------------

    def test_settle_forgets_an_ending_task(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))

        settle(store, key, "first", "d1")

        assert not record_of(store, key)

    def test_settle_keeps_an_ending_task_as_its_policy_asks(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1", keep=SUCCESS)
        store.finish(key, finish("first", "d1", settle_later=True))
        before = task_of(store, key, "first")

        settle(store, key, "first", "d1")

        assert task_of(store, key, "first") == replace(
            before, lease=about(now_of(store) + RETENTION), delivery_lease=0, flags=""
        )

    def test_settle_carries_the_corrected_state(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1", keep=EVERY_END)
        store.finish(key, finish("first", "d1", settle_later=True))

        settle(store, key, "first", "d1", state=State.DISCARDED)

        assert task_of(store, key, "first").state == LETTER_OF[State.DISCARDED]

    def test_settle_leaves_a_done_mark_when_the_message_may_exist_twice(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))

        settle(store, key, "first", "d1", mark_done=True)

        assert record_of(store, key).tasks == {}
        assert record_of(store, key).marks == {
            "first": Mark("done", about(now_of(store) + QUEUE_LEASE))
        }

    def test_settle_leaves_a_done_mark_when_a_second_message_was_seen(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.start(key, start("first", "d2"))
        store.finish(key, finish("first", "d1"))

        settle(store, key, "first", "d1")

        assert record_of(store, key).marks == {
            "first": Mark("done", about(now_of(store) + QUEUE_LEASE))
        }

    def test_settle_leaves_a_done_mark_beside_a_kept_task(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1", keep=SUCCESS)
        store.finish(key, finish("first", "d1", settle_later=True))

        settle(store, key, "first", "d1", mark_done=True)

        assert list(record_of(store, key).tasks) == ["first"]
        assert list(record_of(store, key).marks) == ["first"]

    # -- a message that was rejected ------------------------------------------

    def test_settle_of_a_rejected_message_leaves_no_done_mark(
        self, store: LockStore, key: str
    ) -> None:
        """It comes back from a dead letter exchange, perhaps, and is then to run."""
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", state=State.DISCARDED, settle_later=True))
        # It can be back before the record is settled.
        assert store.start(key, start("first", "d2")).verdict == "wait"

        settle(store, key, "first", "d1", state=State.DISCARDED, mark_done=True, rejected=True)

        assert not record_of(store, key)
        back = store.start(key, start("first", "d2"))
        assert (back.verdict, back.lost) == ("run", True)

    @pytest.mark.parametrize("later", [False, True])
    def test_a_rejected_task_that_is_kept_blocks_calls_and_not_its_own_message(
        self, store: LockStore, key: str, later: bool
    ) -> None:
        run(store, key, "first", "d1", keep=EVERY_END, window_ms=30 * MINUTE)
        end = {"state": State.DISCARDED, "rejected": True}
        reply = store.finish(key, finish("first", "d1", settle_later=later, **end))
        assert reply.settle is later
        if later:
            settle(store, key, "first", "d1", mark_done=True, **end)
        assert record_of(store, key).marks == {}
        held_by = store.acquire(key, claim("second", states=EVERY_END)).holder
        assert held_by is not None
        assert (held_by.task_id, held_by.state) == ("first", State.DISCARDED)

        assert store.start(key, start("first", "d2")).verdict == "run"

        assert task_of(store, key, "first").state == LETTER_OF[State.ACTIVE]
        store.finish(key, finish("first", "d2", settle_later=True))
        settle(store, key, "first", "d2", mark_done=True)
        assert store.start(key, start("first", "d3")).verdict == "done"

    def test_settle_by_another_delivery_changes_nothing(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        before = record_of(store, key)

        settle(store, key, "first", "d2", mark_done=True)

        assert record_of(store, key) == before

    @pytest.mark.parametrize("state", list(State))
    def test_settle_of_a_task_that_is_not_ending_changes_nothing(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        settle(store, key, "first", "d1", mark_done=True)

        assert record_of(store, key) == before

    def test_settle_of_an_unknown_task_leaves_nothing(self, store: LockStore, key: str) -> None:
        settle(store, key, "first", "d1", mark_done=True)

        assert record_of(store, key) == Record()

    def test_settle_twice_is_as_once(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        settle(store, key, "first", "d1", mark_done=True)
        before = record_of(store, key)
        advance(store, MINUTE)

        settle(store, key, "first", "d1", mark_done=True)

        assert record_of(store, key) == before

    def test_an_ending_task_that_nobody_settles_lapses(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        store.start(key, start("first", "d1", lease_ms=RUN_LEASE))
        store.finish(key, finish("first", "d1", settle_later=True))
        advance(store, RUN_LEASE)

        assert not record_of(store, key)

    def test_a_delivery_that_was_taken_over_does_not_end_the_retry_of_the_other(
        self, store: LockStore, key: str
    ) -> None:
        """After the retry no delivery is recorded, but the token tells whose start it was."""
        old = run(store, key, "first", "d1").token
        advance(store, RUN_LEASE)
        new = store.start(key, start("first", "d2")).token
        retry(store, key, "first", "d2")

        late = store.finish(key, finish("first", "d1", token=old))

        assert late == Finished("not_yours")
        assert store.acquire(key, claim("second")).outcome == "duplicate"
        # Its own delivery may, though it let go of it: a retry whose body then ends all the same.
        assert store.finish(key, finish("first", "d2", token=new)).verdict == "ended"

"""finish and settle: the end of a body, then of its result and acknowledgement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import Finished
from celery_unique.stores.record import LETTER_OF, Mark, Record, State
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    RETENTION,
    RUN_LEASE,
    SUCCESS,
    UNTIL_DONE,
    Key,
    about,
    claim,
)

FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]
EVERY_END = "".join(LETTER_OF[state] for state in FINAL)


class FinishContract:
    # -- finish at once -----------------------------------------------------

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_frees_the_key(self, key: Key, state: State) -> None:
        key.run("first", "d1")

        reply = key.finish("first", "d1", state=state)

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert not key.record()
        assert key.acquire("second").outcome == "created"

    def test_finish_tells_how_many_duplicates_were_absorbed(self, key: Key) -> None:
        key.run("first", "d1")
        for task_id in ("second", "third"):
            key.acquire(task_id)

        reply = key.finish("first", "d1")

        assert reply == Finished("ended", settle=False, duplicates=2)

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_keeps_the_task_when_its_policy_names_the_final_state(
        self, key: Key, state: State
    ) -> None:
        key.run("first", "d1", keep=LETTER_OF[state])
        before = key.task("first")

        reply = key.finish("first", "d1", state=state)

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert key.task("first") == replace(
            before,
            state=LETTER_OF[state],
            lease=about(key.now() + RETENTION),
            delivery_lease=0,
        )

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_forgets_the_task_when_its_policy_names_only_other_final_states(
        self, key: Key, state: State
    ) -> None:
        key.run("first", "d1", keep=EVERY_END.replace(LETTER_OF[state], ""))

        key.finish("first", "d1", state=state)

        assert not key.record()

    def test_a_kept_task_stays_until_its_own_window_ends(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS, window_ms=30 * MINUTE)
        window_ends = key.task("first").window_ends
        key.finish("first", "d1")
        key.advance(29 * MINUTE)
        within = key.record()
        key.advance(MINUTE)

        after = key.record()

        assert within.tasks["first"].lease == window_ends
        assert not after

    def test_a_kept_task_without_a_window_stays_for_the_retention(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS)
        key.finish("first", "d1")
        asked = claim("second", states=SUCCESS)
        key.advance(RETENTION - MINUTE)
        within = key.store.acquire(key.text, asked)
        key.advance(MINUTE)

        after = key.store.acquire(key.text, asked)

        assert (within.outcome, after.outcome) == ("duplicate", "created")

    def test_a_kept_end_holds_although_nobody_lives_to_settle_it(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS, window_ms=30 * MINUTE)

        key.finish("first", "d1", settle_later=True)
        key.advance(29 * MINUTE)

        assert key.acquire("second", states=SUCCESS).outcome == "duplicate"

    def test_a_task_that_ends_after_its_window_is_not_kept(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS, window_ms=3 * MINUTE)
        key.advance(3 * MINUTE)

        reply = key.finish("first", "d1")

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert not key.record()

    # -- who may finish -----------------------------------------------------

    def test_finish_by_another_delivery_changes_nothing(self, key: Key) -> None:
        key.run("first", "d1")
        before = key.record()

        reply = key.finish("first", "d2")

        assert reply == Finished("not_yours")
        assert key.record() == before

    def test_finish_of_an_unknown_task_changes_nothing(self, key: Key) -> None:
        reply = key.finish("first")

        assert reply == Finished("not_yours")
        assert key.record() == Record()

    @pytest.mark.parametrize(
        "state", [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
    )
    def test_finish_ends_a_task_that_no_delivery_has_started(self, key: Key, state: State) -> None:
        key.bring_to("first", state)

        reply = key.finish("first", "d7", state=State.CANCELLED)

        assert reply == Finished("ended", settle=False, duplicates=0)
        assert key.task("first").state == LETTER_OF[State.CANCELLED]

    @pytest.mark.parametrize("state", FINAL)
    def test_finish_of_a_kept_task_changes_nothing(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()

        replies = [key.finish("first", delivery) for delivery in ("d1", "d2")]

        assert replies == [Finished("not_yours"), Finished("not_yours")]
        assert key.record() == before

    def test_finish_touches_only_its_own_task(self, key: Key) -> None:
        key.run("first", "d1")
        key.run("second", "d2", states="")
        before = key.task("first")

        key.finish("second", "d2")

        assert key.record().tasks == {"first": before}

    # -- finish now, settle later -------------------------------------------

    def test_finish_before_the_acknowledgement_shows_the_final_state_and_keeps_the_delivery(
        self, key: Key
    ) -> None:
        key.run("first", "d1")
        before = key.task("first")

        reply = key.finish("first", "d1", settle_later=True)

        assert reply == Finished("ended", settle=True, duplicates=0)
        assert key.task("first") == replace(before, state="c", flags="e")

    def test_finish_asks_for_settle_when_there_may_be_a_second_message(self, key: Key) -> None:
        key.run("first", "d1")
        key.start("first", "d2")

        reply = key.finish("first", "d1")

        assert reply == Finished("ended", settle=True, duplicates=0)

    def test_an_ending_task_blocks_only_calls_that_name_its_final_state(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)

        named = key.acquire("second", states=SUCCESS)
        unnamed = key.acquire("third", states=UNTIL_DONE)

        assert (named.outcome, unnamed.outcome) == ("duplicate", "created")
        assert named.holder is not None
        assert named.holder.state is State.COMPLETED

    def test_an_ending_task_blocks_until_it_is_settled_also_after_its_time(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS, keep_ms=MINUTE)
        key.advance(2 * MINUTE)
        key.finish("first", "d1", settle_later=True)  # its message is not acknowledged

        unsettled = key.acquire("second", states=SUCCESS)
        key.settle("first", "d1")
        settled = key.acquire("third", states=SUCCESS)

        assert (unsettled.outcome, settled.outcome) == ("duplicate", "created")

    def test_finishing_twice_is_as_once(self, key: Key) -> None:
        key.run("first", "d1")
        first = key.finish("first", "d1", settle_later=True)
        before = key.record()

        second = key.finish("first", "d1", settle_later=True, state=State.DISCARDED)

        assert second == first
        assert key.record() == before

    @pytest.mark.parametrize("keep", ["", "c"])
    def test_an_end_that_is_reported_again_has_ended(self, key: Key, keep: str) -> None:
        """Its first reply was lost."""
        key.run("a", keep=keep)
        key.finish("a")
        before = key.record()

        again = key.finish("a", again=True)

        assert again == Finished("ended")
        assert key.record() == before
        assert key.finish("a") == Finished("not_yours")

    def test_an_end_that_is_reported_again_is_another_deliverys_if_that_holds_the_task(
        self, key: Key
    ) -> None:
        key.run("a", delivery="d2")

        assert key.finish("a", again=True) == Finished("not_yours")
        assert key.task("a").state == "r"

    def test_an_end_that_was_not_reported_before_is_reported_again(self, key: Key) -> None:
        key.run("a")
        key.acquire("b")

        assert key.finish("a", again=True) == Finished("ended", duplicates=1)
        assert key.record().tasks == {}

    def test_finish_by_another_delivery_does_not_end_an_ending_task(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        before = key.record()

        reply = key.finish("first", "d2")

        assert reply == Finished("not_yours")
        assert key.record() == before

    # -- settle -------------------------------------------------------------

    def test_settle_forgets_an_ending_task(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)

        key.settle("first", "d1")

        assert not key.record()

    def test_settle_keeps_an_ending_task_as_its_policy_asks(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS)
        key.finish("first", "d1", settle_later=True)
        before = key.task("first")

        key.settle("first", "d1")

        assert key.task("first") == replace(
            before, lease=about(key.now() + RETENTION), delivery_lease=0, flags=""
        )

    def test_settle_carries_the_corrected_state(self, key: Key) -> None:
        key.run("first", "d1", keep=EVERY_END)
        key.finish("first", "d1", settle_later=True)

        key.settle("first", "d1", state=State.DISCARDED)

        assert key.task("first").state == LETTER_OF[State.DISCARDED]

    def test_settle_leaves_a_done_mark_when_the_message_may_exist_twice(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)

        key.settle("first", "d1", mark_done=True)

        assert key.record().tasks == {}
        assert key.record().marks == {"first": Mark("done", about(key.now() + QUEUE_LEASE))}

    def test_settle_leaves_a_done_mark_when_a_second_message_was_seen(self, key: Key) -> None:
        key.run("first", "d1")
        key.start("first", "d2")
        key.finish("first", "d1")

        key.settle("first", "d1")

        assert key.record().marks == {"first": Mark("done", about(key.now() + QUEUE_LEASE))}

    def test_settle_leaves_a_done_mark_beside_a_kept_task(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS)
        key.finish("first", "d1", settle_later=True)

        key.settle("first", "d1", mark_done=True)

        assert list(key.record().tasks) == ["first"]
        assert list(key.record().marks) == ["first"]

    # -- a message that was rejected ------------------------------------------

    def test_settle_of_a_rejected_message_leaves_no_done_mark(self, key: Key) -> None:
        """It comes back from a dead letter exchange, perhaps, and is then to run."""
        key.run("first", "d1")
        key.finish("first", "d1", state=State.DISCARDED, settle_later=True)
        # It can be back before the record is settled.
        assert key.start("first", "d2").verdict == "wait"

        key.settle("first", "d1", state=State.DISCARDED, mark_done=True, rejected=True)

        assert not key.record()
        back = key.start("first", "d2")
        assert (back.verdict, back.lost) == ("run", True)

    @pytest.mark.parametrize("later", [False, True])
    def test_a_rejected_task_that_is_kept_blocks_calls_and_not_its_own_message(
        self, key: Key, later: bool
    ) -> None:
        key.run("first", "d1", keep=EVERY_END, window_ms=30 * MINUTE)
        end = {"state": State.DISCARDED, "rejected": True}
        reply = key.finish("first", "d1", settle_later=later, **end)
        assert reply.settle is later
        if later:
            key.settle("first", "d1", mark_done=True, **end)
        assert key.record().marks == {}
        held_by = key.acquire("second", states=EVERY_END).holder
        assert held_by is not None
        assert (held_by.task_id, held_by.state) == ("first", State.DISCARDED)

        assert key.start("first", "d2").verdict == "run"

        assert key.task("first").state == LETTER_OF[State.ACTIVE]
        key.finish("first", "d2", settle_later=True)
        key.settle("first", "d2", mark_done=True)
        assert key.start("first", "d3").verdict == "done"

    def test_settle_by_another_delivery_changes_nothing(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        before = key.record()

        key.settle("first", "d2", mark_done=True)

        assert key.record() == before

    @pytest.mark.parametrize("state", list(State))
    def test_settle_of_a_task_that_is_not_ending_changes_nothing(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)
        before = key.record()

        key.settle("first", "d1", mark_done=True)

        assert key.record() == before

    def test_settle_of_an_unknown_task_leaves_nothing(self, key: Key) -> None:
        key.settle("first", "d1", mark_done=True)

        assert key.record() == Record()

    def test_settle_twice_is_as_once(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        key.settle("first", "d1", mark_done=True)
        before = key.record()
        key.advance(MINUTE)

        key.settle("first", "d1", mark_done=True)

        assert key.record() == before

    def test_an_ending_task_that_nobody_settles_lapses(self, key: Key) -> None:
        key.publish("first")
        key.start("first", "d1", lease_ms=RUN_LEASE)
        key.finish("first", "d1", settle_later=True)
        key.advance(RUN_LEASE)

        assert not key.record()

    def test_a_delivery_that_was_taken_over_does_not_end_the_retry_of_the_other(
        self, key: Key
    ) -> None:
        """After the retry no delivery is recorded, but the token identifies the start."""
        old = key.run("first", "d1").token
        key.advance(RUN_LEASE)
        new = key.start("first", "d2").token
        key.retry("first", "d2")

        late = key.finish("first", "d1", token=old)

        assert late == Finished("not_yours")
        assert key.acquire("second").outcome == "duplicate"
        # Its own delivery may, although it released the task: a retry whose body ends anyway.
        assert key.finish("first", "d2", token=new).verdict == "ended"

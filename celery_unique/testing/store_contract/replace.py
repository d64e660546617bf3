"""Replacing and succeeding: which task goes into limbo, which comes back, which is superseded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import Acquired, Started
from celery_unique.stores.record import LETTER_OF, Mark, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    Key,
    about,
)

REPLACING = ["replace", "replace_except_schedule"]
NOT_STARTED = [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]


def stand_in(key: Key, task_id: str, **fields: object) -> Acquired:
    """A call that replaces what waits; its message is not out yet."""
    reply = key.acquire(task_id, **{"on_conflict": "replace", **fields})
    assert reply.outcome == "created"
    return reply


def succeed(key: Key, task_id: str, **fields: object) -> Acquired:
    """A call that is to run after what runs; its message is not out yet."""
    reply = key.acquire(task_id, **{"on_conflict": "rerun", **fields})
    assert reply.outcome == "created"
    return reply


def forget(key: Key, task_id: str) -> None:
    key.forget(task_id)
    key.store.flush()


def marks_of(key: Key) -> dict[str, tuple[str, str]]:
    return {i: (mark.kind, mark.by) for i, mark in key.record().marks.items()}


class ReplaceContract:
    # -- replace: the table, for every state of the holder -------------------

    @pytest.mark.parametrize("on_conflict", REPLACING)
    @pytest.mark.parametrize("state", NOT_STARTED)
    def test_a_call_that_replaces_puts_a_holder_that_has_not_started_into_limbo(
        self, key: Key, state: State, on_conflict: str
    ) -> None:
        key.bring_to("first", state)
        before = key.task("first")

        reply = key.acquire("second", on_conflict=on_conflict)

        kept = before.eta if on_conflict == "replace_except_schedule" else 0
        assert reply == Acquired("created", None, reply.now, ("first",), "", kept)
        assert key.record().tasks == {
            "first": replace(before, by="second"),
            "second": TaskEntry(
                "p",
                reply.now,
                reply.now + GRACE,
                "shop.rebuild",
                eta=kept,
                since=before.created_at,
            ),
        }

    @pytest.mark.parametrize("on_conflict", REPLACING)
    def test_a_call_that_replaces_is_rejected_by_an_active_holder(
        self, key: Key, on_conflict: str
    ) -> None:
        key.run("first")
        before = key.task("first")

        reply = key.acquire("second", on_conflict=on_conflict)

        assert reply.outcome == "rejected"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("first", State.ACTIVE)
        assert key.record().tasks == {
            "first": replace(before, duplicates=1, last_duplicate_at=reply.now)
        }

    @pytest.mark.parametrize("on_conflict", REPLACING)
    @pytest.mark.parametrize("state", FINAL)
    def test_a_call_that_replaces_is_admitted_beside_an_ended_holder(
        self, key: Key, state: State, on_conflict: str
    ) -> None:
        key.bring_to("first", state)
        before = key.task("first")

        reply = key.acquire("second", states=EVERY_STATE, on_conflict=on_conflict)

        assert reply == Acquired("created", None, reply.now)
        assert key.task("first") == before

    def test_one_active_holder_among_others_rejects_and_nothing_is_replaced(self, key: Key) -> None:
        key.run("runs", states="")
        key.publish("waits", states="")
        before = key.task("waits")

        reply = key.acquire("new", on_conflict="replace")

        assert reply.outcome == "rejected"
        assert reply.holder is not None
        assert reply.holder.task_id == "runs"
        assert key.task("waits") == before

    def test_every_holder_that_waits_is_replaced_and_named(self, key: Key) -> None:
        for task_id in ("b", "a", "c"):
            key.publish(task_id, states="")
            key.advance(MINUTE)

        reply = stand_in(key, "new")

        assert reply.replaced == ("a", "b", "c")

    def test_what_the_call_does_not_count_is_not_replaced(self, key: Key) -> None:
        key.publish("scheduled", delay_ms=10 * MINUTE)

        reply = stand_in(key, "new", states=LETTER_OF[State.AVAILABLE])

        assert reply.replaced == ()
        assert key.task("scheduled").by == ""

    def test_a_holder_outside_the_calls_window_is_not_replaced(self, key: Key) -> None:
        key.publish("old")
        key.advance(10 * MINUTE)

        reply = stand_in(key, "new", window_ms=5 * MINUTE)

        assert reply.replaced == ()
        assert key.task("old").by == ""

    def test_a_released_holder_is_not_replaced(self, key: Key) -> None:
        key.publish("old")
        key.release()

        assert stand_in(key, "new").replaced == ()

    @pytest.mark.parametrize("on_conflict", REPLACING)
    def test_a_call_with_the_id_of_the_task_it_would_replace_is_rejected(
        self, key: Key, on_conflict: str
    ) -> None:
        key.publish("first")

        reply = key.acquire("first", on_conflict=on_conflict)

        assert reply.outcome == "rejected"
        assert key.task("first").by == ""

    # -- limbo ----------------------------------------------------------------

    def test_a_task_in_limbo_blocks_nobody_and_waits_at_the_gate(self, key: Key) -> None:
        key.publish("first")
        stand_in(key, "second")

        asked = key.acquire("third")
        gate = key.start("first")

        assert asked.holder is not None
        assert asked.holder.task_id == "second"
        assert gate == Started("wait")

    @pytest.mark.parametrize("how", ["confirm", "start", "renew"])
    def test_the_replacement_is_published_and_what_it_stands_in_for_is_over(
        self, key: Key, how: str
    ) -> None:
        key.publish("first")
        stand_in(key, "second")

        if how == "confirm":
            key.confirm("second")
        elif how == "start":
            key.start("second", mark_ms=QUEUE_LEASE)
        else:
            key.store.renew([key.held("second")])

        record = key.record()
        assert list(record.tasks) == ["second"]
        assert record.marks == {
            "first": Mark("superseded", about(key.store.read(key.text)[1] + QUEUE_LEASE), "second")
        }
        assert key.start("first", "d2") == Started("superseded", mark="superseded", by="second")

    def test_the_mark_of_a_superseded_task_outlives_its_message(self, key: Key) -> None:
        """A message with an ETA far ahead is reached long after a queue lease."""
        key.publish("first", delay_ms=30 * QUEUE_LEASE)
        stand_in(key, "second")
        key.confirm("second")
        key.advance(30 * QUEUE_LEASE)

        gate = key.start("first")

        assert gate == Started("superseded", mark="superseded", by="second")

    def test_a_worker_that_holds_a_superseded_message_keeps_its_mark(self, key: Key) -> None:
        key.publish("first")
        stand_in(key, "second")
        key.confirm("second")
        key.advance(QUEUE_LEASE - MINUTE)

        assert key.store.renew([key.held("first")]) == [True]

        key.advance(QUEUE_LEASE - MINUTE)
        assert key.start("first").verdict == "superseded"

    def test_the_mark_is_forgotten_when_its_message_was_reached(self, key: Key) -> None:
        key.publish("first")
        stand_in(key, "second")
        key.confirm("second")

        forget(key, "first")

        assert marks_of(key) == {}
        assert list(key.record().tasks) == ["second"]

    def test_each_message_of_a_helped_task_finds_that_it_was_superseded(self, key: Key) -> None:
        """A duplicate has published it, too: the first of the two messages to be dropped leaves
        the mark to the other one."""
        key.acquire("first")
        assert key.help("first") == "go"
        key.confirm("first")
        stand_in(key, "second")
        key.confirm("second")

        assert key.start("first", "d1") == Started("superseded", mark="superseded", by="second")
        forget(key, "first")

        assert key.start("first", "d2") == Started("superseded", mark="superseded", by="second")
        assert marks_of(key) == {"first": ("superseded", "second")}

    def test_the_mark_of_a_helped_task_lapses_with_its_messages(self, key: Key) -> None:
        key.acquire("first")
        key.help("first")
        key.confirm("first")
        stand_in(key, "second")
        key.confirm("second")
        assert key.store.renew([key.held("first", 2 * QUEUE_LEASE)]) == [True]
        forget(key, "first")

        key.advance(2 * QUEUE_LEASE - MINUTE)
        assert key.start("first", "d2").verdict == "superseded"

        key.advance(2 * MINUTE)
        assert marks_of(key) == {}

    def test_a_superseded_task_in_a_canvas_leaves_a_plain_mark(self, key: Key) -> None:
        """No caller publishes a copy, and releases that know no lasting marks share the store:
        they would drop it without its canvas."""
        key.publish("first", canvas=True)
        assert key.store.renew([key.held("first", copies=True)]) == [True]
        stand_in(key, "second")
        key.confirm("second")

        forget(key, "first")

        assert marks_of(key) == {}

    def test_forget_leaves_tasks_alone(self, key: Key) -> None:
        key.publish("first")
        before = key.record()

        forget(key, "first")
        forget(key, "unknown")

        assert key.record() == before

    def test_a_publish_that_fails_brings_the_replaced_task_back(self, key: Key) -> None:
        key.publish("first")
        before = key.task("first")
        stand_in(key, "second")

        assert key.give_back("second") is True

        record = key.record()
        assert record.tasks == {"first": replace(before, lease=about(before.lease))}
        assert marks_of(key) == {"second": ("withdrawn", "")}
        assert key.start("first").verdict == "run"
        assert key.start("second", "d2").verdict == "superseded"

    def test_a_task_that_is_brought_back_has_a_fresh_lease(self, key: Key) -> None:
        key.publish("first")
        key.advance(QUEUE_LEASE - MINUTE)
        stand_in(key, "second")

        key.give_back("second")

        assert key.task("first").lease == about(key.store.read(key.text)[1] + QUEUE_LEASE)

    def test_a_replacement_whose_publisher_died_gives_way_after_its_grace(self, key: Key) -> None:
        key.publish("first")
        stand_in(key, "second")
        key.advance(GRACE)

        assert key.acquire("third").outcome == "duplicate"
        assert key.start("first").verdict == "run"

    def test_a_replacement_that_is_revoked_brings_the_replaced_task_back(self, key: Key) -> None:
        key.publish("first")
        stand_in(key, "second")

        assert key.cancel("second") == "cancelled"

        assert key.start("first").verdict == "run"

    def test_revoking_a_task_in_limbo_leaves_the_replacement_alone(self, key: Key) -> None:
        key.publish("first")
        stand_in(key, "second")

        assert key.cancel("first") == "cancelled"
        key.give_back("second")

        assert key.record().tasks == {}
        assert marks_of(key) == {"first": ("revoked", ""), "second": ("withdrawn", "")}

    def test_a_replacement_that_was_released_no_longer_holds_the_other_back(self, key: Key) -> None:
        key.publish("first")
        stand_in(key, "second")

        key.release("second")

        assert key.start("first").verdict == "run"

    def test_helping_is_not_for_a_task_in_limbo(self, key: Key) -> None:
        key.acquire("first")
        stand_in(key, "second")

        assert key.help("first") == "again"
        assert key.help("second") == "go"

    def test_the_same_attempt_asking_again_hears_what_it_replaces(self, key: Key) -> None:
        key.publish("first", delay_ms=10 * MINUTE)
        before = stand_in(key, "second", on_conflict="replace_except_schedule")

        again = key.acquire("second", on_conflict="replace_except_schedule", again=True)

        assert again == replace(before, now=again.now)

    # -- chains of replacements ------------------------------------------------

    def test_the_last_of_a_chain_names_all_that_it_stands_in_for(self, key: Key) -> None:
        """The publisher in the middle may die: no other reply names the first."""
        key.publish("a")
        stand_in(key, "b")

        reply = stand_in(key, "c")

        assert reply.replaced == ("a", "b")

    def test_the_last_of_a_chain_ends_all_that_came_before(self, key: Key) -> None:
        key.publish("a")
        stand_in(key, "b")
        stand_in(key, "c")

        key.confirm("c")

        assert list(key.record().tasks) == ["c"]
        assert marks_of(key) == {"a": ("superseded", "c"), "b": ("superseded", "c")}

    def test_a_failed_replacement_in_the_middle_hands_on_what_it_replaced(self, key: Key) -> None:
        key.publish("a")
        stand_in(key, "b")
        stand_in(key, "c")

        key.give_back("b")

        assert key.task("a").by == "c"
        assert key.start("a") == Started("wait")
        key.confirm("c")
        assert marks_of(key) == {"a": ("superseded", "c"), "b": ("withdrawn", "")}

    def test_a_replacement_in_the_middle_that_lapses_hands_on_what_it_replaced(
        self, key: Key
    ) -> None:
        key.publish("a")
        stand_in(key, "b", grace_ms=2 * MINUTE)
        stand_in(key, "c", grace_ms=10 * MINUTE)
        key.advance(5 * MINUTE)

        gate = key.start("a")

        assert gate == Started("wait")
        key.confirm("c")
        assert marks_of(key)["a"] == ("superseded", "c")

    def test_a_failed_last_of_a_chain_brings_only_the_one_before_it_back(self, key: Key) -> None:
        key.publish("a")
        stand_in(key, "b")
        stand_in(key, "c")

        key.give_back("c")

        assert key.start("a") == Started("wait")
        assert key.task("b").by == ""
        key.give_back("b")
        assert key.start("a").verdict == "run"

    def test_a_confirm_that_comes_after_it_was_replaced_changes_only_itself(self, key: Key) -> None:
        """Confirmations are fire-and-forget: the next call may be faster."""
        key.publish("a")
        stand_in(key, "b")
        stand_in(key, "c")

        key.confirm("b")

        assert marks_of(key) == {"a": ("superseded", "b")}
        assert key.task("b").by == "c"
        assert key.start("b") == Started("wait")

    # -- a replacement that ends before the store hears that it is published --------

    @pytest.mark.parametrize("keep", ["", "cdx"])
    @pytest.mark.parametrize("state", [State.COMPLETED, State.DISCARDED])
    def test_a_replacement_that_ran_unknown_to_the_store_ends_what_it_replaced(
        self, key: Key, state: State, keep: str
    ) -> None:
        """The store did not answer at the confirm, nor at the gate."""
        key.publish("first")
        stand_in(key, "second", keep=keep)

        key.finish("second", state=state)

        assert marks_of(key) == {"first": ("superseded", "second")}

    @pytest.mark.parametrize("keep", ["", "cdx"])
    @pytest.mark.parametrize("settle_later", [False, True])
    def test_a_replacement_that_a_worker_revoked_brings_the_replaced_task_back(
        self, key: Key, settle_later: bool, keep: str
    ) -> None:
        key.publish("first")
        stand_in(key, "second", keep=keep)

        key.finish("second", state=State.CANCELLED, settle_later=settle_later)

        assert key.start("first").verdict == "run"

    # -- schedules ---------------------------------------------------------------

    def test_the_holders_schedule_is_kept_whatever_delay_the_call_brings(self, key: Key) -> None:
        key.publish("first", delay_ms=10 * MINUTE)
        eta = key.task("first").eta
        key.advance(MINUTE)

        reply = stand_in(key, "second", on_conflict="replace_except_schedule", delay_ms=30 * MINUTE)

        assert reply.eta == key.task("second").eta == eta

    def test_a_schedule_that_has_passed_is_not_kept(self, key: Key) -> None:
        key.publish("first", delay_ms=10 * MINUTE)
        key.advance(11 * MINUTE)

        reply = stand_in(key, "second", on_conflict="replace_except_schedule", delay_ms=5 * MINUTE)

        assert reply.eta == reply.now + 5 * MINUTE

    def test_replace_takes_the_calls_own_schedule(self, key: Key) -> None:
        key.publish("first", delay_ms=10 * MINUTE)

        later = stand_in(key, "second", delay_ms=30 * MINUTE)
        at_once = stand_in(key, "third")

        assert (later.eta, at_once.eta) == (later.now + 30 * MINUTE, 0)

    # -- max_wait ------------------------------------------------------------------

    def test_a_task_is_not_pushed_beyond_max_wait_from_the_first(self, key: Key) -> None:
        asked = {"delay_ms": 10 * MINUTE, "max_wait_ms": 25 * MINUTE}
        first = key.acquire("t0", **asked)
        key.confirm("t0")
        etas = []
        for number in range(1, 5):
            key.advance(6 * MINUTE)
            reply = stand_in(key, f"t{number}", **asked)
            key.confirm(f"t{number}")
            etas.append(reply.eta)

        latest = first.now + 25 * MINUTE
        expected = [first.now + 16 * MINUTE, first.now + 22 * MINUTE, latest, latest]
        assert etas == [about(eta) for eta in expected]
        assert key.task("t4").since == first.now

    @pytest.mark.parametrize("state", [State.PENDING, State.AVAILABLE])
    def test_a_task_that_is_due_and_was_pushed_back_for_max_wait_is_not_replaced(
        self, key: Key, state: State
    ) -> None:
        """In a slow queue, calls would else replace each other for ever."""
        key.bring_to("t0", State.AVAILABLE)
        key.advance(10 * MINUTE)
        asked = {"max_wait_ms": 9 * MINUTE, "delay_ms": 5 * MINUTE, "grace_ms": 30 * MINUTE}
        if state is State.PENDING:
            key.acquire("t1", on_conflict="replace")
            key.advance(MINUTE)
        due = "t1" if state is State.PENDING else "t0"

        first = stand_in(key, "t2", **asked)
        second = stand_in(key, "t3", **asked)

        assert (first.replaced, first.after) == ((), due)
        assert first.eta == first.now + 5 * MINUTE
        assert (second.replaced, second.after) == (("t2",), due)
        key.confirm("t3")
        assert key.start("t3", "d3") == Started("wait")
        assert key.start(due, "d0").verdict == "run"

    def test_a_task_that_waits_for_its_eta_is_brought_forward_when_max_wait_has_passed(
        self, key: Key
    ) -> None:
        key.publish("first", delay_ms=60 * MINUTE)
        key.advance(10 * MINUTE)

        reply = stand_in(key, "second", delay_ms=60 * MINUTE, max_wait_ms=5 * MINUTE)

        assert (reply.replaced, reply.after, reply.eta) == (("first",), "", 0)

    def test_a_task_that_waits_for_its_retry_is_replaced_whatever_max_wait(self, key: Key) -> None:
        key.bring_to("first", State.RETRYABLE)
        key.advance(10 * MINUTE)

        reply = stand_in(key, "second", max_wait_ms=5 * MINUTE)

        assert (reply.replaced, reply.after) == (("first",), "")

    def test_the_first_call_alone_is_not_bounded(self, key: Key) -> None:
        reply = key.acquire(
            "first", on_conflict="replace", delay_ms=60 * MINUTE, max_wait_ms=MINUTE
        )

        assert reply.eta == reply.now + 60 * MINUTE

    def test_max_wait_begins_anew_once_a_task_has_started(self, key: Key) -> None:
        until_start = "psw"
        key.publish("first", states=until_start)
        key.advance(20 * MINUTE)
        key.start("first")

        second = stand_in(
            key,
            "second",
            states=until_start,
            delay_ms=10 * MINUTE,
            max_wait_ms=MINUTE,
        )

        assert second.replaced == ()
        assert second.eta == second.now + 10 * MINUTE
        assert key.task("second").since == 0

    # -- rerun -------------------------------------------------------------------

    def test_a_call_that_reruns_becomes_the_successor_of_an_active_holder(self, key: Key) -> None:
        key.run("first")

        reply = key.acquire("second", on_conflict="rerun")

        assert reply == Acquired("created", None, reply.now, (), "first", 0)
        assert key.task("second") == TaskEntry(
            "p", reply.now, reply.now + GRACE, "shop.rebuild", after="first"
        )

    @pytest.mark.parametrize("state", [*NOT_STARTED, *FINAL])
    def test_a_call_that_reruns_is_a_duplicate_of_any_other_holder(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)

        reply = key.acquire("second", states=EVERY_STATE, on_conflict="rerun")

        assert reply.outcome == "duplicate"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("first", state)

    def test_a_successor_waits_at_the_gate_until_its_predecessor_ends(self, key: Key) -> None:
        key.run("first", "d1")
        succeed(key, "second")
        key.confirm("second")
        before = key.start("second", "d2")
        key.finish("first", "d1")

        after = key.start("second", "d2")

        assert (before, after.verdict, after.lost) == (Started("wait"), "run", False)
        assert key.task("second").after == ""

    def test_a_successor_starts_while_its_predecessor_settles(self, key: Key) -> None:
        key.run("first", "d1")
        succeed(key, "second")
        key.confirm("second")

        key.finish("first", "d1", settle_later=True)

        assert key.start("second", "d2").verdict == "run"

    def test_a_successor_waits_for_the_retry_of_its_predecessor(self, key: Key) -> None:
        key.run("first", "d1")
        succeed(key, "second")
        key.confirm("second")

        key.retry("first", "d1")

        assert key.start("second", "d2") == Started("wait")
        assert key.start("first", "d3").verdict == "run"

    def test_a_successor_starts_when_the_lease_of_its_predecessor_has_lapsed(
        self, key: Key
    ) -> None:
        key.publish("first")
        key.start("first", lease_ms=RUN_LEASE)  # acknowledged early
        succeed(key, "second")
        key.confirm("second")
        # The worker is killed.
        key.advance(RUN_LEASE)

        assert key.start("second", "d2").verdict == "run"

    def test_a_successor_starts_when_its_predecessor_was_released(self, key: Key) -> None:
        key.run("first")
        succeed(key, "second")
        key.confirm("second")

        key.release("first")

        assert key.start("second", "d2").verdict == "run"

    def test_a_newer_successor_takes_the_place_of_a_waiting_one(self, key: Key) -> None:
        key.run("first")
        succeed(key, "second")
        key.confirm("second")

        reply = succeed(key, "third")
        key.confirm("third")

        assert (reply.replaced, reply.after) == (("second",), "first")
        assert sorted(key.record().tasks) == ["first", "third"]
        assert marks_of(key) == {"second": ("superseded", "third")}

    def test_a_successor_that_could_not_be_published_leaves_the_older_one(self, key: Key) -> None:
        key.run("first", "d1")
        succeed(key, "second")
        key.confirm("second")
        succeed(key, "third")

        key.give_back("third")

        assert key.start("second", "d2") == Started("wait")
        key.finish("first", "d1")
        assert key.start("second", "d2").verdict == "run"

    def test_a_successor_whose_predecessor_has_ended_is_what_blocks(self, key: Key) -> None:
        key.run("first")
        succeed(key, "second")
        key.confirm("second")
        key.finish("first")

        reply = key.acquire("third", on_conflict="rerun")

        assert reply.outcome == "duplicate"
        assert reply.holder is not None
        assert reply.holder.task_id == "second"

    def test_a_waiting_successor_can_be_replaced_once_its_predecessor_has_ended(
        self, key: Key
    ) -> None:
        key.run("first")
        succeed(key, "second")
        key.confirm("second")
        key.finish("first")

        assert stand_in(key, "third").replaced == ("second",)

    # -- a task that calls itself from its own body -------------------------------

    @pytest.mark.parametrize("on_conflict", ["ignore", "reject", *REPLACING, "rerun"])
    def test_a_task_that_calls_itself_is_its_own_successor(
        self, key: Key, on_conflict: str
    ) -> None:
        key.run("first")

        reply = key.acquire("second", on_conflict=on_conflict, parent="first", delay_ms=10 * MINUTE)

        eta = reply.now + 10 * MINUTE
        assert reply == Acquired("created", None, reply.now, (), "first", eta)

    def test_a_second_call_from_the_same_body_takes_the_place_of_the_first(self, key: Key) -> None:
        key.run("first")
        key.publish("second", parent="first")

        reply = key.acquire("third", parent="first")

        assert (reply.replaced, reply.after) == (("second",), "first")

    def test_another_call_meets_the_running_task_and_not_its_successor(self, key: Key) -> None:
        key.run("first")
        key.publish("second", parent="first")

        reply = key.acquire("third")

        assert reply.holder is not None
        assert reply.holder.task_id == "first"

    def test_a_parent_with_another_key_is_no_predecessor(self, key: Key) -> None:
        key.publish("first")

        reply = key.acquire("second", parent="another")

        assert reply.outcome == "duplicate"

    # -- behind an idempotency key -----------------------------------------------------------

    @pytest.mark.parametrize("strategy", [*REPLACING, "rerun"])
    @pytest.mark.parametrize("state", ["waits", "runs", "is done"])
    def test_other_work_behind_the_same_key_is_neither_replaced_nor_followed(
        self, key: Key, strategy: str, state: str
    ) -> None:
        key.publish("first", arguments="f00d", keep=LETTER_OF[State.COMPLETED])
        if state != "waits":
            key.start("first")
        if state == "is done":
            key.finish("first")

        reply = key.acquire("other", on_conflict=strategy, states=EVERY_STATE, arguments="beef")

        assert reply.outcome != "created"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.arguments) == ("first", "f00d")
        assert list(key.record().tasks) == ["first"]

    @pytest.mark.parametrize("strategy", [*REPLACING, "rerun"])
    def test_the_same_work_behind_the_same_key_is_not_done_again(
        self, key: Key, strategy: str
    ) -> None:
        key.publish("first", arguments="f00d", keep=LETTER_OF[State.COMPLETED])
        key.start("first")
        key.finish("first")

        reply = key.acquire("again", on_conflict=strategy, states=EVERY_STATE, arguments="f00d")

        assert reply.outcome != "created"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("first", State.COMPLETED)

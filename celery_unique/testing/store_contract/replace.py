"""Replacing and succeeding: who goes into limbo, who comes back, who is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import Acquired, LockStore, Started
from celery_unique.stores.record import LETTER_OF, Mark, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    about,
    advance,
    bring_to,
    claim,
    confirm,
    finish,
    held,
    publish,
    record_of,
    retry,
    run,
    start,
    task_of,
)

REPLACING = ["replace", "replace_except_schedule"]
NOT_STARTED = [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]


def stand_in(store: LockStore, key: str, task_id: str, **fields: object) -> Acquired:
    """A call that replaces what waits; its message is not out yet."""
    reply = store.acquire(key, claim(task_id, **{"on_conflict": "replace", **fields}))
    assert reply.outcome == "created"
    return reply


def succeed(store: LockStore, key: str, task_id: str, **fields: object) -> Acquired:
    """A call that is to run after what runs; its message is not out yet."""
    reply = store.acquire(key, claim(task_id, **{"on_conflict": "rerun", **fields}))
    assert reply.outcome == "created"
    return reply


def forget(store: LockStore, key: str, task_id: str) -> None:
    store.forget(key, task_id)
    store.flush()


def marks_of(store: LockStore, key: str) -> dict[str, tuple[str, str]]:
    return {i: (mark.kind, mark.by) for i, mark in record_of(store, key).marks.items()}


class ReplaceContract:
    # -- replace: the table, for every state of the holder -------------------

    @pytest.mark.parametrize("on_conflict", REPLACING)
    @pytest.mark.parametrize("state", NOT_STARTED)
    def test_a_call_that_replaces_puts_a_holder_that_has_not_started_into_limbo(
        self, store: LockStore, key: str, state: State, on_conflict: str
    ) -> None:
        bring_to(store, key, "first", state)
        before = task_of(store, key, "first")

        reply = store.acquire(key, claim("second", on_conflict=on_conflict))

        kept = before.eta if on_conflict == "replace_except_schedule" else 0
        assert reply == Acquired("created", None, reply.now, ("first",), "", kept)
        assert record_of(store, key).tasks == {
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
        self, store: LockStore, key: str, on_conflict: str
    ) -> None:
        run(store, key, "first")
        before = task_of(store, key, "first")

        reply = store.acquire(key, claim("second", on_conflict=on_conflict))

        assert reply.outcome == "rejected"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("first", State.ACTIVE)
        assert record_of(store, key).tasks == {
            "first": replace(before, duplicates=1, last_duplicate_at=reply.now)
        }

    @pytest.mark.parametrize("on_conflict", REPLACING)
    @pytest.mark.parametrize("state", FINAL)
    def test_a_call_that_replaces_is_admitted_beside_an_ended_holder(
        self, store: LockStore, key: str, state: State, on_conflict: str
    ) -> None:
        bring_to(store, key, "first", state)
        before = task_of(store, key, "first")

        reply = store.acquire(key, claim("second", states=EVERY_STATE, on_conflict=on_conflict))

        assert reply == Acquired("created", None, reply.now)
        assert task_of(store, key, "first") == before

    def test_one_active_holder_among_others_rejects_and_nothing_is_replaced(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "runs", states="")
        publish(store, key, "waits", states="")
        before = task_of(store, key, "waits")

        reply = store.acquire(key, claim("new", on_conflict="replace"))

        assert reply.outcome == "rejected"
        assert reply.holder is not None
        assert reply.holder.task_id == "runs"
        assert task_of(store, key, "waits") == before

    def test_every_holder_that_waits_is_replaced_and_named(
        self, store: LockStore, key: str
    ) -> None:
        for task_id in ("b", "a", "c"):
            publish(store, key, task_id, states="")
            advance(store, MINUTE)

        reply = stand_in(store, key, "new")

        assert reply.replaced == ("a", "b", "c")

    def test_what_the_call_does_not_count_is_not_replaced(self, store: LockStore, key: str) -> None:
        publish(store, key, "scheduled", delay_ms=10 * MINUTE)

        reply = stand_in(store, key, "new", states=LETTER_OF[State.AVAILABLE])

        assert reply.replaced == ()
        assert task_of(store, key, "scheduled").by == ""

    def test_a_holder_outside_the_calls_window_is_not_replaced(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "old")
        advance(store, 10 * MINUTE)

        reply = stand_in(store, key, "new", window_ms=5 * MINUTE)

        assert reply.replaced == ()
        assert task_of(store, key, "old").by == ""

    def test_a_released_holder_is_not_replaced(self, store: LockStore, key: str) -> None:
        publish(store, key, "old")
        store.release(key)

        assert stand_in(store, key, "new").replaced == ()

    @pytest.mark.parametrize("on_conflict", REPLACING)
    def test_a_call_with_the_id_of_the_task_it_would_replace_is_rejected(
        self, store: LockStore, key: str, on_conflict: str
    ) -> None:
        publish(store, key, "first")

        reply = store.acquire(key, claim("first", on_conflict=on_conflict))

        assert reply.outcome == "rejected"
        assert task_of(store, key, "first").by == ""

    # -- limbo ----------------------------------------------------------------

    def test_a_task_in_limbo_blocks_nobody_and_waits_at_the_gate(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")

        asked = store.acquire(key, claim("third"))
        gate = store.start(key, start("first"))

        assert asked.holder is not None
        assert asked.holder.task_id == "second"
        assert gate == Started("wait")

    @pytest.mark.parametrize("how", ["confirm", "start", "renew"])
    def test_the_replacement_is_published_and_what_it_stands_in_for_is_over(
        self, store: LockStore, key: str, how: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")

        if how == "confirm":
            confirm(store, key, "second")
        elif how == "start":
            store.start(key, start("second", mark_ms=QUEUE_LEASE))
        else:
            store.renew([held(key, "second")])

        record = record_of(store, key)
        assert list(record.tasks) == ["second"]
        assert record.marks == {
            "first": Mark("superseded", about(store.read(key)[1] + QUEUE_LEASE), "second")
        }
        assert store.start(key, start("first", "d2")) == Started(
            "superseded", mark="superseded", by="second"
        )

    def test_the_mark_of_a_superseded_task_outlives_its_message(
        self, store: LockStore, key: str
    ) -> None:
        """A message with an ETA far ahead is reached long after a queue lease."""
        publish(store, key, "first", delay_ms=30 * QUEUE_LEASE)
        stand_in(store, key, "second")
        confirm(store, key, "second")
        advance(store, 30 * QUEUE_LEASE)

        gate = store.start(key, start("first"))

        assert gate == Started("superseded", mark="superseded", by="second")

    def test_a_worker_that_holds_a_superseded_message_keeps_its_mark(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")
        confirm(store, key, "second")
        advance(store, QUEUE_LEASE - MINUTE)

        assert store.renew([held(key, "first")]) == [True]

        advance(store, QUEUE_LEASE - MINUTE)
        assert store.start(key, start("first")).verdict == "superseded"

    def test_the_mark_is_forgotten_when_its_message_was_reached(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")
        confirm(store, key, "second")

        forget(store, key, "first")

        assert marks_of(store, key) == {}
        assert list(record_of(store, key).tasks) == ["second"]

    def test_forget_leaves_tasks_alone(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        before = record_of(store, key)

        forget(store, key, "first")
        forget(store, key, "nobody")

        assert record_of(store, key) == before

    def test_a_publish_that_fails_brings_the_replaced_task_back(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        before = task_of(store, key, "first")
        stand_in(store, key, "second")

        assert store.give_back(key, "second", QUEUE_LEASE) is True

        record = record_of(store, key)
        assert record.tasks == {"first": replace(before, lease=about(before.lease))}
        assert marks_of(store, key) == {"second": ("withdrawn", "")}
        assert store.start(key, start("first")).verdict == "run"
        assert store.start(key, start("second", "d2")).verdict == "superseded"

    def test_a_task_that_is_brought_back_has_a_fresh_lease(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        advance(store, QUEUE_LEASE - MINUTE)
        stand_in(store, key, "second")

        store.give_back(key, "second", QUEUE_LEASE)

        assert task_of(store, key, "first").lease == about(store.read(key)[1] + QUEUE_LEASE)

    def test_a_replacement_whose_publisher_died_gives_way_after_its_grace(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")
        advance(store, GRACE)

        assert store.acquire(key, claim("third")).outcome == "duplicate"
        assert store.start(key, start("first")).verdict == "run"

    def test_a_replacement_that_is_revoked_brings_the_replaced_task_back(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")

        assert store.cancel(key, "second", QUEUE_LEASE) == "cancelled"

        assert store.start(key, start("first")).verdict == "run"

    def test_revoking_a_task_in_limbo_leaves_the_replacement_alone(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")

        assert store.cancel(key, "first", QUEUE_LEASE) == "cancelled"
        store.give_back(key, "second", QUEUE_LEASE)

        assert record_of(store, key).tasks == {}
        assert marks_of(store, key) == {"first": ("revoked", ""), "second": ("withdrawn", "")}

    def test_a_replacement_that_was_released_no_longer_holds_the_other_back(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second")

        store.release(key, "second")

        assert store.start(key, start("first")).verdict == "run"

    def test_helping_is_not_for_a_task_in_limbo(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        stand_in(store, key, "second")

        assert store.help(key, "first") == "again"
        assert store.help(key, "second") == "go"

    def test_the_same_attempt_asking_again_hears_what_it_replaces(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first", delay_ms=10 * MINUTE)
        before = stand_in(store, key, "second", on_conflict="replace_except_schedule")

        again = store.acquire(
            key, claim("second", on_conflict="replace_except_schedule", again=True)
        )

        assert again == replace(before, now=again.now)

    # -- chains of replacements ------------------------------------------------

    def test_the_last_of_a_chain_names_all_that_it_stands_in_for(
        self, store: LockStore, key: str
    ) -> None:
        """The publisher in the middle may die: then nobody else tells of the first."""
        publish(store, key, "a")
        stand_in(store, key, "b")

        reply = stand_in(store, key, "c")

        assert reply.replaced == ("a", "b")

    def test_the_last_of_a_chain_ends_all_that_came_before(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a")
        stand_in(store, key, "b")
        stand_in(store, key, "c")

        confirm(store, key, "c")

        assert list(record_of(store, key).tasks) == ["c"]
        assert marks_of(store, key) == {"a": ("superseded", "c"), "b": ("superseded", "c")}

    def test_a_failed_replacement_in_the_middle_hands_on_what_it_replaced(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a")
        stand_in(store, key, "b")
        stand_in(store, key, "c")

        store.give_back(key, "b", QUEUE_LEASE)

        assert task_of(store, key, "a").by == "c"
        assert store.start(key, start("a")) == Started("wait")
        confirm(store, key, "c")
        assert marks_of(store, key) == {"a": ("superseded", "c"), "b": ("withdrawn", "")}

    def test_a_replacement_in_the_middle_that_lapses_hands_on_what_it_replaced(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a")
        stand_in(store, key, "b", grace_ms=2 * MINUTE)
        stand_in(store, key, "c", grace_ms=10 * MINUTE)
        advance(store, 5 * MINUTE)

        gate = store.start(key, start("a"))

        assert gate == Started("wait")
        confirm(store, key, "c")
        assert marks_of(store, key)["a"] == ("superseded", "c")

    def test_a_failed_last_of_a_chain_brings_only_the_one_before_it_back(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a")
        stand_in(store, key, "b")
        stand_in(store, key, "c")

        store.give_back(key, "c", QUEUE_LEASE)

        assert store.start(key, start("a")) == Started("wait")
        assert task_of(store, key, "b").by == ""
        store.give_back(key, "b", QUEUE_LEASE)
        assert store.start(key, start("a")).verdict == "run"

    def test_a_confirm_that_comes_after_it_was_replaced_changes_only_itself(
        self, store: LockStore, key: str
    ) -> None:
        """Confirmations are one way: the next call may be faster."""
        publish(store, key, "a")
        stand_in(store, key, "b")
        stand_in(store, key, "c")

        confirm(store, key, "b")

        assert marks_of(store, key) == {"a": ("superseded", "b")}
        assert task_of(store, key, "b").by == "c"
        assert store.start(key, start("b")) == Started("wait")

    # -- a replacement that ends before the store hears that it is published --------

    @pytest.mark.parametrize("keep", ["", "cdx"])
    @pytest.mark.parametrize("state", [State.COMPLETED, State.DISCARDED])
    def test_a_replacement_that_ran_unknown_to_the_store_ends_what_it_replaced(
        self, store: LockStore, key: str, state: State, keep: str
    ) -> None:
        """The store did not answer at the confirm, nor at the gate."""
        publish(store, key, "first")
        stand_in(store, key, "second", keep=keep)

        store.finish(key, finish("second", state=state))

        assert marks_of(store, key) == {"first": ("superseded", "second")}

    @pytest.mark.parametrize("keep", ["", "cdx"])
    @pytest.mark.parametrize("settle_later", [False, True])
    def test_a_replacement_that_a_worker_revoked_brings_the_replaced_task_back(
        self, store: LockStore, key: str, settle_later: bool, keep: str
    ) -> None:
        publish(store, key, "first")
        stand_in(store, key, "second", keep=keep)

        store.finish(key, finish("second", state=State.CANCELLED, settle_later=settle_later))

        assert store.start(key, start("first")).verdict == "run"

    # -- schedules ---------------------------------------------------------------

    def test_the_holders_schedule_is_kept_whatever_delay_the_call_brings(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first", delay_ms=10 * MINUTE)
        eta = task_of(store, key, "first").eta
        advance(store, MINUTE)

        reply = stand_in(
            store, key, "second", on_conflict="replace_except_schedule", delay_ms=30 * MINUTE
        )

        assert reply.eta == task_of(store, key, "second").eta == eta

    def test_a_schedule_that_has_passed_is_not_kept(self, store: LockStore, key: str) -> None:
        publish(store, key, "first", delay_ms=10 * MINUTE)
        advance(store, 11 * MINUTE)

        reply = stand_in(
            store, key, "second", on_conflict="replace_except_schedule", delay_ms=5 * MINUTE
        )

        assert reply.eta == reply.now + 5 * MINUTE

    def test_replace_takes_the_calls_own_schedule(self, store: LockStore, key: str) -> None:
        publish(store, key, "first", delay_ms=10 * MINUTE)

        later = stand_in(store, key, "second", delay_ms=30 * MINUTE)
        at_once = stand_in(store, key, "third")

        assert (later.eta, at_once.eta) == (later.now + 30 * MINUTE, 0)

    # -- max_wait ------------------------------------------------------------------

    def test_a_task_is_not_pushed_beyond_max_wait_from_the_first(
        self, store: LockStore, key: str
    ) -> None:
        asked = {"delay_ms": 10 * MINUTE, "max_wait_ms": 25 * MINUTE}
        first = store.acquire(key, claim("t0", **asked))
        confirm(store, key, "t0")
        etas = []
        for number in range(1, 5):
            advance(store, 6 * MINUTE)
            reply = stand_in(store, key, f"t{number}", **asked)
            confirm(store, key, f"t{number}")
            etas.append(reply.eta)

        latest = first.now + 25 * MINUTE
        expected = [first.now + 16 * MINUTE, first.now + 22 * MINUTE, latest, latest]
        assert etas == [about(eta) for eta in expected]
        assert task_of(store, key, "t4").since == first.now

    @pytest.mark.parametrize("state", [State.PENDING, State.AVAILABLE])
    def test_a_task_that_is_due_and_was_pushed_back_for_max_wait_is_not_replaced(
        self, store: LockStore, key: str, state: State
    ) -> None:
        """In a slow queue, calls would else replace each other for ever."""
        bring_to(store, key, "t0", State.AVAILABLE)
        advance(store, 10 * MINUTE)
        asked = {"max_wait_ms": 9 * MINUTE, "delay_ms": 5 * MINUTE, "grace_ms": 30 * MINUTE}
        if state is State.PENDING:
            store.acquire(key, claim("t1", on_conflict="replace"))
            advance(store, MINUTE)
        due = "t1" if state is State.PENDING else "t0"

        first = stand_in(store, key, "t2", **asked)
        second = stand_in(store, key, "t3", **asked)

        assert (first.replaced, first.after) == ((), due)
        assert first.eta == first.now + 5 * MINUTE
        assert (second.replaced, second.after) == (("t2",), due)
        confirm(store, key, "t3")
        assert store.start(key, start("t3", "d3")) == Started("wait")
        assert store.start(key, start(due, "d0")).verdict == "run"

    def test_a_task_that_waits_for_its_eta_is_brought_forward_when_max_wait_has_passed(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first", delay_ms=60 * MINUTE)
        advance(store, 10 * MINUTE)

        reply = stand_in(store, key, "second", delay_ms=60 * MINUTE, max_wait_ms=5 * MINUTE)

        assert (reply.replaced, reply.after, reply.eta) == (("first",), "", 0)

    def test_a_task_that_waits_for_its_retry_is_replaced_whatever_max_wait(
        self, store: LockStore, key: str
    ) -> None:
        bring_to(store, key, "first", State.RETRYABLE)
        advance(store, 10 * MINUTE)

        reply = stand_in(store, key, "second", max_wait_ms=5 * MINUTE)

        assert (reply.replaced, reply.after) == (("first",), "")

    def test_the_first_call_alone_is_not_bounded(self, store: LockStore, key: str) -> None:
        reply = store.acquire(
            key,
            claim("first", on_conflict="replace", delay_ms=60 * MINUTE, max_wait_ms=MINUTE),
        )

        assert reply.eta == reply.now + 60 * MINUTE

    def test_max_wait_begins_anew_once_a_task_has_started(self, store: LockStore, key: str) -> None:
        until_start = "psw"
        publish(store, key, "first", states=until_start)
        advance(store, 20 * MINUTE)
        store.start(key, start("first"))

        second = stand_in(
            store,
            key,
            "second",
            states=until_start,
            delay_ms=10 * MINUTE,
            max_wait_ms=MINUTE,
        )

        assert second.replaced == ()
        assert second.eta == second.now + 10 * MINUTE
        assert task_of(store, key, "second").since == 0

    # -- rerun -------------------------------------------------------------------

    def test_a_call_that_reruns_becomes_the_successor_of_an_active_holder(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")

        reply = store.acquire(key, claim("second", on_conflict="rerun"))

        assert reply == Acquired("created", None, reply.now, (), "first", 0)
        assert task_of(store, key, "second") == TaskEntry(
            "p", reply.now, reply.now + GRACE, "shop.rebuild", after="first"
        )

    @pytest.mark.parametrize("state", [*NOT_STARTED, *FINAL])
    def test_a_call_that_reruns_is_a_duplicate_of_any_other_holder(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)

        reply = store.acquire(key, claim("second", states=EVERY_STATE, on_conflict="rerun"))

        assert reply.outcome == "duplicate"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("first", state)

    def test_a_successor_waits_at_the_gate_until_its_predecessor_ends(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        succeed(store, key, "second")
        confirm(store, key, "second")
        before = store.start(key, start("second", "d2"))
        store.finish(key, finish("first", "d1"))

        after = store.start(key, start("second", "d2"))

        assert (before, after.verdict, after.lost) == (Started("wait"), "run", False)
        assert task_of(store, key, "second").after == ""

    def test_a_successor_starts_while_its_predecessor_settles(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        succeed(store, key, "second")
        confirm(store, key, "second")

        store.finish(key, finish("first", "d1", settle_later=True))

        assert store.start(key, start("second", "d2")).verdict == "run"

    def test_a_successor_waits_for_the_retry_of_its_predecessor(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        succeed(store, key, "second")
        confirm(store, key, "second")

        retry(store, key, "first", "d1")

        assert store.start(key, start("second", "d2")) == Started("wait")
        assert store.start(key, start("first", "d3")).verdict == "run"

    def test_a_successor_starts_when_the_lease_of_its_predecessor_has_lapsed(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        store.start(key, start("first", lease_ms=RUN_LEASE))  # acknowledged early
        succeed(store, key, "second")
        confirm(store, key, "second")
        # The worker is killed.
        advance(store, RUN_LEASE)

        assert store.start(key, start("second", "d2")).verdict == "run"

    def test_a_successor_starts_when_its_predecessor_was_released(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        succeed(store, key, "second")
        confirm(store, key, "second")

        store.release(key, "first")

        assert store.start(key, start("second", "d2")).verdict == "run"

    def test_a_newer_successor_takes_the_place_of_a_waiting_one(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        succeed(store, key, "second")
        confirm(store, key, "second")

        reply = succeed(store, key, "third")
        confirm(store, key, "third")

        assert (reply.replaced, reply.after) == (("second",), "first")
        assert sorted(record_of(store, key).tasks) == ["first", "third"]
        assert marks_of(store, key) == {"second": ("superseded", "third")}

    def test_a_successor_that_could_not_be_published_leaves_the_older_one(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        succeed(store, key, "second")
        confirm(store, key, "second")
        succeed(store, key, "third")

        store.give_back(key, "third", QUEUE_LEASE)

        assert store.start(key, start("second", "d2")) == Started("wait")
        store.finish(key, finish("first", "d1"))
        assert store.start(key, start("second", "d2")).verdict == "run"

    def test_a_successor_whose_predecessor_has_ended_is_what_blocks(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        succeed(store, key, "second")
        confirm(store, key, "second")
        store.finish(key, finish("first"))

        reply = store.acquire(key, claim("third", on_conflict="rerun"))

        assert reply.outcome == "duplicate"
        assert reply.holder is not None
        assert reply.holder.task_id == "second"

    def test_a_waiting_successor_can_be_replaced_once_its_predecessor_has_ended(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        succeed(store, key, "second")
        confirm(store, key, "second")
        store.finish(key, finish("first"))

        assert stand_in(store, key, "third").replaced == ("second",)

    # -- a task that calls itself from its own body -------------------------------

    @pytest.mark.parametrize("on_conflict", ["ignore", "reject", *REPLACING, "rerun"])
    def test_a_task_that_calls_itself_is_its_own_successor(
        self, store: LockStore, key: str, on_conflict: str
    ) -> None:
        run(store, key, "first")

        reply = store.acquire(
            key,
            claim("second", on_conflict=on_conflict, parent="first", delay_ms=10 * MINUTE),
        )

        eta = reply.now + 10 * MINUTE
        assert reply == Acquired("created", None, reply.now, (), "first", eta)

    def test_a_second_call_from_the_same_body_takes_the_place_of_the_first(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        publish(store, key, "second", parent="first")

        reply = store.acquire(key, claim("third", parent="first"))

        assert (reply.replaced, reply.after) == (("second",), "first")

    def test_another_call_meets_the_running_task_and_not_its_successor(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        publish(store, key, "second", parent="first")

        reply = store.acquire(key, claim("third"))

        assert reply.holder is not None
        assert reply.holder.task_id == "first"

    def test_a_parent_with_another_key_is_no_predecessor(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")

        reply = store.acquire(key, claim("second", parent="somebody else"))

        assert reply.outcome == "duplicate"

    # -- behind an idempotency key -----------------------------------------------------------

    @pytest.mark.parametrize("strategy", [*REPLACING, "rerun"])
    @pytest.mark.parametrize("state", ["waits", "runs", "is done"])
    def test_other_work_behind_the_same_key_is_neither_replaced_nor_followed(
        self, store: LockStore, key: str, strategy: str, state: str
    ) -> None:
        publish(store, key, "first", arguments="f00d", keep=LETTER_OF[State.COMPLETED])
        if state != "waits":
            store.start(key, start("first"))
        if state == "is done":
            store.finish(key, finish("first"))

        reply = store.acquire(
            key, claim("other", on_conflict=strategy, states=EVERY_STATE, arguments="beef")
        )

        assert reply.outcome != "created"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.arguments) == ("first", "f00d")
        assert list(record_of(store, key).tasks) == ["first"]

    @pytest.mark.parametrize("strategy", [*REPLACING, "rerun"])
    def test_the_same_work_behind_the_same_key_is_not_done_again(
        self, store: LockStore, key: str, strategy: str
    ) -> None:
        publish(store, key, "first", arguments="f00d", keep=LETTER_OF[State.COMPLETED])
        store.start(key, start("first"))
        store.finish(key, finish("first"))

        reply = store.acquire(
            key, claim("again", on_conflict=strategy, states=EVERY_STATE, arguments="f00d")
        )

        assert reply.outcome != "created"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("first", State.COMPLETED)

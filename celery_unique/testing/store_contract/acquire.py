"""acquire and acquire_many: which call is admitted, and which holder a duplicate gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import Acquired, Holder, LockStore
from celery_unique.stores.record import LETTER_OF, Mark, Record, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    SUCCESS,
    UNTIL_DONE,
    Key,
    about,
    claim,
    fresh_key,
    task_of,
)

#: Strategy and ``join`` of calls whose reply names the holder.
NAME_THE_HOLDER = [("ignore", ""), ("reject", ""), ("rerun", ""), ("ignore", "message")]


class AcquireContract:
    def test_acquire_admits_a_call_when_the_key_is_free(self, key: Key) -> None:
        before = key.now()

        reply = key.acquire("first")

        assert reply == Acquired("created", None, about(before))
        assert key.record() == Record(
            tasks={
                "first": TaskEntry(
                    state="p",
                    created_at=reply.now,
                    lease=reply.now + GRACE,
                    task_name="shop.rebuild",
                )
            }
        )

    def test_acquire_records_the_callers_policy(self, key: Key) -> None:
        asked = claim(
            "first", window_ms=7 * MINUTE, delay_ms=3 * MINUTE, keep=SUCCESS, arguments="f00d"
        )

        reply = key.store.acquire(key.text, asked)

        assert key.task("first") == TaskEntry(
            state="p",
            created_at=reply.now,
            lease=reply.now + GRACE,
            task_name="shop.rebuild",
            window_ends=reply.now + 7 * MINUTE,
            eta=reply.now + 3 * MINUTE,
            keep=SUCCESS,
            arguments="f00d",
        )

    def test_acquire_records_how_long_an_end_is_kept_beyond_the_window(self, key: Key) -> None:
        asked = claim("first", window_ms=7 * MINUTE, keep_ms=9 * MINUTE, keep=SUCCESS)

        reply = key.store.acquire(key.text, asked)

        assert key.task("first") == TaskEntry(
            state="p",
            created_at=reply.now,
            lease=reply.now + GRACE,
            task_name="shop.rebuild",
            window_ends=reply.now + 9 * MINUTE,
            keep=SUCCESS,
        )

    def test_acquire_returns_the_holder_when_the_key_is_held(self, key: Key) -> None:
        created = key.acquire("first", arguments="f00d")

        reply = key.acquire("second")

        holder = Holder("first", State.PENDING, created.now, created.now + GRACE, "f00d")
        assert reply == Acquired("duplicate", holder, about(created.now))

    def test_acquire_rejects_a_duplicate_whose_policy_says_so(self, key: Key) -> None:
        created = key.acquire("first")

        reply = key.acquire("second", on_conflict="reject")

        holder = Holder("first", State.PENDING, created.now, created.now + GRACE)
        assert reply == Acquired("rejected", holder, about(created.now))

    @pytest.mark.parametrize(("on_conflict", "join"), NAME_THE_HOLDER)
    def test_a_duplicate_hears_the_eta_of_a_holder_that_is_not_confirmed_yet(
        self, key: Key, on_conflict: str, join: str
    ) -> None:
        created = key.acquire("first", delay_ms=3 * MINUTE)

        reply = key.acquire("second", on_conflict=on_conflict, join=join)

        lease, eta = created.now + GRACE, created.now + 3 * MINUTE
        assert reply.holder == Holder("first", State.PENDING, created.now, lease, eta=eta)

    def test_a_duplicate_hears_the_eta_of_a_holder_beside_another_task(self, key: Key) -> None:
        key.run("active")
        created = key.acquire("second", states="psw", delay_ms=3 * MINUTE)

        reply = key.acquire("third", states="psw")

        lease, eta = created.now + GRACE, created.now + 3 * MINUTE
        assert reply.holder == Holder("second", State.PENDING, created.now, lease, eta=eta)

    @pytest.mark.parametrize("on_conflict", ["ignore", "reject"])
    def test_a_duplicate_is_counted_and_leaves_nothing_else(
        self, key: Key, on_conflict: str
    ) -> None:
        key.publish("first")
        before = key.record()
        key.advance(MINUTE)

        reply = key.acquire("second", on_conflict=on_conflict)

        counted = replace(before.tasks["first"], duplicates=1, last_duplicate_at=reply.now)
        assert key.record() == replace(before, tasks={"first": counted})

    def test_a_key_does_not_block_another_key(self, key: Key) -> None:
        key.acquire("first")

        reply = key.store.acquire(fresh_key(), claim("second"))

        assert reply.outcome == "created"

    # -- states -------------------------------------------------------------

    @pytest.mark.parametrize("state", list(State))
    def test_a_call_that_names_the_state_is_a_duplicate(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        recorded = key.task("first")

        reply = key.acquire("second", states=LETTER_OF[state])

        holder = Holder("first", state, recorded.created_at, recorded.lease, eta=recorded.eta)
        assert reply == Acquired("duplicate", holder, about(recorded.created_at))

    @pytest.mark.parametrize("state", [state for state in State if state is not State.PENDING])
    def test_a_call_that_names_every_other_state_is_admitted(self, key: Key, state: State) -> None:
        key.bring_to("first", state)

        reply = key.acquire("second", states=EVERY_STATE.replace(LETTER_OF[state], ""))

        assert reply.outcome == "created"
        assert sorted(key.record().tasks) == ["first", "second"]

    def test_a_call_that_names_no_state_is_admitted(self, key: Key) -> None:
        key.acquire("first")

        reply = key.acquire("second", states="")

        assert reply.outcome == "created"

    @pytest.mark.parametrize(
        ("delay_ms", "state"), [(0, State.AVAILABLE), (10 * MINUTE, State.SCHEDULED)]
    )
    def test_a_pending_task_counts_as_the_state_it_is_about_to_enter(
        self, key: Key, delay_ms: int, state: State
    ) -> None:
        key.acquire("first", delay_ms=delay_ms)

        reply = key.acquire("second", states=LETTER_OF[state])

        assert reply.outcome == "duplicate"
        assert reply.holder is not None
        assert reply.holder.state is State.PENDING

    @pytest.mark.parametrize(
        ("delay_ms", "state"), [(0, State.SCHEDULED), (10 * MINUTE, State.AVAILABLE)]
    )
    def test_a_pending_task_does_not_count_as_a_state_it_will_not_enter_next(
        self, key: Key, delay_ms: int, state: State
    ) -> None:
        key.acquire("first", delay_ms=delay_ms)

        reply = key.acquire("second", states=LETTER_OF[state])

        assert reply.outcome == "created"

    def test_a_scheduled_task_becomes_available_when_its_eta_comes(self, key: Key) -> None:
        key.publish("first", delay_ms=10 * MINUTE)
        key.advance(10 * MINUTE)

        as_scheduled = key.acquire("second", states=LETTER_OF[State.SCHEDULED])
        as_available = key.acquire(
            "third", states=LETTER_OF[State.AVAILABLE], window_ms=QUEUE_LEASE
        )

        assert as_scheduled.outcome == "created"
        assert as_available.outcome == "duplicate"

    # -- windows and leases -------------------------------------------------

    @pytest.mark.parametrize(
        "state", [State.SCHEDULED, State.AVAILABLE, State.ACTIVE, State.COMPLETED]
    )
    def test_a_call_is_admitted_once_its_own_window_has_passed(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)
        asked = claim("second", states=EVERY_STATE, window_ms=4 * MINUTE)
        key.advance(3 * MINUTE)
        within = key.store.acquire(key.text, asked)
        key.advance(MINUTE)

        after = key.store.acquire(key.text, asked)

        assert (within.outcome, after.outcome) == ("duplicate", "created")

    def test_the_holders_window_does_not_end_what_another_policy_asks(self, key: Key) -> None:
        key.publish("first", window_ms=4 * MINUTE)
        key.advance(5 * MINUTE)

        reply = key.acquire("second")

        assert reply.outcome == "duplicate"

    def test_a_lock_whose_publisher_died_is_free_after_the_grace(self, key: Key) -> None:
        key.acquire("first")
        key.advance(GRACE - MINUTE)
        within = key.acquire("second")
        key.advance(MINUTE)

        after = key.acquire("third")

        assert (within.outcome, after.outcome) == ("duplicate", "created")
        assert list(key.record().tasks) == ["third"]

    def test_a_task_that_nobody_renews_blocks_until_its_lease_ends(self, key: Key) -> None:
        key.publish("first")
        key.advance(QUEUE_LEASE - MINUTE)
        within = key.acquire("second")
        key.advance(MINUTE)

        after = key.acquire("third")

        assert (within.outcome, after.outcome) == ("duplicate", "created")

    # -- several tasks of one key -------------------------------------------

    def test_the_newest_of_several_holders_is_named(self, key: Key) -> None:
        for task_id in ("first", "second", "third"):
            key.publish(task_id, states="")
            key.advance(MINUTE)

        reply = key.acquire("fourth")

        assert reply.holder is not None
        assert reply.holder.task_id == "third"

    def test_an_active_holder_is_named_before_a_newer_one(self, key: Key) -> None:
        for task_id in ("first", "second", "third"):
            key.publish(task_id, states="")
            key.advance(MINUTE)
        key.start("second")

        reply = key.acquire("fourth")

        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("second", State.ACTIVE)

    def test_only_the_task_that_is_named_counts_the_duplicate(self, key: Key) -> None:
        key.publish("first", states="")
        key.advance(MINUTE)
        key.publish("second", states="")

        key.acquire("third")

        counts = {i: task.duplicates for i, task in key.record().tasks.items()}
        assert counts == {"first": 0, "second": 1}

    # -- the caller's own id ------------------------------------------------

    @pytest.mark.parametrize("state", [state for state in State if LETTER_OF[state] in UNTIL_DONE])
    def test_a_new_call_with_a_live_tasks_own_id_is_its_duplicate_whatever_states_it_names(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)

        reply = key.acquire("first", states="")

        assert reply.outcome == "duplicate"
        assert reply.holder is not None
        assert reply.holder.task_id == "first"

    def test_a_new_call_with_an_ended_tasks_id_begins_again_and_remembers_the_old_message(
        self, key: Key
    ) -> None:
        key.bring_to("first", State.COMPLETED)

        reply = key.acquire("first")

        assert reply.outcome == "created"
        assert key.record().tasks == {
            "first": TaskEntry("p", reply.now, reply.now + GRACE, "shop.rebuild", flags="m")
        }

    def test_a_new_call_with_a_marked_id_forgets_the_mark_and_remembers_the_old_message(
        self, key: Key
    ) -> None:
        key.acquire("first")
        key.give_back("first")

        reply = key.acquire("first")

        assert reply.outcome == "created"
        created = TaskEntry("p", reply.now, reply.now + GRACE, "shop.rebuild", flags="m")
        assert key.record() == Record(tasks={"first": created})

    def test_a_duplicate_keeps_the_mark_of_its_own_id(self, key: Key) -> None:
        key.acquire("first")
        key.give_back("first")
        key.publish("second")

        reply = key.acquire("first")

        assert reply.outcome == "duplicate"
        assert list(key.record().marks) == ["first"]

    def test_the_same_attempt_asking_again_is_admitted_and_its_grace_begins_anew(
        self, key: Key
    ) -> None:
        first = key.acquire("first")
        key.advance(MINUTE)

        again = key.acquire("first", again=True)

        assert again == Acquired("created", None, about(first.now + MINUTE))
        assert key.record().tasks == {
            "first": TaskEntry("p", first.now, again.now + GRACE, "shop.rebuild")
        }

    @pytest.mark.parametrize("state", [state for state in State if state is not State.PENDING])
    def test_the_same_attempt_asking_again_changes_nothing_once_it_is_published(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)
        before = key.record()

        again = key.acquire("first", again=True)

        assert again.outcome == "created"
        assert key.record() == before

    def test_the_same_attempt_asking_again_creates_what_its_lost_first_act_did_not(
        self, key: Key
    ) -> None:
        reply = key.acquire("first", again=True)

        assert reply.outcome == "created"
        assert key.record().tasks == {
            "first": TaskEntry("p", reply.now, reply.now + GRACE, "shop.rebuild")
        }

    def test_the_same_attempt_asking_again_is_a_duplicate_when_another_took_the_key(
        self, key: Key
    ) -> None:
        key.acquire("first")
        key.advance(GRACE)
        key.publish("second")

        again = key.acquire("first", again=True)

        assert again.outcome == "duplicate"
        assert again.holder is not None
        assert again.holder.task_id == "second"

    def test_the_same_attempt_asking_again_does_not_undo_the_end_of_its_copy(
        self, key: Key
    ) -> None:
        key.acquire("first")
        assert key.help("first") == "go"
        key.confirm("first")
        key.start("first")
        key.finish("first")
        key.settle("first")
        before = key.record()

        again = key.acquire("first", again=True)

        assert again.outcome == "created"
        assert key.record() == before
        assert key.start("first", "d2").verdict == "done"

    def test_the_same_attempt_asking_again_does_not_undo_a_revoke(self, key: Key) -> None:
        key.acquire("first")
        key.cancel("first")

        again = key.acquire("first", again=True)

        assert again.outcome == "created"
        assert key.record() == Record(
            marks={"first": Mark("revoked", about(again.now + QUEUE_LEASE))}
        )

    def test_the_same_attempt_asking_again_takes_back_its_withdrawal(self, key: Key) -> None:
        key.acquire("first")
        key.give_back("first")

        again = key.acquire("first", again=True)

        assert again.outcome == "created"
        created = TaskEntry("p", again.now, again.now + GRACE, "shop.rebuild", flags="m")
        assert key.record() == Record(tasks={"first": created})

    # -- several claims at once ---------------------------------------------

    def test_acquire_many_answers_in_the_order_of_the_claims(self, key: Key) -> None:
        other = fresh_key()

        replies = key.store.acquire_many(
            [
                (key.text, claim("first")),
                (other, claim("second")),
                (key.text, claim("third")),
                (other, claim("fourth", on_conflict="reject")),
            ]
        )

        now = key.now()
        first = key.task("first").created_at
        second = task_of(key.store, other, "second").created_at
        assert replies == [
            Acquired("created", None, first),
            Acquired("created", None, second),
            Acquired("duplicate", Holder("first", State.PENDING, first, first + GRACE), about(now)),
            Acquired(
                "rejected", Holder("second", State.PENDING, second, second + GRACE), about(now)
            ),
        ]

    def test_acquire_many_of_nothing_answers_nothing(self, store: LockStore) -> None:
        assert store.acquire_many([]) == []

    def test_a_retried_task_still_counts_its_duplicates(self, key: Key) -> None:
        key.run("first")
        key.acquire("second")
        key.retry("first")

        key.acquire("third")

        assert key.task("first").duplicates == 2

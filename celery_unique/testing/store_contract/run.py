"""start, renew and retry: a worker and the messages it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import LockStore, Started
from celery_unique.stores.record import Mark, Record, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    SUCCESS,
    about,
    advance,
    bring_to,
    claim,
    confirm,
    finish,
    fresh_key,
    held,
    now_of,
    publish,
    record_of,
    retry,
    run,
    running,
    settle,
    start,
    task_of,
)

FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]


class RunContract:
    # -- start --------------------------------------------------------------

    @pytest.mark.parametrize(
        "state", [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
    )
    def test_start_makes_a_task_that_waits_active(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = task_of(store, key, "first")
        now = now_of(store)

        started = store.start(key, start("first", "d9"))

        assert started == Started("run", started.token, lost=False)
        assert record_of(store, key) == Record(
            token=started.token,
            tasks={
                "first": replace(
                    before,
                    state="r",
                    delivery="d9",
                    delivery_lease=about(now + RUN_LEASE),
                    lease=about(now + QUEUE_LEASE),
                    token=started.token,
                )
            },
        )

    def test_start_shortens_the_lock_lease_once_the_message_is_acknowledged(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")

        store.start(key, start("first", lease_ms=RUN_LEASE))

        assert task_of(store, key, "first").lease == about(now_of(store) + RUN_LEASE)

    def test_the_token_is_the_stores_clock_in_microseconds(
        self, store: LockStore, key: str
    ) -> None:
        now_us = now_of(store) * 1000

        token = run(store, key, "first").token

        assert token == pytest.approx(now_us, abs=MINUTE * 1000)

    def test_every_run_of_a_key_gets_a_larger_token(self, store: LockStore, key: str) -> None:
        tokens = [run(store, key, f"task{i}", states="").token for i in range(20)]

        assert tokens == sorted(set(tokens))

    def test_tokens_grow_although_the_record_was_forgotten(
        self, store: LockStore, key: str
    ) -> None:
        first = run(store, key, "first").token
        store.finish(key, finish("first"))

        second = run(store, key, "second").token

        assert second > first

    def test_starting_the_same_delivery_twice_is_as_once(self, store: LockStore, key: str) -> None:
        first = run(store, key, "first", "d1")
        before = record_of(store, key)

        again = store.start(key, start("first", "d1"))

        assert again == first
        assert record_of(store, key) == before

    def test_another_delivery_waits_while_the_first_one_lives(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        before = task_of(store, key, "first")
        advance(store, RUN_LEASE - MINUTE)

        second = store.start(key, start("first", "d2"))

        assert second == Started("wait")
        assert task_of(store, key, "first") == replace(before, flags="m")

    def test_another_delivery_takes_over_once_the_first_ones_lease_has_passed(
        self, store: LockStore, key: str
    ) -> None:
        first = run(store, key, "first", "d1")
        before = task_of(store, key, "first")
        advance(store, RUN_LEASE)
        now = now_of(store)

        second = store.start(key, start("first", "d2"))

        assert second == Started("run", second.token, lost=False)
        assert second.token > first.token
        assert task_of(store, key, "first") == replace(
            before,
            delivery="d2",
            delivery_lease=about(now + RUN_LEASE),
            lease=about(now + QUEUE_LEASE),
            token=second.token,
            flags="m",
        )

    def test_another_delivery_waits_while_the_first_one_stores_its_result(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))

        second = store.start(key, start("first", "d2"))

        assert second == Started("wait")
        assert set(task_of(store, key, "first").flags) == {"e", "m"}

    def test_another_delivery_runs_when_the_first_one_died_before_its_result_was_stored(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        advance(store, RUN_LEASE)

        second = store.start(key, start("first", "d2"))

        assert second == Started("run", second.token, lost=False)
        task = task_of(store, key, "first")
        assert (task.state, task.delivery, task.flags) == ("r", "d2", "m")

    @pytest.mark.parametrize("state", FINAL)
    def test_a_kept_task_is_not_run_again(self, store: LockStore, key: str, state: State) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        assert store.start(key, start("first", "d2")) == Started("done")
        assert record_of(store, key) == before

    def test_a_task_with_a_done_mark_is_not_run_again(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        settle(store, key, "first", "d1", mark_done=True)
        before = record_of(store, key)

        assert store.start(key, start("first", "d2")) == Started("done")
        assert record_of(store, key) == before

    def test_a_withdrawn_task_is_superseded(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.give_back(key, "first", QUEUE_LEASE)
        before = record_of(store, key)

        assert store.start(key, start("first")) == Started("superseded", mark="withdrawn")
        assert record_of(store, key) == before

    def test_a_revoked_task_is_superseded(self, store: LockStore, key: str) -> None:
        store.cancel(key, "first", QUEUE_LEASE)
        before = record_of(store, key)

        assert store.start(key, start("first")) == Started("superseded", mark="revoked")
        assert record_of(store, key) == before

    def test_a_task_without_a_record_runs_and_is_recorded_from_its_header(
        self, store: LockStore, key: str
    ) -> None:
        now = now_of(store)
        created_at = now - 30 * MINUTE

        started = store.start(
            key,
            start(
                "first",
                created_at=created_at,
                window_ms=45 * MINUTE,
                keep=SUCCESS,
                arguments="f00d",
            ),
        )

        assert started == Started("run", started.token, lost=True)
        assert record_of(store, key) == Record(
            token=started.token,
            tasks={
                "first": TaskEntry(
                    state="r",
                    created_at=created_at,
                    # Until it is renewed: it may be a start that timed out and was carried
                    # out after the task's end, and then nobody will ever give it back.
                    lease=about(now + RUN_LEASE),
                    task_name="shop.rebuild",
                    window_ends=created_at + 45 * MINUTE,
                    keep=SUCCESS,
                    delivery="d1",
                    delivery_lease=about(now + RUN_LEASE),
                    token=started.token,
                    arguments="f00d",
                )
            },
        )

    def test_a_task_without_a_record_or_a_time_in_its_header_was_created_now(
        self, store: LockStore, key: str
    ) -> None:
        now = now_of(store)

        store.start(key, start("first", window_ms=45 * MINUTE))

        task = task_of(store, key, "first")
        assert task.created_at == about(now)
        assert task.window_ends == task.created_at + 45 * MINUTE

    def test_a_task_whose_lease_lapsed_runs_and_says_so(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        advance(store, QUEUE_LEASE)

        started = store.start(key, start("first"))

        assert started == Started("run", started.token, lost=True)

    def test_a_task_whose_lease_lapsed_runs_beside_the_next_one(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        advance(store, QUEUE_LEASE)
        publish(store, key, "second")

        started = store.start(key, start("first"))

        assert (started.verdict, started.lost) == ("run", True)
        assert sorted(record_of(store, key).tasks) == ["first", "second"]

    # -- renew: a body that runs --------------------------------------------

    def test_renew_extends_both_leases_of_the_running_delivery(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        before = task_of(store, key, "first")
        advance(store, RUN_LEASE - MINUTE)
        now = now_of(store)

        replies = store.renew([running(key, "first", "d1")])

        assert replies == [True]
        assert task_of(store, key, "first") == replace(
            before, lease=about(now + QUEUE_LEASE), delivery_lease=about(now + RUN_LEASE)
        )

    def test_a_message_that_may_come_back_while_it_runs_is_over_when_it_does(
        self, store: LockStore, key: str
    ) -> None:
        """A worker that stops may not hear that a process of its pool has taken a task."""
        run(store, key, "first", "d1")

        replies = store.renew([running(key, "first", "d1", copies=True)])

        assert replies == [True]
        assert store.finish(key, finish("first", "d1")).settle
        store.settle(key, finish("first", "d1"), mark_done=False)
        store.flush()
        assert store.start(key, start("first", "d2")).verdict == "done"

    def test_a_message_that_may_come_back_is_over_after_a_retry_too(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        store.renew([running(key, "first", "d1", copies=True)])
        store.retry(key, "first", "d1", QUEUE_LEASE, copies=False)
        store.flush()
        assert store.start(key, start("first", "d2")).verdict == "run"

        assert store.finish(key, finish("first", "d2")).settle
        store.settle(key, finish("first", "d2"), mark_done=False)
        store.flush()
        assert store.start(key, start("first", "d1 once more")).verdict == "done"

    def test_renew_extends_an_ending_task(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        advance(store, RUN_LEASE - MINUTE)

        replies = store.renew([running(key, "first", "d1")])

        assert replies == [True]
        assert task_of(store, key, "first").delivery_lease == about(now_of(store) + RUN_LEASE)

    def test_renew_never_shortens_a_lease(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        before = record_of(store, key)

        replies = store.renew([running(key, "first", "d1", lease_ms=MINUTE, run_lease_ms=MINUTE)])

        assert replies == [True]
        assert record_of(store, key) == before

    def test_renew_does_nothing_for_another_delivery(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        before = record_of(store, key)
        advance(store, MINUTE)

        replies = store.renew([running(key, "first", "d2")])

        assert replies == [False]
        assert record_of(store, key) == before

    def test_renew_never_creates_a_task(self, store: LockStore, key: str) -> None:
        replies = store.renew([running(key, "first"), held(key, "second")])

        assert replies == [False, False]
        assert record_of(store, key) == Record()

    def test_renew_does_not_revive_a_lapsed_task(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        advance(store, QUEUE_LEASE)

        replies = store.renew([running(key, "first", "d1"), held(key, "first")])

        assert replies == [False, False]
        assert not record_of(store, key)

    @pytest.mark.parametrize("state", FINAL)
    def test_renew_does_not_prolong_a_kept_task(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)
        advance(store, MINUTE)

        replies = store.renew([running(key, "first", "d1", lease_ms=100 * QUEUE_LEASE)])

        assert replies == [False]
        assert record_of(store, key) == before

    # -- renew: a message that is only held ---------------------------------

    @pytest.mark.parametrize("state", [State.AVAILABLE, State.RETRYABLE])
    def test_renew_of_a_held_message_extends_the_lock_lease(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = task_of(store, key, "first")
        advance(store, MINUTE)

        replies = store.renew([held(key, "first")])

        assert replies == [True]
        assert task_of(store, key, "first") == replace(
            before, lease=about(now_of(store) + QUEUE_LEASE)
        )

    def test_renew_of_a_held_message_counts_from_its_eta(self, store: LockStore, key: str) -> None:
        publish(store, key, "first", delay_ms=10 * MINUTE)
        before = task_of(store, key, "first")

        replies = store.renew([held(key, "first", 2 * QUEUE_LEASE)])

        assert replies == [True]
        assert task_of(store, key, "first") == replace(
            before, lease=about(before.eta + 2 * QUEUE_LEASE)
        )

    def test_renew_of_a_held_message_never_touches_the_delivery_lease(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        before = task_of(store, key, "first")
        advance(store, MINUTE)

        replies = store.renew([held(key, "first")])

        assert replies == [True]
        assert task_of(store, key, "first") == replace(
            before, lease=about(now_of(store) + QUEUE_LEASE)
        )

    def test_renew_of_a_held_message_that_has_started_meanwhile_extends_nothing(
        self, store: LockStore, key: str
    ) -> None:
        """The worker's thread that renews saw it waiting: for so long the key would be held by
        an acknowledged message, if the worker died now."""
        publish(store, key, "first")
        store.start(key, start("first", "d1", lease_ms=RUN_LEASE))
        before = record_of(store, key)

        replies = store.renew([held(key, "first", waits_as="d1")])

        assert replies == [True]
        assert record_of(store, key) == before

    def test_renew_of_a_held_message_extends_the_lock_of_another_delivery(
        self, store: LockStore, key: str
    ) -> None:
        """Of its twin: should that die, this one is run, and the key must be held until then."""
        publish(store, key, "first")
        store.start(key, start("first", "d1", lease_ms=RUN_LEASE))
        before = task_of(store, key, "first")

        replies = store.renew([held(key, "first", waits_as="d2")])

        assert replies == [True]
        assert task_of(store, key, "first") == replace(
            before, lease=about(now_of(store) + QUEUE_LEASE)
        )

    def test_renew_of_a_held_message_never_shortens_a_lease(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        before = record_of(store, key)

        store.renew([held(key, "first", MINUTE)])

        assert record_of(store, key) == before

    def test_renew_of_a_held_message_confirms_a_pending_task(
        self, store: LockStore, key: str
    ) -> None:
        created = store.acquire(key, claim("first"))

        replies = store.renew([held(key, "first")])

        assert replies == [True]
        assert record_of(store, key).tasks == {
            "first": TaskEntry("w", created.now, about(created.now + QUEUE_LEASE), "shop.rebuild")
        }

    def test_renew_that_confirms_a_pending_task_never_shortens_its_grace(
        self, store: LockStore, key: str
    ) -> None:
        created = store.acquire(key, claim("first"))

        store.renew([held(key, "first", GRACE // 2)])

        assert record_of(store, key).tasks == {
            "first": TaskEntry("w", created.now, created.now + GRACE, "shop.rebuild")
        }

    def test_renew_of_a_held_message_extends_its_mark(self, store: LockStore, key: str) -> None:
        store.cancel(key, "first", QUEUE_LEASE)
        advance(store, MINUTE)

        replies = store.renew([held(key, "first")])

        assert replies == [True]
        assert record_of(store, key) == Record(
            marks={"first": Mark("revoked", about(now_of(store) + QUEUE_LEASE))}
        )

    def test_renew_of_a_held_message_extends_the_mark_beside_a_kept_task(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1", keep=SUCCESS)
        store.finish(key, finish("first", "d1", settle_later=True))
        settle(store, key, "first", "d1", mark_done=True)
        before = record_of(store, key)
        advance(store, MINUTE)

        replies = store.renew([held(key, "first")])

        assert replies == [True]
        mark = Mark("done", about(before.marks["first"].until + MINUTE))
        assert record_of(store, key) == replace(before, marks={"first": mark})

    def test_renew_of_a_held_message_never_shortens_a_mark(
        self, store: LockStore, key: str
    ) -> None:
        store.cancel(key, "first", QUEUE_LEASE)
        before = record_of(store, key)

        store.renew([held(key, "first", MINUTE)])

        assert record_of(store, key) == before

    @pytest.mark.parametrize("state", FINAL)
    def test_renew_of_a_held_message_does_not_prolong_a_kept_task(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        replies = store.renew([held(key, "first", 100 * QUEUE_LEASE)])

        assert replies == [True]
        assert record_of(store, key) == before

    def test_renew_answers_in_the_order_of_a_batch_of_many_keys(
        self, store: LockStore, key: str
    ) -> None:
        other = fresh_key()
        run(store, key, "first", "d1")
        publish(store, other, "second")

        replies = store.renew(
            [
                held(other, "unknown"),
                running(key, "first", "d1"),
                running(key, "first", "d2"),
                held(other, "second"),
            ]
        )

        assert replies == [False, True, False, True]

    def test_renew_of_nothing_answers_nothing(self, store: LockStore) -> None:
        assert store.renew([]) == []

    # -- retry --------------------------------------------------------------

    def test_retry_makes_an_active_task_retryable_and_lets_go_of_the_delivery(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")
        before = task_of(store, key, "first")
        now = now_of(store)

        retry(store, key, "first", "d1", lease_ms=90 * MINUTE)

        assert task_of(store, key, "first") == replace(
            before, state="t", delivery="", delivery_lease=0, lease=about(now + 90 * MINUTE)
        )

    def test_retry_remembers_that_the_old_message_may_come_back(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")

        retry(store, key, "first", "d1", copies=True)

        assert task_of(store, key, "first").flags == "m"

    def test_retry_by_another_delivery_changes_nothing(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        before = record_of(store, key)

        retry(store, key, "first", "d2", copies=True)

        assert record_of(store, key) == before

    def test_retry_does_not_create_a_task(self, store: LockStore, key: str) -> None:
        retry(store, key, "first", "d1")

        assert record_of(store, key) == Record()

    def test_retry_twice_changes_nothing_the_second_time(self, store: LockStore, key: str) -> None:
        run(store, key, "first", "d1")
        retry(store, key, "first", "d1")
        before = record_of(store, key)
        advance(store, MINUTE)

        retry(store, key, "first", "d1")

        assert record_of(store, key) == before

    @pytest.mark.parametrize("settle_later", [False, True])
    def test_retry_of_an_ended_task_changes_nothing(
        self, store: LockStore, key: str, settle_later: bool
    ) -> None:
        run(store, key, "first", "d1", keep=SUCCESS)
        store.finish(key, finish("first", "d1", settle_later=settle_later))
        before = record_of(store, key)

        retry(store, key, "first", "d1")

        assert record_of(store, key) == before

    def test_a_retried_task_starts_again_with_a_larger_token(
        self, store: LockStore, key: str
    ) -> None:
        first = run(store, key, "first", "d1")
        retry(store, key, "first", "d1")

        second = store.start(key, start("first", "d2"))

        assert second == Started("run", second.token, lost=False)
        assert second.token > first.token

    def test_a_confirm_that_arrives_after_the_retry_changes_nothing(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("first"))
        store.start(key, start("first", "d1"))
        retry(store, key, "first", "d1")
        before = record_of(store, key)

        confirm(store, key, "first")

        assert record_of(store, key) == before

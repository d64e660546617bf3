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
    Key,
    about,
    finish,
    fresh_key,
    held,
    publish,
)

FINAL = [State.COMPLETED, State.DISCARDED, State.CANCELLED]


class RunContract:
    # -- start --------------------------------------------------------------

    @pytest.mark.parametrize(
        "state", [State.PENDING, State.SCHEDULED, State.AVAILABLE, State.RETRYABLE]
    )
    def test_start_makes_a_task_that_waits_active(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.task("first")
        now = key.now()

        started = key.start("first", "d9")

        assert started == Started("run", started.token, lost=False)
        assert key.record() == Record(
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

    def test_start_shortens_the_lock_lease_once_the_message_is_acknowledged(self, key: Key) -> None:
        key.publish("first")

        key.start("first", lease_ms=RUN_LEASE)

        assert key.task("first").lease == about(key.now() + RUN_LEASE)

    def test_the_token_is_the_stores_clock_in_microseconds(self, key: Key) -> None:
        now_us = key.now() * 1000

        token = key.run("first").token

        assert token == pytest.approx(now_us, abs=MINUTE * 1000)

    def test_every_run_of_a_key_gets_a_larger_token(self, key: Key) -> None:
        tokens = [key.run(f"task{i}", states="").token for i in range(20)]

        assert tokens == sorted(set(tokens))

    def test_tokens_grow_although_the_record_was_forgotten(self, key: Key) -> None:
        first = key.run("first").token
        key.finish("first")

        second = key.run("second").token

        assert second > first

    def test_starting_the_same_delivery_twice_is_as_once(self, key: Key) -> None:
        first = key.run("first", "d1")
        before = key.record()

        again = key.start("first", "d1")

        assert again == first
        assert key.record() == before

    def test_another_delivery_waits_while_the_first_one_lives(self, key: Key) -> None:
        key.run("first", "d1")
        before = key.task("first")
        key.advance(RUN_LEASE - MINUTE)

        second = key.start("first", "d2")

        assert second == Started("wait")
        assert key.task("first") == replace(before, flags="m")

    def test_another_delivery_takes_over_once_the_first_ones_lease_has_passed(
        self, key: Key
    ) -> None:
        first = key.run("first", "d1")
        before = key.task("first")
        key.advance(RUN_LEASE)
        now = key.now()

        second = key.start("first", "d2")

        assert second == Started("run", second.token, lost=False)
        assert second.token > first.token
        assert key.task("first") == replace(
            before,
            delivery="d2",
            delivery_lease=about(now + RUN_LEASE),
            lease=about(now + QUEUE_LEASE),
            token=second.token,
            flags="m",
        )

    def test_another_delivery_waits_while_the_first_one_stores_its_result(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)

        second = key.start("first", "d2")

        assert second == Started("wait")
        assert set(key.task("first").flags) == {"e", "m"}

    def test_another_delivery_runs_when_the_first_one_died_before_its_result_was_stored(
        self, key: Key
    ) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        key.advance(RUN_LEASE)

        second = key.start("first", "d2")

        assert second == Started("run", second.token, lost=False)
        task = key.task("first")
        assert (task.state, task.delivery, task.flags) == ("r", "d2", "m")

    @pytest.mark.parametrize("state", FINAL)
    def test_a_kept_task_is_not_run_again(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()

        assert key.start("first", "d2") == Started("done")
        assert key.record() == before

    def test_a_task_with_a_done_mark_is_not_run_again(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        key.settle("first", "d1", mark_done=True)
        before = key.record()

        assert key.start("first", "d2") == Started("done")
        assert key.record() == before

    def test_a_withdrawn_task_is_superseded(self, key: Key) -> None:
        key.acquire("first")
        key.give_back("first")
        before = key.record()

        assert key.start("first") == Started("superseded", mark="withdrawn")
        assert key.record() == before

    def test_a_revoked_task_is_superseded(self, key: Key) -> None:
        key.cancel("first")
        before = key.record()

        assert key.start("first") == Started("superseded", mark="revoked")
        assert key.record() == before

    def test_a_task_without_a_record_runs_and_is_recorded_from_its_header(self, key: Key) -> None:
        now = key.now()
        created_at = now - 30 * MINUTE

        started = key.start(
            "first",
            created_at=created_at,
            window_ms=45 * MINUTE,
            keep=SUCCESS,
            arguments="f00d",
        )

        assert started == Started("run", started.token, lost=True)
        assert key.record() == Record(
            token=started.token,
            tasks={
                "first": TaskEntry(
                    state="r",
                    created_at=created_at,
                    # Until it is renewed: a start that timed out may be applied after the
                    # end of the task, and then no worker releases it.
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
        self, key: Key
    ) -> None:
        now = key.now()

        key.start("first", window_ms=45 * MINUTE)

        task = key.task("first")
        assert task.created_at == about(now)
        assert task.window_ends == task.created_at + 45 * MINUTE

    def test_a_task_whose_lease_lapsed_runs_and_says_so(self, key: Key) -> None:
        key.publish("first")
        key.advance(QUEUE_LEASE)

        started = key.start("first")

        assert started == Started("run", started.token, lost=True)

    def test_a_task_whose_lease_lapsed_runs_beside_the_next_one(self, key: Key) -> None:
        key.publish("first")
        key.advance(QUEUE_LEASE)
        key.publish("second")

        started = key.start("first")

        assert (started.verdict, started.lost) == ("run", True)
        assert sorted(key.record().tasks) == ["first", "second"]

    # -- renew: a body that runs --------------------------------------------

    def test_renew_extends_both_leases_of_the_running_delivery(self, key: Key) -> None:
        key.run("first", "d1")
        before = key.task("first")
        key.advance(RUN_LEASE - MINUTE)
        now = key.now()

        replies = key.store.renew([key.running("first", "d1")])

        assert replies == [True]
        assert key.task("first") == replace(
            before, lease=about(now + QUEUE_LEASE), delivery_lease=about(now + RUN_LEASE)
        )

    def test_a_message_that_may_come_back_while_it_runs_is_over_when_it_does(
        self, key: Key
    ) -> None:
        """A worker that stops may not be notified that a process of its pool has taken a task."""
        key.run("first", "d1")

        replies = key.store.renew([key.running("first", "d1", copies=True)])

        assert replies == [True]
        assert key.finish("first", "d1").settle
        key.store.settle(key.text, finish("first", "d1"), mark_done=False)
        key.store.flush()
        assert key.start("first", "d2").verdict == "done"

    def test_a_message_that_may_come_back_is_over_after_a_retry_too(self, key: Key) -> None:
        key.run("first", "d1")
        key.store.renew([key.running("first", "d1", copies=True)])
        key.store.retry(key.text, "first", "d1", QUEUE_LEASE, copies=False)
        key.store.flush()
        assert key.start("first", "d2").verdict == "run"

        assert key.finish("first", "d2").settle
        key.store.settle(key.text, finish("first", "d2"), mark_done=False)
        key.store.flush()
        assert key.start("first", "d1 once more").verdict == "done"

    def test_renew_extends_an_ending_task(self, key: Key) -> None:
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        key.advance(RUN_LEASE - MINUTE)

        replies = key.store.renew([key.running("first", "d1")])

        assert replies == [True]
        assert key.task("first").delivery_lease == about(key.now() + RUN_LEASE)

    def test_renew_never_shortens_a_lease(self, key: Key) -> None:
        key.run("first", "d1")
        before = key.record()

        replies = key.store.renew(
            [key.running("first", "d1", lease_ms=MINUTE, run_lease_ms=MINUTE)]
        )

        assert replies == [True]
        assert key.record() == before

    def test_renew_does_nothing_for_another_delivery(self, key: Key) -> None:
        key.run("first", "d1")
        before = key.record()
        key.advance(MINUTE)

        replies = key.store.renew([key.running("first", "d2")])

        assert replies == [False]
        assert key.record() == before

    def test_renew_never_creates_a_task(self, key: Key) -> None:
        replies = key.store.renew([key.running("first"), key.held("second")])

        assert replies == [False, False]
        assert key.record() == Record()

    def test_renew_does_not_revive_a_lapsed_task(self, key: Key) -> None:
        key.run("first", "d1")
        key.advance(QUEUE_LEASE)

        replies = key.store.renew([key.running("first", "d1"), key.held("first")])

        assert replies == [False, False]
        assert not key.record()

    @pytest.mark.parametrize("state", FINAL)
    def test_renew_does_not_prolong_a_kept_task(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()
        key.advance(MINUTE)

        replies = key.store.renew([key.running("first", "d1", lease_ms=100 * QUEUE_LEASE)])

        assert replies == [False]
        assert key.record() == before

    # -- renew: a message that is only held ---------------------------------

    @pytest.mark.parametrize("state", [State.AVAILABLE, State.RETRYABLE])
    def test_renew_of_a_held_message_extends_the_lock_lease(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.task("first")
        key.advance(MINUTE)

        replies = key.store.renew([key.held("first")])

        assert replies == [True]
        assert key.task("first") == replace(before, lease=about(key.now() + QUEUE_LEASE))

    def test_renew_of_a_held_message_counts_from_its_eta(self, key: Key) -> None:
        key.publish("first", delay_ms=10 * MINUTE)
        before = key.task("first")

        replies = key.store.renew([key.held("first", 2 * QUEUE_LEASE)])

        assert replies == [True]
        assert key.task("first") == replace(before, lease=about(before.eta + 2 * QUEUE_LEASE))

    def test_renew_of_a_held_message_never_touches_the_delivery_lease(self, key: Key) -> None:
        key.run("first", "d1")
        before = key.task("first")
        key.advance(MINUTE)

        replies = key.store.renew([key.held("first")])

        assert replies == [True]
        assert key.task("first") == replace(before, lease=about(key.now() + QUEUE_LEASE))

    def test_renew_of_a_held_message_that_has_started_meanwhile_extends_nothing(
        self, key: Key
    ) -> None:
        """The worker's thread that renews saw it waiting: for so long the key would be held by
        an acknowledged message, if the worker died now."""
        key.publish("first")
        key.start("first", "d1", lease_ms=RUN_LEASE)
        before = key.record()

        replies = key.store.renew([key.held("first", waits_as="d1")])

        assert replies == [True]
        assert key.record() == before

    def test_renew_of_a_held_message_extends_the_lock_of_another_delivery(self, key: Key) -> None:
        """Of its twin: should that die, this one is run, and the key must be held until then."""
        key.publish("first")
        key.start("first", "d1", lease_ms=RUN_LEASE)
        before = key.task("first")

        replies = key.store.renew([key.held("first", waits_as="d2")])

        assert replies == [True]
        assert key.task("first") == replace(before, lease=about(key.now() + QUEUE_LEASE))

    def test_renew_of_a_held_message_never_shortens_a_lease(self, key: Key) -> None:
        key.publish("first")
        before = key.record()

        key.store.renew([key.held("first", MINUTE)])

        assert key.record() == before

    def test_renew_of_a_held_message_confirms_a_pending_task(self, key: Key) -> None:
        created = key.acquire("first")

        replies = key.store.renew([key.held("first")])

        assert replies == [True]
        assert key.record().tasks == {
            "first": TaskEntry("w", created.now, about(created.now + QUEUE_LEASE), "shop.rebuild")
        }

    def test_renew_that_confirms_a_pending_task_never_shortens_its_grace(self, key: Key) -> None:
        created = key.acquire("first")

        key.store.renew([key.held("first", GRACE // 2)])

        assert key.record().tasks == {
            "first": TaskEntry("w", created.now, created.now + GRACE, "shop.rebuild")
        }

    def test_renew_of_a_held_message_extends_its_mark(self, key: Key) -> None:
        key.cancel("first")
        key.advance(MINUTE)

        replies = key.store.renew([key.held("first")])

        assert replies == [True]
        assert key.record() == Record(
            marks={"first": Mark("revoked", about(key.now() + QUEUE_LEASE))}
        )

    def test_renew_of_a_held_message_extends_the_mark_beside_a_kept_task(self, key: Key) -> None:
        key.run("first", "d1", keep=SUCCESS)
        key.finish("first", "d1", settle_later=True)
        key.settle("first", "d1", mark_done=True)
        before = key.record()
        key.advance(MINUTE)

        replies = key.store.renew([key.held("first")])

        assert replies == [True]
        mark = Mark("done", about(before.marks["first"].until + MINUTE))
        assert key.record() == replace(before, marks={"first": mark})

    def test_renew_of_a_held_message_never_shortens_a_mark(self, key: Key) -> None:
        key.cancel("first")
        before = key.record()

        key.store.renew([key.held("first", MINUTE)])

        assert key.record() == before

    @pytest.mark.parametrize("state", FINAL)
    def test_renew_of_a_held_message_does_not_prolong_a_kept_task(
        self, key: Key, state: State
    ) -> None:
        key.bring_to("first", state)
        before = key.record()

        replies = key.store.renew([key.held("first", 100 * QUEUE_LEASE)])

        assert replies == [True]
        assert key.record() == before

    def test_renew_answers_in_the_order_of_a_batch_of_many_keys(self, key: Key) -> None:
        other = fresh_key()
        key.run("first", "d1")
        publish(key.store, other, "second")

        replies = key.store.renew(
            [
                held(other, "unknown"),
                key.running("first", "d1"),
                key.running("first", "d2"),
                held(other, "second"),
            ]
        )

        assert replies == [False, True, False, True]

    def test_renew_of_nothing_answers_nothing(self, store: LockStore) -> None:
        assert store.renew([]) == []

    # -- retry --------------------------------------------------------------

    def test_retry_makes_an_active_task_retryable_and_lets_go_of_the_delivery(
        self, key: Key
    ) -> None:
        key.run("first", "d1")
        before = key.task("first")
        now = key.now()

        key.retry("first", "d1", lease_ms=90 * MINUTE)

        assert key.task("first") == replace(
            before, state="t", delivery="", delivery_lease=0, lease=about(now + 90 * MINUTE)
        )

    def test_retry_remembers_that_the_old_message_may_come_back(self, key: Key) -> None:
        key.run("first", "d1")

        key.retry("first", "d1", copies=True)

        assert key.task("first").flags == "m"

    def test_retry_by_another_delivery_changes_nothing(self, key: Key) -> None:
        key.run("first", "d1")
        before = key.record()

        key.retry("first", "d2", copies=True)

        assert key.record() == before

    def test_retry_does_not_create_a_task(self, key: Key) -> None:
        key.retry("first", "d1")

        assert key.record() == Record()

    def test_retry_twice_changes_nothing_the_second_time(self, key: Key) -> None:
        key.run("first", "d1")
        key.retry("first", "d1")
        before = key.record()
        key.advance(MINUTE)

        key.retry("first", "d1")

        assert key.record() == before

    @pytest.mark.parametrize("settle_later", [False, True])
    def test_retry_of_an_ended_task_changes_nothing(self, key: Key, settle_later: bool) -> None:
        key.run("first", "d1", keep=SUCCESS)
        key.finish("first", "d1", settle_later=settle_later)
        before = key.record()

        key.retry("first", "d1")

        assert key.record() == before

    def test_a_retried_task_starts_again_with_a_larger_token(self, key: Key) -> None:
        first = key.run("first", "d1")
        key.retry("first", "d1")

        second = key.start("first", "d2")

        assert second == Started("run", second.token, lost=False)
        assert second.token > first.token

    def test_a_confirm_that_arrives_after_the_retry_changes_nothing(self, key: Key) -> None:
        key.acquire("first")
        key.start("first", "d1")
        key.retry("first", "d1")
        before = key.record()

        key.confirm("first")

        assert key.record() == before

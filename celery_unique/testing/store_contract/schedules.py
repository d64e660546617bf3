"""What goes wrong without each rule of the protocol, as schedules that must go right.

Each test plays the acts of callers, workers and a broker in the order that goes wrong when
its rule is left out, and asserts what the protocol promises.
What the store cannot see (a publish, a crash, a message) stands in comments.
"""

from __future__ import annotations

import pytest

from celery_unique.stores.base import Finished, LockStore, Started
from celery_unique.stores.record import State
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    SUCCESS,
    advance,
    claim,
    confirm,
    finish,
    held,
    publish,
    record_of,
    retry,
    run,
    running,
    settle,
    start,
)


class ScheduleContract:
    # -- publishing ---------------------------------------------------------------

    def test_a_duplicate_of_a_pending_holder_can_see_to_it_that_the_holder_is_published(
        self, store: LockStore, key: str
    ) -> None:
        """A duplicate that returns at once may name a task whose publisher then dies."""
        store.acquire(key, claim("first"))
        # The first caller dies here, before its publish.

        duplicate = store.acquire(key, claim("second"))
        assert duplicate.holder is not None
        assert duplicate.holder.state is State.PENDING  # so look again, then help
        assert store.help(key, "first") == "go"
        confirm(store, key, "first")  # after publishing the own message under the holder's id

        assert store.start(key, start("first")).verdict == "run"

    def test_a_duplicate_of_a_pending_holder_whose_publish_failed_takes_the_key_itself(
        self, store: LockStore, key: str
    ) -> None:
        """As above, with a publish that fails and is given back in time."""
        store.acquire(key, claim("first"))
        duplicate = store.acquire(key, claim("second"))
        store.give_back(key, "first", QUEUE_LEASE)

        verdict = store.help(key, "first")

        assert (duplicate.outcome, verdict) == ("duplicate", "again")
        assert store.acquire(key, claim("second")).outcome == "created"

    def test_a_publisher_that_died_before_its_publish_blocks_for_the_grace_only(
        self, store: LockStore, key: str
    ) -> None:
        """A lock confirmed before its publish blocks for a queue lease, without a message."""
        store.acquire(key, claim("first"))
        # The caller dies here.
        advance(store, GRACE)

        assert store.acquire(key, claim("second")).outcome == "created"

    def test_a_publish_that_failed_frees_the_key_at_once(self, store: LockStore, key: str) -> None:
        """A lock confirmed before its publish could no longer be given back."""
        store.acquire(key, claim("first"))
        # The publish raises.
        store.give_back(key, "first", QUEUE_LEASE)

        assert store.acquire(key, claim("second")).outcome == "created"

    def test_a_confirm_that_arrives_after_the_end_revives_nothing(
        self, store: LockStore, key: str
    ) -> None:
        """A confirm that creates swallows calls with a task that is over."""
        store.acquire(key, claim("first"))
        store.start(key, start("first"))
        store.finish(key, finish("first"))

        confirm(store, key, "first")  # one way, and late

        assert store.acquire(key, claim("second")).outcome == "created"

    def test_a_confirm_that_arrives_after_the_start_lets_no_twin_in(
        self, store: LockStore, key: str
    ) -> None:
        """A confirm that acts on any state sets a running task back to available."""
        store.acquire(key, claim("first"))
        store.start(key, start("first", "d1"))

        confirm(store, key, "first")

        assert store.start(key, start("first", "d2")) == Started("wait")
        assert store.finish(key, finish("first", "d1")).verdict == "ended"

    def test_a_publish_that_raised_but_landed_and_started_keeps_its_lock(
        self, store: LockStore, key: str
    ) -> None:
        """Giving back in any state removes the lock of a task that runs."""
        store.acquire(key, claim("first"))
        # The publish raises after the broker has taken the message.
        store.start(key, start("first"))

        store.give_back(key, "first", QUEUE_LEASE)

        duplicate = store.acquire(key, claim("second"))
        assert duplicate.holder is not None
        assert (duplicate.outcome, duplicate.holder.state) == ("duplicate", State.ACTIVE)

    def test_a_copy_survives_the_failed_publish_of_the_first_caller(
        self, store: LockStore, key: str
    ) -> None:
        """Another call was told to publish a copy: withdrawing the id would lose that call."""
        store.acquire(key, claim("first"))
        store.acquire(key, claim("second"))
        assert store.help(key, "first") == "go"

        store.give_back(key, "first", QUEUE_LEASE)  # the first caller's own publish raised
        confirm(store, key, "first")  # the second caller's copy went out

        assert store.start(key, start("first")).verdict == "run"

    @pytest.mark.parametrize("acquired", [True, False])
    def test_a_publish_after_an_acquire_that_timed_out_runs_when_nothing_was_given_back(
        self, store: LockStore, key: str, acquired: bool
    ) -> None:
        """Failing open must not give back first: the withdrawn mark would drop the message."""
        if acquired:
            store.acquire(key, claim("first"))  # whose answer is lost
        # Published all the same, because of unique_on_store_error="publish".
        confirm(store, key, "first")

        started = store.start(key, start("first"))

        assert (started.verdict, started.lost) == ("run", not acquired)

    def test_a_publish_that_raised_but_landed_does_not_run_beside_the_next_call(
        self, store: LockStore, key: str
    ) -> None:
        """Without a mark the message that landed after all would run, beside its successor."""
        store.acquire(key, claim("first"))
        store.give_back(key, "first", QUEUE_LEASE)
        publish(store, key, "second")
        store.start(key, start("second", "d2"))

        # The message of the first call is delivered.
        landed = store.start(key, start("first", "d1"))

        assert landed == Started("superseded", mark="withdrawn")

    def test_a_copy_that_is_delivered_after_the_end_does_not_run_again(
        self, store: LockStore, key: str
    ) -> None:
        """Whoever lets a copy out must remember it, or nobody leaves a done mark for it."""
        store.acquire(key, claim("first"))
        assert store.help(key, "first") == "go"
        confirm(store, key, "first")  # both the first message and the copy are out now
        store.start(key, start("first", "d1"))
        ended = store.finish(key, finish("first", "d1"))  # early ack: nothing else asks for settle
        settle(store, key, "first", "d1")

        copy = store.start(key, start("first", "d2"))

        assert ended == Finished("ended", settle=True)
        assert copy == Started("done")

    def test_an_attempt_that_asks_again_does_not_run_what_its_copy_has_ended(
        self, store: LockStore, key: str
    ) -> None:
        """A slow publisher renews its claim before it publishes: a copy may be over by then."""
        store.acquire(key, claim("first"))
        store.help(key, "first")
        confirm(store, key, "first")
        store.start(key, start("first", "d1"))
        store.finish(key, finish("first", "d1"))
        settle(store, key, "first", "d1")

        store.acquire(key, claim("first", again=True))  # and then it publishes

        assert store.start(key, start("first", "d2")) == Started("done")
        assert store.acquire(key, claim("second")).outcome == "created"

    # -- starting -----------------------------------------------------------------

    def test_a_task_whose_lease_lapsed_in_the_broker_runs(self, store: LockStore, key: str) -> None:
        """It was accepted once: dropping it would lose work."""
        publish(store, key, "first")
        advance(store, 10 * QUEUE_LEASE)  # a long weekend without workers

        started = store.start(key, start("first"))

        assert (started.verdict, started.lost) == ("run", True)

    def test_a_task_whose_record_was_lost_with_the_store_runs(
        self, store: LockStore, key: str
    ) -> None:
        """As above, with a store that came back empty."""
        started = store.start(key, start("first"))

        assert (started.verdict, started.lost) == ("run", True)

    def test_the_twin_of_a_visibility_timeout_does_not_run_beside_the_first(
        self, store: LockStore, key: str
    ) -> None:
        """The broker delivers again while the first delivery still runs."""
        run(store, key, "first", "d1")
        for _ in range(12):  # an hour-long body, renewed in time
            advance(store, RUN_LEASE - MINUTE)
            store.renew([running(key, "first", "d1")])

        twin = store.start(key, start("first", "d2"))

        assert twin == Started("wait")
        assert store.renew([running(key, "first", "d1")]) == [True]

    def test_a_redelivery_after_a_crash_runs_as_soon_as_the_short_lease_has_passed(
        self, store: LockStore, key: str
    ) -> None:
        """With one lease for both, it would be told to wait for the whole queue lease."""
        run(store, key, "first", "d1")  # acks_late: the key is held for the queue lease
        # The worker dies, and RabbitMQ redelivers at once.
        at_once = store.start(key, start("first", "d2"))
        advance(store, RUN_LEASE)
        between = store.acquire(key, claim("second"))

        later = store.start(key, start("first", "d2"))

        assert (at_once.verdict, later.verdict, later.lost) == ("wait", "run", False)
        assert between.outcome == "duplicate"

    def test_tokens_grow_after_the_record_was_deleted(self, store: LockStore, key: str) -> None:
        """A counter that lives in the record would begin at 1 again."""
        tokens = []
        for number in range(5):
            tokens.append(run(store, key, f"task{number}").token)
            store.finish(key, finish(f"task{number}"))
            assert not record_of(store, key)

        assert tokens == sorted(set(tokens))

    def test_a_second_delivery_has_a_larger_token_than_the_one_it_takes_over_from(
        self, store: LockStore, key: str
    ) -> None:
        """A token given with the task would let both deliveries write."""
        first = run(store, key, "first", "d1")
        advance(store, RUN_LEASE)  # the worker is paused

        second = store.start(key, start("first", "d2"))

        assert second.token > first.token

    # -- renewing -----------------------------------------------------------------

    def test_a_renewal_that_arrives_after_the_end_revives_nothing(
        self, store: LockStore, key: str
    ) -> None:
        """A renewal that creates swallows calls with a task that is over."""
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1"))

        replies = store.renew([running(key, "first", "d1"), held(key, "first")])

        assert replies == [False, False]
        assert store.acquire(key, claim("second")).outcome == "created"

    def test_a_paused_worker_does_not_renew_what_another_delivery_has_taken_over(
        self, store: LockStore, key: str
    ) -> None:
        """Renewal compares the delivery, so the old owner learns that it lost."""
        run(store, key, "first", "d1")
        advance(store, RUN_LEASE)
        store.start(key, start("first", "d2"))

        replies = store.renew([running(key, "first", "d1"), running(key, "first", "d2")])

        assert replies == [False, True]
        # Nor does the old owner get in again while the new one lives.
        assert store.start(key, start("first", "d3")) == Started("wait")

    def test_a_worker_that_dies_as_its_task_starts_does_not_leave_the_key_to_the_queue_lease(
        self, store: LockStore, key: str
    ) -> None:
        """The thread that renews saw the message waiting, and tells so after the start."""
        publish(store, key, "first")
        store.start(key, start("first", "d1", lease_ms=RUN_LEASE))  # acknowledged early
        store.renew([held(key, "first", waits_as="d1")])

        advance(store, RUN_LEASE)

        assert store.acquire(key, claim("second")).outcome == "created"

    # -- finishing ----------------------------------------------------------------

    def test_a_paused_old_owner_does_not_end_the_new_owners_lock(
        self, store: LockStore, key: str
    ) -> None:
        """Finish compares the delivery."""
        run(store, key, "first", "d1")
        advance(store, RUN_LEASE)
        store.start(key, start("first", "d2"))

        late = store.finish(key, finish("first", "d1"))

        assert late == Finished("not_yours")
        assert store.acquire(key, claim("second")).outcome == "duplicate"

    def test_a_paused_old_owner_does_not_end_the_next_tasks_lock(
        self, store: LockStore, key: str
    ) -> None:
        """A release by key alone would end whatever holds the key by then."""
        publish(store, key, "first")
        store.start(key, start("first", "d1", lease_ms=RUN_LEASE))  # early ack
        advance(store, RUN_LEASE)
        run(store, key, "second", "d2")

        late = store.finish(key, finish("first", "d1"))

        assert late == Finished("not_yours")
        assert store.acquire(key, claim("third")).outcome == "duplicate"

    def test_a_twin_that_waited_does_not_run_the_finished_task_again(
        self, store: LockStore, key: str
    ) -> None:
        """The gate saw the twin, so the end must leave a mark for it."""
        run(store, key, "first", "d1")
        assert store.start(key, start("first", "d2")).verdict == "wait"
        store.finish(key, finish("first", "d1"))
        settle(store, key, "first", "d1")

        assert store.start(key, start("first", "d2")) == Started("done")

    def test_a_twin_that_comes_only_after_the_end_does_not_run_the_finished_task_again(
        self, store: LockStore, key: str
    ) -> None:
        """The worker knows that its message may exist twice, and says so when it settles."""
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        settle(store, key, "first", "d1", mark_done=True)

        assert store.start(key, start("first", "d2")) == Started("done")

    def test_a_crash_before_the_result_is_stored_lets_the_redelivery_produce_it(
        self, store: LockStore, key: str
    ) -> None:
        """A done mark already at finish would drop the redelivery: no result, no callbacks."""
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        # The worker dies before the result is stored; the broker delivers again.
        advance(store, RUN_LEASE)

        assert store.start(key, start("first", "d2")).verdict == "run"

    def test_a_redelivery_between_finish_and_acknowledgement_does_not_run_beside_the_next_task(
        self, store: LockStore, key: str
    ) -> None:
        """Released fully at finish, the id would be unknown and run again at once."""
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        run(store, key, "second", "d2")

        redelivered = store.start(key, start("first", "d3"))

        assert redelivered == Started("wait")
        settle(store, key, "first", "d1")  # the first delivery goes on: result, ack, settle
        assert store.start(key, start("first", "d3")) == Started("done")

    def test_a_call_that_has_seen_the_result_is_not_swallowed(
        self, store: LockStore, key: str
    ) -> None:
        """Finish precedes the stored result, and frees the key although settle is to come."""
        run(store, key, "first", "d1")
        store.finish(key, finish("first", "d1", settle_later=True))
        # The result is stored, .get() returns, and the caller calls again before settle.

        assert store.acquire(key, claim("second")).outcome == "created"

    def test_settling_the_first_task_leaves_the_next_one_alone(
        self, store: LockStore, key: str
    ) -> None:
        """The next task is admitted between finish and settle; settle is about the id alone."""
        run(store, key, "first", "d1")
        publish(store, key, "second", states=SUCCESS)
        store.finish(key, finish("first", "d1", settle_later=True))

        settle(store, key, "first", "d1", mark_done=True)

        assert {i: task.state for i, task in record_of(store, key).tasks.items()} == {"second": "w"}

    def test_a_hard_time_limit_that_reports_twice_ends_the_task_once(
        self, store: LockStore, key: str
    ) -> None:
        """Finish is idempotent: the second report changes nothing, nor does it end a successor."""
        run(store, key, "first", "d1")
        reports = [
            store.finish(key, finish("first", "d1", state=State.DISCARDED)) for _ in range(2)
        ]
        run(store, key, "second", "d2")
        reports.append(store.finish(key, finish("first", "d1", state=State.DISCARDED)))

        assert [report.verdict for report in reports] == ["ended", "not_yours", "not_yours"]
        assert store.acquire(key, claim("third")).outcome == "duplicate"

    # -- retrying -----------------------------------------------------------------

    def test_the_original_message_runs_when_the_worker_died_before_its_retry_was_sent(
        self, store: LockStore, key: str
    ) -> None:
        """A redelivery that is told apart by its retry count would be dropped: nobody is left."""
        run(store, key, "first", "d1")
        retry(store, key, "first", "d1", copies=True)
        # acks_late: the worker dies before the retry is published; the original comes back.

        assert store.start(key, start("first", "d2")).verdict == "run"

    def test_a_retry_that_is_delivered_before_the_retry_act_waits(
        self, store: LockStore, key: str
    ) -> None:
        """The retry is published first: its message may be faster than the act."""
        run(store, key, "first", "d1")

        too_early = store.start(key, start("first", "d2"))
        retry(store, key, "first", "d1")

        assert too_early == Started("wait")
        assert store.start(key, start("first", "d2")).verdict == "run"

    def test_the_original_of_a_retried_task_does_not_run_after_the_end(
        self, store: LockStore, key: str
    ) -> None:
        """With acks_late the original may come back after the retry has ended."""
        run(store, key, "first", "d1")
        retry(store, key, "first", "d1", copies=True)
        store.start(key, start("first", "d2"))
        ended = store.finish(key, finish("first", "d2"))
        settle(store, key, "first", "d2")

        original = store.start(key, start("first", "d3"))

        assert ended == Finished("ended", settle=True)
        assert original == Started("done")

    def test_a_task_that_waits_for_its_retry_keeps_its_key(
        self, store: LockStore, key: str
    ) -> None:
        """A retry is never checked again: nobody may take the key in between."""
        run(store, key, "first", "d1")
        retry(store, key, "first", "d1", lease_ms=10 * QUEUE_LEASE)
        advance(store, 9 * QUEUE_LEASE)

        between = store.acquire(key, claim("second"))

        assert between.outcome == "duplicate"
        assert store.start(key, start("first", "d2")).verdict == "run"

    # -- revoking -----------------------------------------------------------------

    def test_a_revoke_does_not_free_the_key_of_a_task_that_runs(
        self, store: LockStore, key: str
    ) -> None:
        """A running task ends through finish; its key is held until then."""
        run(store, key, "first", "d1")

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "active"
        assert store.acquire(key, claim("second")).outcome == "duplicate"
        assert store.finish(key, finish("first", "d1")).verdict == "ended"

    def test_a_revoked_task_does_not_run_when_its_message_is_delivered(
        self, store: LockStore, key: str
    ) -> None:
        """A revoke frees the key at once, so the message must be stopped by a mark."""
        publish(store, key, "first")

        store.cancel(key, "first", QUEUE_LEASE)

        assert store.acquire(key, claim("second")).outcome == "created"
        assert store.start(key, start("first")) == Started("superseded", mark="revoked")

    def test_a_revoked_task_does_not_run_after_its_worker_died(
        self, store: LockStore, key: str
    ) -> None:
        """Started, its worker died, revoked: the redelivery must not run it."""
        run(store, key, "first", "d1")
        advance(store, RUN_LEASE)

        verdict = store.cancel(key, "first", QUEUE_LEASE)

        assert verdict == "cancelled"
        assert store.start(key, start("first", "d2")) == Started("superseded", mark="revoked")
        assert store.acquire(key, claim("second")).outcome == "created"

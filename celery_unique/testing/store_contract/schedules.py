"""What goes wrong without each rule of the protocol, as schedules that must go right.

Each test plays the acts of callers, workers and a broker in the order that goes wrong when
its rule is left out, and asserts what the protocol promises.
What the store cannot see (a publish, a crash, a message) stands in comments.
"""

from __future__ import annotations

import pytest

from celery_unique.stores.base import Finished, Started
from celery_unique.stores.record import State
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    SUCCESS,
    Key,
)


class ScheduleContract:
    # -- publishing ---------------------------------------------------------------

    def test_a_duplicate_of_a_pending_holder_can_see_to_it_that_the_holder_is_published(
        self, key: Key
    ) -> None:
        """A duplicate that returns immediately may name a task whose publisher then dies."""
        key.acquire("first")
        # The first caller dies here, before its publish.

        duplicate = key.acquire("second")
        assert duplicate.holder is not None
        assert duplicate.holder.state is State.PENDING  # so look again, then help
        assert key.help("first") == "go"
        key.confirm("first")  # after publishing the own message under the holder's id

        assert key.start("first").verdict == "run"

    def test_a_duplicate_of_a_pending_holder_whose_publish_failed_takes_the_key_itself(
        self, key: Key
    ) -> None:
        """As above, with a publish that fails and is withdrawn in time."""
        key.acquire("first")
        duplicate = key.acquire("second")
        key.give_back("first")

        verdict = key.help("first")

        assert (duplicate.outcome, verdict) == ("duplicate", "again")
        assert key.acquire("second").outcome == "created"

    def test_a_publisher_that_died_before_its_publish_blocks_for_the_grace_only(
        self, key: Key
    ) -> None:
        """A lock confirmed before its publish blocks for a queue lease, without a message."""
        key.acquire("first")
        # The caller dies here.
        key.advance(GRACE)

        assert key.acquire("second").outcome == "created"

    def test_a_publish_that_failed_frees_the_key_at_once(self, key: Key) -> None:
        """A lock confirmed before its publish could no longer be withdrawn."""
        key.acquire("first")
        # The publish raises.
        key.give_back("first")

        assert key.acquire("second").outcome == "created"

    def test_a_confirm_that_arrives_after_the_end_revives_nothing(self, key: Key) -> None:
        """A confirm that creates swallows calls with a task that has ended."""
        key.acquire("first")
        key.start("first")
        key.finish("first")

        key.confirm("first")  # fire-and-forget, and late

        assert key.acquire("second").outcome == "created"

    def test_a_confirm_that_arrives_after_the_start_lets_no_twin_in(self, key: Key) -> None:
        """A confirm that acts on any state sets a running task back to available."""
        key.acquire("first")
        key.start("first", "d1")

        key.confirm("first")

        assert key.start("first", "d2") == Started("wait")
        assert key.finish("first", "d1").verdict == "ended"

    def test_a_publish_that_raised_but_landed_and_started_keeps_its_lock(self, key: Key) -> None:
        """Withdrawing in any state removes the lock of a task that runs."""
        key.acquire("first")
        # The publish raises after the broker has taken the message.
        key.start("first")

        key.give_back("first")

        duplicate = key.acquire("second")
        assert duplicate.holder is not None
        assert (duplicate.outcome, duplicate.holder.state) == ("duplicate", State.ACTIVE)

    def test_a_copy_survives_the_failed_publish_of_the_first_caller(self, key: Key) -> None:
        """Another call may publish a copy: withdrawing the id would lose that call."""
        key.acquire("first")
        key.acquire("second")
        assert key.help("first") == "go"

        key.give_back("first")  # the first caller's own publish raised
        key.confirm("first")  # the second caller's copy went out

        assert key.start("first").verdict == "run"

    @pytest.mark.parametrize("acquired", [True, False])
    def test_a_publish_after_an_acquire_that_timed_out_runs_when_nothing_was_given_back(
        self, key: Key, acquired: bool
    ) -> None:
        """Failing open must not withdraw first: the withdrawn mark would drop the message."""
        if acquired:
            key.acquire("first")  # whose answer is lost
        # Published anyway, because of unique_on_store_error="publish".
        key.confirm("first")

        started = key.start("first")

        assert (started.verdict, started.lost) == ("run", not acquired)

    def test_a_publish_that_raised_but_landed_does_not_run_beside_the_next_call(
        self, key: Key
    ) -> None:
        """Without a mark the message that landed after all would run, beside its successor."""
        key.acquire("first")
        key.give_back("first")
        key.publish("second")
        key.start("second", "d2")

        # The message of the first call is delivered.
        landed = key.start("first", "d1")

        assert landed == Started("superseded", mark="withdrawn")

    def test_a_copy_that_is_delivered_after_the_end_does_not_run_again(self, key: Key) -> None:
        """A copy that was allowed must be recorded, or its end leaves no done mark."""
        key.acquire("first")
        assert key.help("first") == "go"
        key.confirm("first")  # both the first message and the copy are out now
        key.start("first", "d1")
        ended = key.finish("first", "d1")  # early ack: nothing else asks for settle
        key.settle("first", "d1")

        copy = key.start("first", "d2")

        assert ended == Finished("ended", settle=True)
        assert copy == Started("done")

    def test_an_attempt_that_asks_again_does_not_run_what_its_copy_has_ended(
        self, key: Key
    ) -> None:
        """A slow publisher renews its claim before it publishes: a copy may be over by then."""
        key.acquire("first")
        key.help("first")
        key.confirm("first")
        key.start("first", "d1")
        key.finish("first", "d1")
        key.settle("first", "d1")

        key.acquire("first", again=True)  # and then it publishes

        assert key.start("first", "d2") == Started("done")
        assert key.acquire("second").outcome == "created"

    # -- starting -----------------------------------------------------------------

    def test_a_task_whose_lease_lapsed_in_the_broker_runs(self, key: Key) -> None:
        """It was accepted once: dropping it would lose work."""
        key.publish("first")
        key.advance(10 * QUEUE_LEASE)  # a long weekend without workers

        started = key.start("first")

        assert (started.verdict, started.lost) == ("run", True)

    def test_a_task_whose_record_was_lost_with_the_store_runs(self, key: Key) -> None:
        """As above, with a store that came back empty."""
        started = key.start("first")

        assert (started.verdict, started.lost) == ("run", True)

    def test_the_twin_of_a_visibility_timeout_does_not_run_beside_the_first(self, key: Key) -> None:
        """The broker delivers again while the first delivery still runs."""
        key.run("first", "d1")
        for _ in range(12):  # an hour-long body, renewed in time
            key.advance(RUN_LEASE - MINUTE)
            key.store.renew([key.running("first", "d1")])

        twin = key.start("first", "d2")

        assert twin == Started("wait")
        assert key.store.renew([key.running("first", "d1")]) == [True]

    def test_a_redelivery_after_a_crash_runs_as_soon_as_the_short_lease_has_passed(
        self, key: Key
    ) -> None:
        """With one lease for both, it would wait for the whole queue lease."""
        key.run("first", "d1")  # acks_late: the key is held for the queue lease
        # The worker dies, and RabbitMQ redelivers immediately.
        at_once = key.start("first", "d2")
        key.advance(RUN_LEASE)
        between = key.acquire("second")

        later = key.start("first", "d2")

        assert (at_once.verdict, later.verdict, later.lost) == ("wait", "run", False)
        assert between.outcome == "duplicate"

    def test_tokens_grow_after_the_record_was_deleted(self, key: Key) -> None:
        """A counter that lives in the record would begin at 1 again."""
        tokens = []
        for number in range(5):
            tokens.append(key.run(f"task{number}").token)
            key.finish(f"task{number}")
            assert not key.record()

        assert tokens == sorted(set(tokens))

    def test_a_second_delivery_has_a_larger_token_than_the_one_it_takes_over_from(
        self, key: Key
    ) -> None:
        """A token given with the task would let both deliveries write."""
        first = key.run("first", "d1")
        key.advance(RUN_LEASE)  # the worker is paused

        second = key.start("first", "d2")

        assert second.token > first.token

    # -- renewing -----------------------------------------------------------------

    def test_a_renewal_that_arrives_after_the_end_revives_nothing(self, key: Key) -> None:
        """A renewal that creates swallows calls with a task that has ended."""
        key.run("first", "d1")
        key.finish("first", "d1")

        replies = key.store.renew([key.running("first", "d1"), key.held("first")])

        assert replies == [False, False]
        assert key.acquire("second").outcome == "created"

    def test_a_paused_worker_does_not_renew_what_another_delivery_has_taken_over(
        self, key: Key
    ) -> None:
        """Renewal compares the delivery, so the old owner learns that it lost."""
        key.run("first", "d1")
        key.advance(RUN_LEASE)
        key.start("first", "d2")

        replies = key.store.renew([key.running("first", "d1"), key.running("first", "d2")])

        assert replies == [False, True]
        # Nor does the old owner get in again while the new one lives.
        assert key.start("first", "d3") == Started("wait")

    def test_a_worker_that_dies_as_its_task_starts_does_not_leave_the_key_to_the_queue_lease(
        self, key: Key
    ) -> None:
        """The thread that renews saw the message waiting, and reports it after the start."""
        key.publish("first")
        key.start("first", "d1", lease_ms=RUN_LEASE)  # acknowledged early
        key.store.renew([key.held("first", waits_as="d1")])

        key.advance(RUN_LEASE)

        assert key.acquire("second").outcome == "created"

    # -- finishing ----------------------------------------------------------------

    def test_a_paused_old_owner_does_not_end_the_new_owners_lock(self, key: Key) -> None:
        """Finish compares the delivery."""
        key.run("first", "d1")
        key.advance(RUN_LEASE)
        key.start("first", "d2")

        late = key.finish("first", "d1")

        assert late == Finished("not_yours")
        assert key.acquire("second").outcome == "duplicate"

    def test_a_paused_old_owner_does_not_end_the_next_tasks_lock(self, key: Key) -> None:
        """A release by key alone would end whatever holds the key by then."""
        key.publish("first")
        key.start("first", "d1", lease_ms=RUN_LEASE)  # early ack
        key.advance(RUN_LEASE)
        key.run("second", "d2")

        late = key.finish("first", "d1")

        assert late == Finished("not_yours")
        assert key.acquire("third").outcome == "duplicate"

    def test_a_twin_that_waited_does_not_run_the_finished_task_again(self, key: Key) -> None:
        """The gate saw the twin, so the end must leave a mark for it."""
        key.run("first", "d1")
        assert key.start("first", "d2").verdict == "wait"
        key.finish("first", "d1")
        key.settle("first", "d1")

        assert key.start("first", "d2") == Started("done")

    def test_a_twin_that_comes_only_after_the_end_does_not_run_the_finished_task_again(
        self, key: Key
    ) -> None:
        """The worker knows that its message may exist twice, and reports that when it settles."""
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        key.settle("first", "d1", mark_done=True)

        assert key.start("first", "d2") == Started("done")

    def test_a_crash_before_the_result_is_stored_lets_the_redelivery_produce_it(
        self, key: Key
    ) -> None:
        """A done mark already at finish would drop the redelivery: no result, no callbacks."""
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        # The worker dies before the result is stored; the broker delivers again.
        key.advance(RUN_LEASE)

        assert key.start("first", "d2").verdict == "run"

    def test_a_redelivery_between_finish_and_acknowledgement_does_not_run_beside_the_next_task(
        self, key: Key
    ) -> None:
        """Released fully at finish, the id would be unknown and run again immediately."""
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        key.run("second", "d2")

        redelivered = key.start("first", "d3")

        assert redelivered == Started("wait")
        key.settle("first", "d1")  # the first delivery continues: result, ack, settle
        assert key.start("first", "d3") == Started("done")

    def test_a_call_that_has_seen_the_result_is_not_swallowed(self, key: Key) -> None:
        """Finish precedes the stored result, and frees the key although settle is to come."""
        key.run("first", "d1")
        key.finish("first", "d1", settle_later=True)
        # The result is stored, .get() returns, and the caller calls again before settle.

        assert key.acquire("second").outcome == "created"

    def test_settling_the_first_task_leaves_the_next_one_alone(self, key: Key) -> None:
        """The next task is admitted between finish and settle; settle is about the id alone."""
        key.run("first", "d1")
        key.publish("second", states=SUCCESS)
        key.finish("first", "d1", settle_later=True)

        key.settle("first", "d1", mark_done=True)

        assert {i: task.state for i, task in key.record().tasks.items()} == {"second": "w"}

    def test_a_hard_time_limit_that_reports_twice_ends_the_task_once(self, key: Key) -> None:
        """Finish is idempotent: the second report changes nothing, nor does it end a successor."""
        key.run("first", "d1")
        reports = [key.finish("first", "d1", state=State.DISCARDED) for _ in range(2)]
        key.run("second", "d2")
        reports.append(key.finish("first", "d1", state=State.DISCARDED))

        assert [report.verdict for report in reports] == ["ended", "not_yours", "not_yours"]
        assert key.acquire("third").outcome == "duplicate"

    # -- retrying -----------------------------------------------------------------

    def test_the_original_message_runs_when_the_worker_died_before_its_retry_was_sent(
        self, key: Key
    ) -> None:
        """A redelivery recognised by its retry count would be dropped, and the task lost."""
        key.run("first", "d1")
        key.retry("first", "d1", copies=True)
        # acks_late: the worker dies before the retry is published; the original comes back.

        assert key.start("first", "d2").verdict == "run"

    def test_a_retry_that_is_delivered_before_the_retry_act_waits(self, key: Key) -> None:
        """The retry is published first: its message may be faster than the act."""
        key.run("first", "d1")

        too_early = key.start("first", "d2")
        key.retry("first", "d1")

        assert too_early == Started("wait")
        assert key.start("first", "d2").verdict == "run"

    def test_the_original_of_a_retried_task_does_not_run_after_the_end(self, key: Key) -> None:
        """With acks_late the original may come back after the retry has ended."""
        key.run("first", "d1")
        key.retry("first", "d1", copies=True)
        key.start("first", "d2")
        ended = key.finish("first", "d2")
        key.settle("first", "d2")

        original = key.start("first", "d3")

        assert ended == Finished("ended", settle=True)
        assert original == Started("done")

    def test_a_task_that_waits_for_its_retry_keeps_its_key(self, key: Key) -> None:
        """A retry is never checked again: no other call may take the key in between."""
        key.run("first", "d1")
        key.retry("first", "d1", lease_ms=10 * QUEUE_LEASE)
        key.advance(9 * QUEUE_LEASE)

        between = key.acquire("second")

        assert between.outcome == "duplicate"
        assert key.start("first", "d2").verdict == "run"

    # -- revoking -----------------------------------------------------------------

    def test_a_revoke_does_not_free_the_key_of_a_task_that_runs(self, key: Key) -> None:
        """A running task ends through finish; its key is held until then."""
        key.run("first", "d1")

        verdict = key.cancel("first")

        assert verdict == "active"
        assert key.acquire("second").outcome == "duplicate"
        assert key.finish("first", "d1").verdict == "ended"

    def test_a_revoked_task_does_not_run_when_its_message_is_delivered(self, key: Key) -> None:
        """A revoke frees the key immediately, so the message must be stopped by a mark."""
        key.publish("first")

        key.cancel("first")

        assert key.acquire("second").outcome == "created"
        assert key.start("first") == Started("superseded", mark="revoked")

    def test_a_revoked_task_does_not_run_after_its_worker_died(self, key: Key) -> None:
        """Started, its worker died, revoked: the redelivery must not run it."""
        key.run("first", "d1")
        key.advance(RUN_LEASE)

        verdict = key.cancel("first")

        assert verdict == "cancelled"
        assert key.start("first", "d2") == Started("superseded", mark="revoked")
        assert key.acquire("second").outcome == "created"

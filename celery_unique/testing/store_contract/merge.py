"""Merged calls: which task takes their values, what its body gets, and what no act loses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_unique.stores.base import Acquired, Started
from celery_unique.stores.record import State
from celery_unique.stores.record_payloads import KEPT_MS
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    Key,
    about,
)


def values(*numbers: int) -> str:
    return json.dumps({"numbers": numbers})


def call(key: Key, task_id: str, *numbers: int, **fields: Any) -> Acquired:
    """A call that is merged, with these numbers."""
    return key.acquire(task_id, merge=values(*numbers), **fields)


def publish(key: Key, task_id: str, *numbers: int, **fields: Any) -> Acquired:
    """A call that is admitted, and its message is out."""
    reply = call(key, task_id, *numbers, **fields)
    assert reply.outcome == "created"
    key.confirm(task_id)
    return reply


def merged_into(reply: Acquired) -> str:
    assert reply.outcome == "merged"
    assert reply.holder is not None
    return reply.holder.task_id


def numbers_of(started: Started) -> list[int]:
    """What the body gets, whatever its message has."""
    assert started.verdict == "run"
    return [
        number for line in started.payload.splitlines() for number in json.loads(line)[1]["numbers"]
    ]


def start(key: Key, task_id: str, delivery: str = "d1", **fields: Any) -> Started:
    return key.start(task_id, delivery, merge=True, **fields)


class MergeContract:
    # -- the table: what becomes of a call ------------------------------------

    @pytest.mark.parametrize("state", [State.PENDING, State.AVAILABLE, State.SCHEDULED])
    def test_a_call_is_merged_into_a_task_that_has_not_started(
        self, key: Key, state: State
    ) -> None:
        call(key, "first", 1, delay_ms=MINUTE if state is State.SCHEDULED else 0)
        if state is not State.PENDING:
            key.confirm("first")

        reply = call(key, "second", 2)

        assert merged_into(reply) == "first"
        assert reply.holder is not None
        assert reply.holder.state is state
        assert list(key.record().tasks) == ["first"]
        assert key.task("first").duplicates == 1
        assert key.task("first").last_duplicate_at == about(key.now())

    def test_the_body_gets_the_values_of_all_calls_in_the_order_of_their_admission(
        self, key: Key
    ) -> None:
        publish(key, "first", 1, 2)
        for n in range(3, 400):  # more than one chunk of lines
            call(key, f"call {n}", n)

        started = start(key, "first")

        assert numbers_of(started) == list(range(1, 400))

    def test_a_task_into_which_nothing_was_merged_runs_with_its_own_values(self, key: Key) -> None:
        publish(key, "first", 1)

        assert numbers_of(start(key, "first")) == [1]

    @pytest.mark.parametrize("state", [State.ACTIVE, State.RETRYABLE])
    def test_a_call_succeeds_a_task_that_has_started_and_later_ones_are_merged_into_it(
        self, key: Key, state: State
    ) -> None:
        publish(key, "first", 1)
        start(key, "first")
        if state is State.RETRYABLE:
            key.retry("first")

        second = call(key, "second", 2)
        third = call(key, "third", 3)
        key.confirm("second")
        fourth = call(key, "fourth", 4)

        assert (second.outcome, second.after) == ("created", "first")
        assert (merged_into(third), merged_into(fourth)) == ("second", "second")
        assert start(key, "second", "d2").verdict == "wait"
        assert numbers_of(start(key, "first", "d1" if state is State.ACTIVE else "d3")) == [1]
        key.finish("first", "d1" if state is State.ACTIVE else "d3", merge=True)
        assert numbers_of(start(key, "second", "d2")) == [2, 3, 4]

    def test_a_call_that_a_body_makes_succeeds_its_own_task(self, key: Key) -> None:
        publish(key, "first", 1)
        start(key, "first")

        reply = call(key, "second", 2, parent="first")

        assert (reply.outcome, reply.after) == ("created", "first")

    def test_a_payload_that_would_be_too_long_starts_a_successor(self, key: Key) -> None:
        limit = 3 * len(values(1))
        publish(key, "first", 1, merge_max_bytes=limit)
        call(key, "second", 2, merge_max_bytes=limit)
        call(key, "third", 3, merge_max_bytes=limit)

        fourth = publish(key, "fourth", 4, merge_max_bytes=limit)
        fifth = call(key, "fifth", 5, merge_max_bytes=limit)

        assert fourth.after == "first"
        assert merged_into(fifth) == "fourth"
        assert start(key, "fourth", "d2").verdict == "wait"
        assert numbers_of(start(key, "first")) == [1, 2, 3]
        key.finish("first", merge=True)
        assert numbers_of(start(key, "fourth", "d2")) == [4, 5]

    def test_successors_of_a_full_successor_run_one_after_the_other(self, key: Key) -> None:
        limit = len(values(1))
        publish(key, "first", 1, merge_max_bytes=limit)
        start(key, "first")
        publish(key, "second", 2, merge_max_bytes=limit)

        third = publish(key, "third", 3, merge_max_bytes=limit)

        assert third.after == "second"
        key.finish("first", merge=True)
        assert start(key, "third", "d3").verdict == "wait"
        assert start(key, "second", "d2").verdict == "run"
        key.finish("second", "d2", merge=True)
        assert start(key, "third", "d3").verdict == "run"

    def test_a_task_whose_own_values_are_not_stored_is_succeeded(self, key: Key) -> None:
        key.publish("first")  # by a call that ignores duplicates

        reply = call(key, "second", 2)

        assert (reply.outcome, reply.after) == ("created", "first")

    def test_an_ended_task_that_is_kept_takes_no_values(self, key: Key) -> None:
        publish(key, "first", 1, keep="c", keep_ms=60 * MINUTE)
        start(key, "first")
        key.finish("first", merge=True)

        reply = call(key, "second", 2, states=EVERY_STATE)

        assert (reply.outcome, reply.after) == ("created", "")
        assert "p" not in key.task("first").flags

    def test_other_work_behind_the_same_key_takes_no_values(self, key: Key) -> None:
        publish(key, "first", 1, arguments="a")

        reply = call(key, "second", 2, arguments="b")

        assert reply.outcome == "rejected"
        assert numbers_of(start(key, "first")) == [1]

    def test_another_task_with_the_same_key_takes_no_values(self, key: Key) -> None:
        publish(key, "first", 1, task_name="one")

        second = publish(key, "second", 2, task_name="other")
        third = call(key, "third", 3, task_name="other")

        assert second.after == "first"
        assert merged_into(third) == "second"
        assert numbers_of(start(key, "first")) == [1]
        key.finish("first", merge=True)
        assert numbers_of(start(key, "second", "d2")) == [2, 3]

    def test_calls_within_their_limit_are_tasks_of_their_own(self, key: Key) -> None:
        publish(key, "first", 1, limit=2)

        second = publish(key, "second", 2, limit=2)
        third = call(key, "third", 3, limit=2)

        assert second.after == ""
        assert merged_into(third) == "second"
        assert numbers_of(start(key, "first")) == [1]
        assert numbers_of(start(key, "second", "d2")) == [2, 3]

    def test_a_call_with_the_id_of_the_task_is_merged_into_it_until_that_starts(
        self, key: Key
    ) -> None:
        publish(key, "first", 1)

        assert merged_into(call(key, "first", 2)) == "first"
        assert numbers_of(start(key, "first")) == [1, 2]
        assert call(key, "first", 3).outcome == "rejected"

    def test_a_released_task_takes_no_more_values_and_runs_with_those_it_has(
        self, key: Key
    ) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        key.release("first")

        third = call(key, "third", 3)

        assert (third.outcome, third.after) == ("created", "")
        assert numbers_of(start(key, "first")) == [1, 2]
        assert numbers_of(start(key, "third", "d3")) == [3]

    # -- an attempt is repeated, or taken back --------------------------------

    def test_a_repeated_attempt_is_merged_once(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)

        again = call(key, "second", 2, again=True)

        assert merged_into(again) == "first"
        assert numbers_of(start(key, "first")) == [1, 2]
        assert merged_into(call(key, "second", 2, again=True)) == "first"

    def test_a_repeated_attempt_finds_its_own_task(self, key: Key) -> None:
        call(key, "first", 1)

        assert call(key, "first", 1, again=True).outcome == "created"

        key.confirm("first")
        assert numbers_of(start(key, "first")) == [1]

    def test_a_repeated_attempt_whose_grace_has_passed_keeps_what_was_merged(
        self, key: Key
    ) -> None:
        call(key, "first", 1)
        call(key, "second", 2)
        key.advance(GRACE + MINUTE)  # its caller was stopped

        assert call(key, "first", 1, again=True).outcome == "created"

        key.confirm("first")
        assert numbers_of(start(key, "first")) == [1, 2]

    def test_the_values_of_a_call_that_is_not_made_are_removed(self, key: Key) -> None:
        publish(key, "first", 1)
        for n in range(2, 5):
            call(key, f"call {n}", n)

        assert key.unmerge("call 3")
        assert not key.unmerge("call 3")
        assert not key.unmerge("first")

        assert numbers_of(start(key, "first")) == [1, 2, 4]
        assert not key.unmerge("call 2")  # it has started

    def test_what_was_removed_makes_room(self, key: Key) -> None:
        limit = 2 * len(values(1))
        publish(key, "first", 1, merge_max_bytes=limit)
        call(key, "second", 2, merge_max_bytes=limit)
        key.unmerge("second")

        assert merged_into(call(key, "third", 3, merge_max_bytes=limit)) == "first"

    # -- the publish of the task fails, or its caller dies ---------------------

    def test_a_failed_publish_takes_no_merged_values_with_it(self, key: Key) -> None:
        call(key, "first", 1)
        call(key, "second", 2)

        assert key.give_back("first") is False

        assert key.help("first") == "go"  # the second call publishes its message under this id
        key.confirm("first")
        assert numbers_of(start(key, "first")) == [2]

    @pytest.mark.parametrize("confirmed", [False, True])
    def test_a_failed_publish_takes_its_own_values_along_if_a_copy_is_published(
        self, key: Key, confirmed: bool
    ) -> None:
        call(key, "first", 1)
        call(key, "second", 2)
        assert key.help("first") == "go"

        if confirmed:
            key.confirm("first")
        assert key.give_back("first") is False  # its caller gets an error

        key.confirm("first")
        assert numbers_of(start(key, "first")) == [2]

    def test_a_failed_publish_into_which_nothing_was_merged_leaves_nothing(self, key: Key) -> None:
        call(key, "first", 1)

        assert key.give_back("first") is True
        assert start(key, "first").mark == "withdrawn"
        assert publish(key, "second", 2).after == ""
        assert numbers_of(start(key, "second")) == [2]

    def test_the_first_caller_dies_and_a_copy_runs_with_all_values(self, key: Key) -> None:
        call(key, "first", 1)
        call(key, "second", 2)

        assert key.help("first") == "go"
        key.confirm("first")

        assert numbers_of(start(key, "first")) == [1, 2]

    def test_a_copy_whose_call_was_not_made_runs_with_the_values_of_the_task(
        self, key: Key
    ) -> None:
        call(key, "first", 1)
        call(key, "second", 2)
        key.help("first")  # its copy is published, and its caller gets an error anyway

        key.unmerge("second")
        key.confirm("first")

        assert numbers_of(start(key, "first")) == [1]

    def test_an_id_that_is_used_again_begins_with_its_own_values(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        key.advance(QUEUE_LEASE + MINUTE)

        publish(key, "first", 3)
        call(key, "fourth", 4)

        assert numbers_of(start(key, "first")) == [3, 4]

    # -- redelivery, retry, lapse ----------------------------------------------

    def test_a_redelivery_gets_the_same_values(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        start(key, "first")
        call(key, "third", 3)  # its successor's
        key.advance(RUN_LEASE + MINUTE)

        assert numbers_of(start(key, "first", "d2")) == [1, 2]
        assert numbers_of(start(key, "first", "d2")) == [1, 2]

    def test_a_retry_gets_the_same_values(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        start(key, "first")
        key.retry("first", lease_ms=QUEUE_LEASE + KEPT_MS)
        call(key, "third", 3)
        key.advance(QUEUE_LEASE + KEPT_MS - MINUTE)

        assert numbers_of(start(key, "first", "d2")) == [1, 2]

    def test_a_redelivery_before_the_result_is_settled_gets_the_same_values(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        start(key, "first")
        key.finish("first", settle_later=True, merge=True)
        key.advance(RUN_LEASE + MINUTE)

        assert numbers_of(start(key, "first", "d2")) == [1, 2]

    def test_a_settled_task_leaves_no_values(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        start(key, "first")
        key.finish("first", settle_later=True, merge=True)
        key.settle("first", merge=True)

        assert start(key, "first").payload == ""

    @pytest.mark.parametrize("later", [0, KEPT_MS - 2 * MINUTE])
    def test_a_message_whose_lock_has_lapsed_runs_with_all_values(
        self, key: Key, later: int
    ) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        key.advance(QUEUE_LEASE + MINUTE + later)
        publish(key, "third", 3)

        started = start(key, "first")

        assert started.lost
        assert numbers_of(started) == [1, 2]
        assert numbers_of(start(key, "third", "d3")) == [3]
        key.finish("first", merge=True)
        assert start(key, "first", "d4").payload == ""

    def test_values_are_not_kept_for_ever(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        key.advance(QUEUE_LEASE + KEPT_MS + MINUTE)

        assert start(key, "first").payload == ""

    def test_values_are_kept_as_long_as_a_worker_holds_the_message(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        for _ in range(3):
            key.advance(QUEUE_LEASE - MINUTE)
            key.store.renew([key.held("first", KEPT_MS, merge=True)])
            key.advance(KEPT_MS - MINUTE)
            key.store.renew([key.held("first", merge=True)])

        assert numbers_of(start(key, "first")) == [1, 2]

    def test_values_are_kept_as_long_as_the_body_runs(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        start(key, "first")
        for _ in range(3):
            key.store.renew([key.running("first", lease_ms=KEPT_MS, merge=True)])
            key.advance(KEPT_MS - MINUTE)

        assert numbers_of(start(key, "first", "d2")) == [1, 2]

    def test_a_worker_that_knows_of_no_payload_gets_it(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)

        assert numbers_of(key.start("first")) == [1, 2]

    # -- revoked, replaced ------------------------------------------------------

    def test_a_revoked_task_takes_the_calls_merged_into_it_along(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)

        assert key.cancel("first") == "cancelled"
        assert start(key, "first").mark == "revoked"

        publish(key, "first", 3)
        assert numbers_of(start(key, "first")) == [3]

    def test_a_replaced_task_takes_the_calls_merged_into_it_along(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)

        key.publish("third", on_conflict="replace")

        assert start(key, "first").by == "third"
        assert start(key, "third", "d3").payload == ""

    def test_a_replacement_that_is_not_published_gives_the_task_back_with_all_values(
        self, key: Key
    ) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        key.acquire("third", on_conflict="replace")

        key.give_back("third")

        assert merged_into(call(key, "fourth", 4)) == "first"
        assert numbers_of(start(key, "first")) == [1, 2, 4]

    # -- debounce ------------------------------------------------------------------

    def test_a_call_with_a_delay_postpones_a_scheduled_task(self, key: Key) -> None:
        publish(key, "first", 1, delay_ms=10 * MINUTE)
        key.advance(9 * MINUTE)

        call(key, "second", 2, delay_ms=10 * MINUTE)

        assert key.task("first").eta == about(key.now() + 10 * MINUTE)
        assert key.task("first").lease == about(key.now() + 10 * MINUTE + QUEUE_LEASE)
        key.advance(2 * MINUTE)
        reply = start(key, "first")
        assert (reply.verdict, reply.wait_ms) == ("wait", about(8 * MINUTE))
        key.advance(9 * MINUTE)
        assert numbers_of(start(key, "first")) == [1, 2]

    def test_a_call_postpones_no_task_beyond_its_longest_wait(self, key: Key) -> None:
        publish(key, "first", 1, delay_ms=10 * MINUTE)
        created_at = key.now()
        for n in range(2, 5):
            key.advance(6 * MINUTE)
            call(key, f"call {n}", n, delay_ms=10 * MINUTE, max_wait_ms=20 * MINUTE)

        assert key.task("first").eta == about(created_at + 20 * MINUTE)
        key.advance(3 * MINUTE)
        assert numbers_of(start(key, "first")) == [1, 2, 3, 4]

    def test_a_call_brings_no_task_forward_and_postpones_none_that_is_due(self, key: Key) -> None:
        publish(key, "first", 1, delay_ms=10 * MINUTE)
        eta = key.task("first").eta
        call(key, "second", 2)
        call(key, "third", 3, delay_ms=MINUTE)
        assert key.task("first").eta == eta
        key.advance(11 * MINUTE)

        call(key, "fourth", 4, delay_ms=10 * MINUTE)

        assert key.task("first").eta == eta
        assert numbers_of(start(key, "first")) == [1, 2, 3, 4]

    def test_an_unpublished_task_is_postponed_and_keeps_its_grace(self, key: Key) -> None:
        call(key, "first", 1, delay_ms=10 * MINUTE)

        call(key, "second", 2, delay_ms=30 * MINUTE)

        assert key.task("first").eta == about(key.now() + 30 * MINUTE)
        assert key.task("first").lease == about(key.now() + GRACE)

    # -- followers ------------------------------------------------------------------

    def test_a_call_whose_id_is_awaited_follows_the_task_that_takes_its_values(
        self, key: Key
    ) -> None:
        publish(key, "first", 1)

        reply = call(key, "second", 2, join="message")
        again = call(key, "second", 2, join="message", again=True)

        assert reply.outcome == again.outcome == "joined"
        assert [i for i, _ in key.followers("first")] == ["second"]
        assert numbers_of(start(key, "first")) == [1, 2]

    def test_a_follower_of_a_lost_task_runs_with_all_of_its_values(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2)
        call(key, "third", 3, join="message")
        key.advance(QUEUE_LEASE + MINUTE)
        key.store.reap(key.text, "reaper", MINUTE)

        assert key.store.promote(key.text, "third", "reaper", GRACE, QUEUE_LEASE) == "publish"

        assert merged_into(call(key, "fourth", 4)) == "third"
        key.confirm("third")
        assert numbers_of(start(key, "third")) == [1, 2, 3, 4]
        assert start(key, "first", "d2").payload == ""  # its message arrives late

    def test_a_follower_of_a_lost_task_follows_one_that_takes_its_values(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2, join="message")
        key.advance(QUEUE_LEASE + MINUTE)
        publish(key, "third", 3)
        key.store.reap(key.text, "reaper", MINUTE)

        assert key.store.promote(key.text, "second", "reaper", GRACE, QUEUE_LEASE) == "follows"

        assert [i for i, _ in key.followers("third")] == ["second"]
        assert numbers_of(start(key, "third")) == [3, 1, 2]

    def test_a_follower_of_a_lost_task_succeeds_one_that_has_started(self, key: Key) -> None:
        publish(key, "first", 1)
        call(key, "second", 2, join="message")
        key.advance(QUEUE_LEASE + MINUTE)
        publish(key, "third", 3)
        start(key, "third", "d3")
        key.store.reap(key.text, "reaper", MINUTE)

        assert key.store.promote(key.text, "second", "reaper", GRACE, QUEUE_LEASE) == "publish"

        key.confirm("second")
        assert start(key, "second").verdict == "wait"
        key.finish("third", "d3", merge=True)
        assert numbers_of(start(key, "second")) == [1, 2]

    # -- many ------------------------------------------------------------------------

    def test_merged_calls_among_others_of_one_batch(self, key: Key) -> None:
        from celery_unique.testing.store_contract.factories import claim, fresh_key

        other = Key(key.store, fresh_key())
        claims = [
            (key.text, claim("a", merge=values(1))),
            (other.text, claim("b")),
            (key.text, claim("c", merge=values(2))),
            (other.text, claim("d")),
        ]

        replies = key.store.acquire_many(claims)

        outcomes = [getattr(reply, "outcome", reply) for reply in replies]
        assert outcomes == ["created", "created", "merged", "duplicate"]
        assert numbers_of(start(key, "a")) == [1, 2]

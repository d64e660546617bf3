"""Lanes: calls that are parked under their key, and called in the order of their admission."""

from __future__ import annotations

from typing import Any

import pytest

from celery_unique.stores.base import Acquired, Called, LockStore, Orphan
from celery_unique.stores.record import State
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    UNTIL_DONE,
    Key,
    about,
    claim,
    fresh_key,
)


def enter(key: Key, task_id: str, **fields: Any) -> Acquired:
    """A call with the strategy ``queue``."""
    key.advance(1)
    return key.acquire(
        task_id, **{"on_conflict": "queue", "join": f"message of {task_id}", **fields}
    )


def park(key: Key, *task_ids: str, **fields: Any) -> None:
    for task_id in task_ids:
        assert enter(key, task_id, **fields).outcome == "queued"


def parked(key: Key) -> list[str]:
    return key.store.parked(key.text)


def reap(key: Key, reaper: str = "worker") -> list[Orphan]:
    return key.store.reap(key.text, reaper, RUN_LEASE)


def called(key: Key) -> list[str]:
    """The ids of those that a reaper calls."""
    return [one.follower_id for one in reap(key) if one.fate == "called"]


def finish(key: Key, task_id: str, **fields: Any) -> list[str]:
    """The ids of those that the end of a task calls."""
    return [one.task_id for one in key.finish(task_id, **fields).called]


class ParkContract:
    def test_a_call_is_admitted_while_nothing_blocks_it(self, key: Key) -> None:
        reply = enter(key, "a")

        assert (reply.outcome, reply.holder, reply.position) == ("created", None, 0)
        assert key.task("a").state == "p"
        assert parked(key) == []

    def test_a_call_is_parked_behind_the_task_that_blocks_it(self, key: Key) -> None:
        key.publish("a")

        reply = enter(key, "b")

        assert (reply.outcome, reply.position) == ("queued", 1)
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("a", State.AVAILABLE)
        assert list(key.record().tasks) == ["a"]
        assert key.task("a").duplicates == 0
        assert key.record().parked == 1

    def test_parked_calls_are_listed_in_the_order_of_their_admission(self, key: Key) -> None:
        key.publish("a")

        replies = [enter(key, task_id) for task_id in ("d", "b", "c")]

        assert [reply.position for reply in replies] == [1, 2, 3]
        assert parked(key) == ["d", "b", "c"]

    def test_a_call_that_is_parked_already_keeps_its_place(self, key: Key) -> None:
        key.publish("a")
        park(key, "b", "c")

        assert enter(key, "b").outcome == "queued"
        assert enter(key, "b", again=True).outcome == "queued"

        assert parked(key) == ["b", "c"]

    def test_a_call_with_the_id_of_a_live_task_is_its_duplicate(self, key: Key) -> None:
        key.publish("a")

        assert enter(key, "a").outcome == "duplicate"
        assert parked(key) == []

    def test_a_limit_admits_as_many_tasks(self, key: Key) -> None:
        outcomes = [enter(key, task_id, limit=3).outcome for task_id in "abcd"]

        assert outcomes == ["created", "created", "created", "queued"]

    def test_a_lane_holds_no_more_than_max_queue(self, key: Key) -> None:
        key.publish("a")
        park(key, "b", "c", max_queue=2)

        reply = enter(key, "d", max_queue=2)

        assert (reply.outcome, reply.position) == ("full", 2)
        assert reply.holder is not None
        assert reply.holder.task_id == "a"
        assert parked(key) == ["b", "c"]

    def test_parked_calls_are_no_followers(self, key: Key) -> None:
        key.publish("a")
        park(key, "b", "c")

        assert key.followers() == []
        assert not key.finish("a", delivery="").followers

    def test_a_call_may_follow_and_another_be_parked(self, key: Key) -> None:
        key.publish("a")
        park(key, "b")
        key.acquire("c", join="message of c")

        assert [follower_id for follower_id, _ in key.followers("a")] == ["c"]
        assert parked(key) == ["b"]

    def test_other_strategies_see_only_the_tasks(self, key: Key) -> None:
        key.publish("a")
        park(key, "b")

        reply = key.acquire("c")

        assert (reply.outcome, reply.holder and reply.holder.task_id) == ("duplicate", "a")

    def test_parked_calls_of_one_key_are_none_of_another(self, key: Key, store: LockStore) -> None:
        other = Key(store, fresh_key())
        key.publish("a")
        park(key, "b")

        assert enter(other, "b").outcome == "created"
        assert parked(key) == ["b"]

    def test_many_calls_are_parked_in_one_exchange(self, key: Key, store: LockStore) -> None:
        key.publish("a")
        claims = [
            (key.text, claim(task_id, on_conflict="queue", join=f"message of {task_id}"))
            for task_id in "dbc"
        ]

        replies = store.acquire_many(claims)

        assert all(isinstance(reply, Acquired) for reply in replies)
        assert [getattr(reply, "position", None) for reply in replies] == [1, 2, 3]
        assert parked(key) == ["d", "b", "c"]


class CallContract:
    def test_the_end_of_a_task_calls_the_oldest(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c")

        finished = key.finish("a")

        assert finished.called == (Called("b", "message of b"),)
        task = key.task("b")
        assert (task.state, task.flags, task.lease) == ("p", "", about(key.now() + GRACE))
        assert parked(key) == ["c"]

    def test_a_task_that_ends_and_is_not_settled_has_made_room(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c")

        assert finish(key, "a", settle_later=True) == ["b"]
        assert finish(key, "a", settle_later=True) == []
        key.settle("a")

        assert parked(key) == ["c"]

    @pytest.mark.parametrize("settle_later", [False, True])
    def test_an_end_that_is_reported_again_returns_the_calls_that_have_their_turn(
        self, key: Key, settle_later: bool
    ) -> None:
        """Its first reply was lost, and with it their messages."""
        key.run("a", states="pswrt", limit=2)
        key.run("b", states="pswrt", limit=2)
        park(key, "c", "d", "e", limit=2)
        assert finish(key, "a") == ["c"]
        assert finish(key, "b", settle_later=settle_later) == ["d"]

        again = key.finish("b", settle_later=settle_later, again=True)

        assert again.verdict == "ended"
        assert again.called == (
            Called("c", "message of c", again=True),
            Called("d", "message of d", again=True),
        )
        assert [key.task(task_id).copies for task_id in ("c", "d")] == [True, True]
        assert parked(key) == ["e"]
        key.confirm("c")
        assert [one.task_id for one in key.finish("b", again=True).called] == ["d"]
        assert not key.finish("b").called

    def test_only_the_delivery_that_started_calls_the_next(self, key: Key) -> None:
        key.run("a")
        park(key, "b")

        assert finish(key, "a", delivery="another") == []
        assert parked(key) == ["b"]

    def test_a_call_that_has_its_turn_blocks_the_others(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c")

        assert finish(key, "a") == ["b"]

        assert called(key) == []
        assert enter(key, "d").outcome == "queued"
        assert parked(key) == ["c", "d"]

    def test_a_new_call_does_not_overtake_those_that_are_parked(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        key.release("a")

        assert enter(key, "c").outcome == "queued"

        assert called(key) == ["b"]
        assert parked(key) == ["c"]

    def test_the_limit_of_the_oldest_decides(self, key: Key) -> None:
        for task_id in "ab":
            assert enter(key, task_id, limit=2).outcome == "created"
            key.confirm(task_id)
            key.start(task_id, delivery=task_id)
        park(key, "c", limit=1)
        park(key, "d", limit=2)

        assert finish(key, "a", delivery="a") == []
        assert finish(key, "b", delivery="b") == ["c", "d"]

    def test_a_message_that_is_confirmed_is_not_stored_any_longer(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        finish(key, "a")

        key.confirm("b")

        assert key.record().following is None
        assert key.task("b").state == "w"

    def test_a_message_that_starts_is_not_stored_any_longer(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        finish(key, "a")

        assert key.start("b").verdict == "run"

        assert key.record().following is None

    def test_a_call_whose_publish_is_not_confirmed_is_called_again(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c")
        finish(key, "a")

        key.advance(GRACE + MINUTE)

        assert key.text in key.store.due(100)
        assert reap(key) == [Orphan("b", "b", "message of b", True, "called")]
        assert key.task("b").copies  # its first message may have been published
        assert called(key) == []
        assert parked(key) == ["c"]

    def test_a_call_that_is_to_be_called_again_is_not_overtaken(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        finish(key, "a")
        key.advance(GRACE + MINUTE)

        assert enter(key, "c").outcome == "queued"

        assert called(key) == ["b"]

    def test_a_message_that_starts_late_is_not_called_again(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        finish(key, "a")
        key.advance(GRACE + MINUTE)

        started = key.start("b", delivery="d2")

        assert (started.verdict, started.lost) == ("run", True)
        assert called(key) == []
        assert key.record().following is None

    def test_a_parked_call_keeps_what_its_task_needs(self, key: Key) -> None:
        key.run("a")
        park(
            key,
            "b",
            delay_ms=30 * MINUTE,
            keep="c",
            keep_ms=90 * MINUTE,
            grace_ms=7 * MINUTE,
            canvas=True,
        )
        eta = key.now() + 30 * MINUTE
        key.advance(10 * MINUTE)

        finish(key, "a")

        task = key.task("b")
        assert (task.task_name, task.keep, task.in_canvas) == ("shop.rebuild", "c", True)
        assert task.eta == about(eta)
        assert task.window_ends == about(key.now() + 90 * MINUTE)
        assert task.lease == about(key.now() + 7 * MINUTE)

    def test_an_eta_that_passed_while_a_call_was_parked_is_gone(self, key: Key) -> None:
        key.run("a")
        park(key, "b", delay_ms=MINUTE)
        key.advance(2 * MINUTE)

        finish(key, "a")

        assert key.task("b").eta == 0

    def test_states_of_a_parked_call_decide_what_it_waits_for(self, key: Key) -> None:
        key.publish("a")
        park(key, "b", states="psw")  # until_start

        key.start("a")

        assert called(key) == ["b"]

    def test_a_kept_end_blocks_a_parked_call_that_names_its_state(self, key: Key) -> None:
        key.run("a", states=EVERY_STATE, keep="c", window_ms=60 * MINUTE)
        park(key, "b", states=UNTIL_DONE + "c", window_ms=60 * MINUTE)

        assert finish(key, "a") == []
        key.advance(61 * MINUTE)

        assert called(key) == ["b"]


class LaneFaultContract:
    def test_a_task_that_waits_for_long_is_looked_at(self, key: Key) -> None:
        key.publish("a")
        park(key, "b")
        key.advance(MINUTE // 2)
        assert key.text not in key.store.due(100)

        key.advance(MINUTE)
        assert key.text in key.store.due(100)
        assert reap(key) == []
        # Not before it has waited for twice as long.
        key.advance(MINUTE)
        assert key.text not in key.store.due(100)
        key.advance(MINUTE)
        assert key.text in key.store.due(100)

    def test_a_lease_that_lapses_calls_the_next(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c")
        assert key.text not in key.store.due(100)

        key.advance(QUEUE_LEASE + MINUTE)

        assert key.text in key.store.due(100)
        assert called(key) == ["b"]
        assert parked(key) == ["c"]

    def test_a_lease_that_was_renewed_moves_the_time_to_look(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        key.advance(QUEUE_LEASE - MINUTE)
        key.store.renew([key.running("a")])
        key.advance(2 * MINUTE)

        assert key.text not in key.store.due(100)
        assert reap(key) == []
        key.advance(QUEUE_LEASE)
        assert key.text in key.store.due(100)

    def test_a_message_that_is_held_moves_the_time_to_look(self, key: Key) -> None:
        key.publish("a")
        park(key, "b")
        key.advance(QUEUE_LEASE - MINUTE)
        key.store.renew([key.held("a")])
        key.advance(2 * MINUTE)

        assert key.text not in key.store.due(100)

    def test_every_place_that_lapses_is_filled(self, key: Key) -> None:
        for task_id in "ab":
            enter(key, task_id, limit=2)
            key.confirm(task_id)
        park(key, "c", "d", "e", limit=2)

        key.advance(QUEUE_LEASE + MINUTE)

        assert called(key) == ["c", "d"]

    def test_a_publish_that_failed_makes_room(self, key: Key) -> None:
        key.acquire("a")
        park(key, "b")

        key.give_back("a")

        assert called(key) == ["b"]

    def test_a_holder_that_is_revoked_makes_room(self, key: Key) -> None:
        key.publish("a")
        park(key, "b")

        key.cancel("a")

        assert called(key) == ["b"]

    def test_a_parked_call_that_is_revoked_has_left_the_lane(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c", "d")

        assert key.cancel("c") == "cancelled"

        assert parked(key) == ["b", "d"]
        # A canvas may wait for its id: the reaper completes it.
        assert [(o.follower_id, o.fate) for o in reap(key)] == [("c", "revoked")]
        key.complete_follower("c")
        assert finish(key, "a") == ["b"]
        key.start("b")
        assert finish(key, "b") == ["d"]

    def test_a_call_that_is_revoked_when_it_has_its_turn_does_not_run(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c")
        finish(key, "a")

        assert key.cancel("b") == "cancelled"

        assert key.start("b").verdict == "superseded"
        orphans = [(one.follower_id, one.fate) for one in reap(key)]
        assert orphans == [("c", "called"), ("b", "revoked")]

    def test_a_revoked_call_whose_message_was_dropped_is_not_published_again(
        self, key: Key
    ) -> None:
        """The end of the task before it was to publish it, and has not confirmed that."""
        key.run("a")
        park(key, "b")
        assert finish(key, "a") == ["b"]
        key.cancel("b")
        assert key.start("b").mark == "revoked"

        key.forget("b")

        assert [(o.follower_id, o.fate) for o in reap(key)] == [("b", "revoked")]
        key.complete_follower("b")
        key.forget("b")
        assert key.record().marks == {}

    def test_a_call_that_was_withdrawn_and_is_called_again_is_dropped(self, key: Key) -> None:
        """Its caller has received no reply, and withdraws it before it leaves the lane."""
        key.run("a")
        park(key, "b")
        assert finish(key, "a") == ["b"]
        assert key.give_back("b")
        assert key.start("b").mark == "withdrawn"

        key.forget("b")
        assert called(key) == ["b"]
        key.complete_follower("b")  # it leaves the lane, and a reaper has its message
        key.forget("b")

        assert key.start("b", "d2").mark == "withdrawn"

    def test_a_parked_call_is_withdrawn_by_its_caller(self, key: Key) -> None:
        key.run("a")
        park(key, "b", "c")

        key.complete_follower("b")

        assert parked(key) == ["c"]
        assert finish(key, "a") == ["c"]

    def test_the_last_one_leaves_an_empty_lane(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        key.complete_follower("b")
        assert key.record().following is None

        park(key, "c")

        assert finish(key, "a") == ["c"]

    def test_a_parked_call_outlives_a_long_outage(self, key: Key) -> None:
        key.run("a")
        park(key, "b")

        key.advance(20 * 24 * 60 * MINUTE)

        assert key.text in key.store.due(100)
        assert called(key) == ["b"]

    def test_an_id_that_was_known_before_may_have_two_messages(self, key: Key) -> None:
        key.run("a")
        key.cancel("b")  # a mark
        park(key, "b")

        finish(key, "a")

        assert key.task("b").copies
        assert key.start("b").verdict == "run"

    def test_a_parked_call_is_not_promoted(self, key: Key) -> None:
        key.publish("a")
        park(key, "b")
        key.advance(QUEUE_LEASE + MINUTE)

        assert key.store.promote(key.text, "b", "worker", GRACE, QUEUE_LEASE) == "gone"

    def test_a_call_that_has_its_turn_does_not_follow_itself(self, key: Key) -> None:
        key.run("a")
        park(key, "b")
        finish(key, "a")

        answer = key.acquire("b", join="message of b")

        assert (answer.outcome, answer.holder and answer.holder.task_id) == ("duplicate", "b")


class LimitContract:
    """``limit`` with the other strategies."""

    @pytest.mark.parametrize(
        ("on_conflict", "outcome"), [("ignore", "duplicate"), ("reject", "rejected")]
    )
    def test_a_call_conflicts_only_with_as_many_tasks_as_its_limit(
        self, key: Key, on_conflict: str, outcome: str
    ) -> None:
        for task_id in "abc":
            key.advance(1)
            key.publish(task_id, on_conflict=on_conflict, limit=3)

        reply = key.acquire("d", on_conflict=on_conflict, limit=3)

        assert reply.outcome == outcome
        assert reply.holder is not None
        assert reply.holder.task_id == "c"
        assert key.acquire("e", on_conflict=on_conflict, limit=4).outcome == "created"

    def test_a_task_that_ends_makes_room(self, key: Key) -> None:
        for task_id in "ab":
            key.publish(task_id, limit=2)
        key.finish("a", delivery="")

        assert key.acquire("c", limit=2).outcome == "created"

    def test_a_replacement_replaces_only_the_oldest(self, key: Key) -> None:
        for task_id in "ab":
            key.advance(1)
            key.publish(task_id, on_conflict="replace", limit=2)

        reply = key.acquire("c", on_conflict="replace", limit=2)

        assert (reply.outcome, reply.replaced) == ("created", ("a",))

    def test_a_replacement_replaces_what_waits_and_not_what_runs(self, key: Key) -> None:
        key.run("a", limit=2)
        key.advance(1)
        key.publish("b", limit=2)

        reply = key.acquire("c", on_conflict="replace", limit=2)

        assert (reply.outcome, reply.replaced) == ("created", ("b",))

    def test_nothing_replaces_as_many_running_tasks_as_the_limit(self, key: Key) -> None:
        for task_id in "ab":
            key.publish(task_id, limit=2)
            key.start(task_id, delivery=task_id)

        assert key.acquire("c", on_conflict="replace", limit=2).outcome == "rejected"

    def test_a_rerun_waits_while_as_many_run_as_the_limit(self, key: Key) -> None:
        key.run("a", limit=2)
        key.advance(1)
        key.publish("b", limit=2)

        waits = key.acquire("c", on_conflict="rerun", limit=2)
        key.start("b", delivery="d2")
        runs = key.acquire("d", on_conflict="rerun", limit=2)

        assert (waits.outcome, waits.holder and waits.holder.task_id) == ("duplicate", "b")
        assert (runs.outcome, runs.after, runs.replaced) == ("created", "b", ())

    def test_a_task_that_calls_itself_within_its_limit_waits_for_nothing(self, key: Key) -> None:
        key.run("a", limit=2)

        reply = key.acquire("b", parent="a", limit=2)

        assert (reply.outcome, reply.after) == ("created", "")

"""Followers: duplicates that take over the outcome of the task that they are a duplicate of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_unique.stores.base import Acquired, Finished, LockStore, Orphan
from celery_unique.stores.record import State
from celery_unique.stores.record_followers import KEPT_MS, Follower
from celery_unique.testing.store_contract.factories import (
    EVERY_STATE,
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


def join(store: LockStore, key: str, task_id: str, **fields: Any) -> Acquired:
    return store.acquire(key, claim(task_id, **{"join": f"message of {task_id}", **fields}))


def joined(store: LockStore, key: str, *task_ids: str, **fields: Any) -> None:
    for task_id in task_ids:
        # They are told of oldest first: no two are of the same millisecond.
        advance(store, 1)
        assert join(store, key, task_id, **fields).outcome == "joined"


def reap(store: LockStore, key: str, reaper: str = "worker") -> list[Orphan]:
    return store.reap(key, reaper, RUN_LEASE)


def orphans(store: LockStore, key: str, reaper: str = "worker") -> list[str]:
    return [one.follower_id for one in reap(store, key, reaper)]


def promote(store: LockStore, key: str, follower_id: str, reaper: str = "worker") -> str:
    return store.promote(key, follower_id, reaper, GRACE, QUEUE_LEASE)


def follow(store: LockStore, key: str, holder: str) -> list[str]:
    return [follower_id for follower_id, _ in store.followers(key, holder)]


def replaced(store: LockStore, key: str, *task_ids: str, **fields: Any) -> None:
    """Each takes the place of the one before; the first is in a canvas."""
    publish(store, key, task_ids[0], canvas=True)
    for task_id in task_ids[1:]:
        advance(store, 1)
        publish(store, key, task_id, on_conflict="replace", **fields)


def follows(store: LockStore, key: str, task_id: str, by: str) -> bool:
    return store.follow(key, claim(task_id, join=f"message of {task_id}"), by)


class SupersededContract:
    """A superseded task of a canvas, whose message a worker has in hand."""

    def test_a_replacement_is_told_which_of_the_replaced_a_canvas_waits_for(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a", canvas=True)

        one = store.acquire(key, claim("b", on_conflict="replace"))
        confirm(store, key, "b")
        other = store.acquire(key, claim("c", on_conflict="replace"))

        assert (one.replaced, one.followers) == (("a",), ("a",))
        assert (other.replaced, other.followers) == (("b",), ())

    def test_a_superseded_task_follows_what_took_its_place(
        self, store: LockStore, key: str
    ) -> None:
        replaced(store, key, "a", "b")

        assert follows(store, key, "a", "b")

        assert store.followers(key, "b") == [("a", Follower("b", "message of a"))]
        assert reap(store, key) == []

    def test_it_follows_the_last_of_a_chain_of_replacements(
        self, store: LockStore, key: str
    ) -> None:
        replaced(store, key, "a", "b", "c")

        assert follows(store, key, "a", "b")

        assert follow(store, key, "c") == ["a"]

    def test_following_twice_is_following_once(self, store: LockStore, key: str) -> None:
        replaced(store, key, "a", "b")

        assert follows(store, key, "a", "b")
        assert follows(store, key, "a", "b")

        assert follow(store, key, "b") == ["a"]

    def test_a_follower_of_what_is_gone_is_an_orphan_and_due(
        self, store: LockStore, key: str
    ) -> None:
        assert follows(store, key, "a", "b")

        assert key in store.due()
        assert [(one.follower_id, one.holder) for one in reap(store, key)] == [("a", "b")]
        assert promote(store, key, "a") == "publish"
        assert task_of(store, key, "a").state == "p"

    def test_a_task_of_the_key_does_not_follow(self, store: LockStore, key: str) -> None:
        publish(store, key, "a")

        assert not follows(store, key, "a", "b")

        assert store.followers(key) == []

    def test_a_task_that_a_canvas_will_follow_stays_until_its_result_is_stored(
        self, store: LockStore, key: str
    ) -> None:
        """The message of the one whose place it took is reached while it ends."""
        replaced(store, key, "a", "b", "c")
        store.start(key, start("c"))

        ended = store.finish(key, finish("c"))

        assert ended == Finished("ended", settle=True, followers=True)
        assert follows(store, key, "a", "b")
        assert reap(store, key) == [], "whoever ends it completes its followers"
        settle(store, key, "c")
        assert orphans(store, key) == ["a"]

    def test_a_task_that_took_the_place_of_a_plain_call_goes_at_once(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a")
        publish(store, key, "b", on_conflict="replace")
        store.start(key, start("b"))

        assert store.finish(key, finish("b")) == Finished("ended")


class JoinContract:
    """Becoming a follower, and having been one."""

    def test_a_duplicate_that_joins_follows_the_holder(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")

        reply = join(store, key, "f")

        assert reply.outcome == "joined"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("h", State.AVAILABLE)
        assert store.followers(key, "h") == [("f", Follower("h", "message of f"))]

    def test_a_call_that_would_join_is_created_where_nothing_blocks_it(
        self, store: LockStore, key: str
    ) -> None:
        reply = join(store, key, "h")

        assert (reply.outcome, store.followers(key)) == ("created", [])

    def test_a_renewal_tells_how_many_follow_the_task(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        before = store.renew([running(key, "h")])
        joined(store, key, "f", "g")

        after = store.renew([running(key, "h"), running(key, "h", "another")])

        assert (before, after) == ([1], [3, 0])

    def test_joining_is_counted_as_a_duplicate(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")

        joined(store, key, "f", "g")

        assert task_of(store, key, "h").duplicates == 2
        assert task_of(store, key, "h").last_duplicate_at == about(now_of(store))

    def test_the_same_call_joins_once(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")

        again = join(store, key, "f", again=True)
        anew = join(store, key, "f")

        assert (again.outcome, anew.outcome) == ("joined", "joined")
        assert again.holder is not None
        assert again.holder.task_id == "h"
        assert follow(store, key, "h") == ["f"]
        assert task_of(store, key, "h").duplicates == 1

    def test_a_message_is_kept_as_it_was_given(self, store: LockStore, key: str) -> None:
        odd = 'größe/量 "quoted" \\ \n and a line\t{"a": [1, {}]}\x01'
        publish(store, key, "h")

        join(store, key, "f:1 ö", join=odd)

        assert store.followers(key, "h") == [("f:1 ö", Follower("h", odd))]

    @pytest.mark.parametrize("strategy", ["reject", "replace", "replace_except_schedule"])
    def test_what_is_rejected_does_not_join(
        self, store: LockStore, key: str, strategy: str
    ) -> None:
        run(store, key, "h")

        reply = join(store, key, "f", on_conflict=strategy)

        assert (reply.outcome, store.followers(key)) == ("rejected", [])

    def test_a_successor_is_created_and_does_not_join(self, store: LockStore, key: str) -> None:
        run(store, key, "h")

        reply = join(store, key, "f", on_conflict="rerun")

        assert (reply.outcome, reply.after, store.followers(key)) == ("created", "h", [])

    def test_rerun_joins_a_task_that_waits(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")

        assert join(store, key, "f", on_conflict="rerun").outcome == "joined"

    @pytest.mark.parametrize(
        "state", [s for s in State if s.value not in ("completed", "discarded", "cancelled")]
    )
    def test_a_task_in_any_live_state_can_be_followed(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "h", state)

        assert join(store, key, "f", states=EVERY_STATE).outcome == "joined"

    @pytest.mark.parametrize("state", [State.COMPLETED, State.DISCARDED, State.CANCELLED])
    def test_a_task_that_has_ended_is_not_followed(
        self, store: LockStore, key: str, state: State
    ) -> None:
        """Its result is there: the caller completes the follower itself."""
        bring_to(store, key, "h", state)

        reply = join(store, key, "f", states=EVERY_STATE)

        assert reply.outcome == "ended"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("h", state)
        assert store.followers(key) == []
        assert task_of(store, key, "h").duplicates == 1

    def test_a_task_whose_result_is_not_stored_yet_is_followed(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        store.finish(key, finish("h", settle_later=True))

        assert join(store, key, "f", states=EVERY_STATE).outcome == "joined"

    def test_a_task_cannot_follow_itself(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")

        reply = join(store, key, "h")

        assert (reply.outcome, store.followers(key)) == ("duplicate", [])

    def test_other_work_behind_the_same_key_is_not_followed(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "h", arguments="one")

        reply = join(store, key, "f", arguments="two")

        assert (reply.outcome, store.followers(key)) == ("duplicate", [])

    def test_calls_of_one_batch_follow_its_first(self, store: LockStore, key: str) -> None:
        other = fresh_key()
        claims = [(k, claim(i, join=i)) for k, i in [(key, "a"), (key, "b"), (other, "c")]]

        replies = store.acquire_many([*claims, (key, claim("d", join="d"))])

        assert [getattr(reply, "outcome", reply) for reply in replies] == [
            "created",
            "joined",
            "created",
            "joined",
        ]
        assert sorted(follow(store, key, "a")) == ["b", "d"]
        assert store.followers(other) == []

    def test_followers_are_told_of_oldest_first(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")

        joined(store, key, "z", "b", "m", "a")

        assert follow(store, key, "h") == ["z", "b", "m", "a"]

    def test_each_task_of_a_key_has_followers_of_its_own(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        publish(store, key, "other", states=SUCCESS)  # beside the one that runs
        joined(store, key, "g", states="w")

        assert (follow(store, key, "h"), follow(store, key, "other")) == (["f"], ["g"])
        assert store.followers(key) == [
            ("f", Follower("h", "message of f")),
            ("g", Follower("other", "message of g")),
        ]

    def test_what_is_read_tells_how_many_follow(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f", "g")

        record, walked = record_of(store, key), dict(store.walk())[key]

        assert record.following == walked.following
        assert record.following is not None
        assert [(g.holder, g.count) for g in record.following.groups.values()] == [("h", 2)]

    def test_a_completed_follower_is_forgotten(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f", "g")

        store.complete_follower(key, "f")
        store.complete_follower(key, "f")
        store.complete_follower(key, "nobody")

        assert follow(store, key, "h") == ["g"]

    def test_nothing_is_left_when_the_last_one_is_completed(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h"))
        store.complete_follower(key, "f")

        settle(store, key, "h")

        assert not record_of(store, key)
        assert (dict(store.walk()), store.due()) == ({}, [])

    def test_completing_where_nothing_is_recorded_creates_nothing(
        self, store: LockStore, key: str
    ) -> None:
        store.complete_follower(key, "f")

        assert (dict(store.walk()), store.followers(key), reap(store, key)) == ({}, [], [])
        assert promote(store, key, "f") == "gone"

    def test_a_follower_that_asks_after_its_holder_died_is_created(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f", "g")
        advance(store, QUEUE_LEASE)

        reply = join(store, key, "f")

        assert reply.outcome == "created"
        assert [i for i, _ in store.followers(key)] == ["g"]

    def test_a_follower_that_asks_after_its_holder_died_may_follow_another(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f", "g")
        advance(store, QUEUE_LEASE)
        publish(store, key, "new")

        reply = join(store, key, "f")

        assert reply.outcome == "joined"
        assert (follow(store, key, "new"), follow(store, key, "h")) == (["f"], ["g"])

    def test_a_follower_that_starts_is_one_no_more(self, store: LockStore, key: str) -> None:
        """A message of its own has turned up: never both run and completed."""
        publish(store, key, "h")
        joined(store, key, "f", "g")

        assert store.start(key, start("f", "d2")).verdict == "run"

        assert follow(store, key, "h") == ["g"]

    def test_followers_and_messages_do_not_block_anybody(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        advance(store, QUEUE_LEASE)

        assert store.acquire(key, claim("new")).outcome == "created"


class CompleteContract:
    """What the acts on a task do to those who follow it."""

    def test_a_task_that_is_followed_stays_until_it_is_settled(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")

        first = store.finish(key, finish("h"))
        second = store.finish(key, finish("h"))

        assert first == second == Finished("ended", True, 1, True)
        assert task_of(store, key, "h").ending
        assert follow(store, key, "h") == ["f"]

    def test_a_task_that_nobody_follows_says_so(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        store.complete_follower(key, "f")

        assert store.finish(key, finish("h")) == Finished("ended", False, 1, False)

    def test_a_task_that_ends_blocks_nobody_while_its_followers_are_completed(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h"))

        assert store.acquire(key, claim("new")).outcome == "created"

    def test_followers_that_are_left_at_settle_are_due(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        joined(store, key, "f", "g")
        store.finish(key, finish("h"))
        store.complete_follower(key, "f")
        assert store.due() == []

        settle(store, key, "h")

        assert record_of(store, key).tasks == {}
        assert store.due() == [key]
        assert reap(store, key) == [Orphan("g", "h", "message of g")]

    @pytest.mark.parametrize("mark_done", [True, False])
    def test_the_fate_of_a_holder_that_is_marked_done_is_told(
        self, store: LockStore, key: str, mark_done: bool
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h"))

        settle(store, key, "h", mark_done=mark_done)

        assert [one.fate for one in reap(store, key)] == ["done" if mark_done else ""]

    def test_the_fate_of_a_holder_that_is_kept_is_done(self, store: LockStore, key: str) -> None:
        run(store, key, "h", keep=SUCCESS)
        joined(store, key, "f")
        store.finish(key, finish("h"))

        settle(store, key, "h")

        assert reap(store, key) == [Orphan("f", "h", "message of f", fate="done")]

    def test_followers_wait_through_a_retry(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        joined(store, key, "f")

        retry(store, key, "h")

        assert (store.due(), orphans(store, key), follow(store, key, "h")) == ([], [], ["f"])

    def test_followers_of_a_task_that_is_given_back_are_due(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("h"))
        joined(store, key, "f")

        store.give_back(key, "h", QUEUE_LEASE)

        assert store.due() == [key]
        assert reap(store, key) == [Orphan("f", "h", "message of f", fate="withdrawn")]

    def test_followers_of_a_revoked_task_are_due(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")

        store.cancel(key, "h", QUEUE_LEASE)

        assert store.due() == [key]
        assert reap(store, key) == [Orphan("f", "h", "message of f", fate="revoked")]

    def test_a_revoke_that_has_no_effect_leaves_followers_alone(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")

        assert store.cancel(key, "h", QUEUE_LEASE) == "active"

        assert (store.due(), follow(store, key, "h")) == ([], ["f"])

    def test_a_revoked_follower_is_due_by_itself(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f", "g")

        assert store.cancel(key, "f", QUEUE_LEASE) == "cancelled"

        assert store.due() == [key]
        assert reap(store, key) == [Orphan("f", "f", "message of f", fate="revoked")]
        assert follow(store, key, "h") == ["g"]

    def test_followers_of_a_replaced_task_follow_its_replacement(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "h")
        joined(store, key, "f", "g")
        store.acquire(key, claim("new", on_conflict="replace"))
        assert follow(store, key, "h") == ["f", "g"]

        confirm(store, key, "new")

        assert (follow(store, key, "h"), follow(store, key, "new")) == ([], ["f", "g"])
        assert (store.due(), orphans(store, key)) == ([], [])

    def test_followers_of_a_whole_chain_follow_the_last_replacement(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a")
        joined(store, key, "f")
        store.acquire(key, claim("b", on_conflict="replace"))
        joined(store, key, "g")  # pending: it can be followed
        store.acquire(key, claim("c", on_conflict="replace"))

        store.renew([held(key, "c")])  # a message in hand is published
        joined(store, key, "i")

        assert follow(store, key, "c") == ["f", "g", "i"]

    def test_followers_of_a_failed_replacement_may_follow_what_is_back(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "h")
        store.acquire(key, claim("new", on_conflict="replace"))
        joined(store, key, "f")
        store.give_back(key, "new", QUEUE_LEASE)

        assert orphans(store, key) == ["f"]
        assert promote(store, key, "f") == "follows"

        assert follow(store, key, "h") == ["f"]

    def test_followers_of_a_released_task_that_runs_stay_with_it(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")

        store.release(key)

        assert (store.due(), orphans(store, key), follow(store, key, "h")) == ([], [], ["f"])
        assert store.finish(key, finish("h")) == Finished("ended", True, 1, True)

    def test_followers_of_a_released_task_that_waits_are_due(
        self, store: LockStore, key: str
    ) -> None:
        """Released, perhaps, since its message is lost: they would wait for a day."""
        publish(store, key, "h")
        joined(store, key, "f")

        store.release(key)

        assert (store.due(), orphans(store, key)) == ([key], ["f"])


class ReapContract:
    """When followers are due, and for whom."""

    def test_nobody_is_due_while_the_holder_lives(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        advance(store, QUEUE_LEASE - MINUTE)

        assert (store.due(), reap(store, key)) == ([], [])

    def test_keys_without_followers_are_never_due(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        advance(store, QUEUE_LEASE)

        assert (store.due(), reap(store, key)) == ([], [])

    def test_followers_of_a_task_that_lapsed_are_due(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f", "g")
        advance(store, QUEUE_LEASE)

        assert store.due() == [key]
        assert reap(store, key) == [
            Orphan("f", "h", "message of f"),
            Orphan("g", "h", "message of g"),
        ]

    def test_followers_of_a_caller_that_died_before_it_published_are_due(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("h"))
        joined(store, key, "f")
        assert store.due() == []
        advance(store, GRACE)

        assert (store.due(), orphans(store, key)) == ([key], ["f"])

    def test_a_start_that_shortens_the_lease_makes_them_due_sooner(
        self, store: LockStore, key: str
    ) -> None:
        """Acknowledged early: the worker's death must be noticed within the run lease."""
        publish(store, key, "h")
        joined(store, key, "f")
        store.start(key, start("h", lease_ms=RUN_LEASE))
        assert store.due() == []
        advance(store, RUN_LEASE)

        assert (store.due(), orphans(store, key)) == ([key], ["f"])

    def test_a_look_that_comes_too_early_finds_the_holder_alive(
        self, store: LockStore, key: str
    ) -> None:
        """Renewing does not write when they are due."""
        publish(store, key, "h")
        joined(store, key, "f")
        store.start(key, start("h", lease_ms=RUN_LEASE))
        advance(store, RUN_LEASE - MINUTE)
        store.renew([running(key, "h", lease_ms=RUN_LEASE)])
        advance(store, MINUTE)
        assert store.due() == [key]

        assert reap(store, key) == []
        assert store.due() == []
        advance(store, RUN_LEASE)
        assert (store.due(), orphans(store, key)) == ([key], ["f"])

    def test_followers_of_a_task_that_was_never_settled_are_due(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h"))
        assert (store.due(), orphans(store, key)) == ([], [])
        advance(store, RUN_LEASE)

        assert store.due() == [key]
        assert reap(store, key) == [Orphan("f", "h", "message of f", fate="done")]

    def test_a_delivery_that_completes_followers_is_alive_while_it_renews(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h"))
        advance(store, RUN_LEASE - MINUTE)
        store.renew([running(key, "h")])
        advance(store, RUN_LEASE - MINUTE)

        assert (store.due(), orphans(store, key), store.due()) == ([key], [], [])

    def test_a_task_that_never_started_is_alive_while_its_followers_are_completed(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h", state=State.CANCELLED, run_lease_ms=RUN_LEASE))

        assert (store.due(), orphans(store, key)) == ([], [])
        advance(store, RUN_LEASE)
        assert (store.due(), orphans(store, key)) == ([key], ["f"])

    def test_the_keys_that_wait_longest_come_first(self, store: LockStore) -> None:
        keys = [fresh_key() for _ in range(5)]
        for delay, key in enumerate(keys):
            publish(store, key, "h", delay_ms=delay * MINUTE)
            joined(store, key, "f")
        advance(store, QUEUE_LEASE + 3 * MINUTE)

        assert (store.due(), store.due(limit=2)) == (keys[:4], keys[:2])

    def test_one_reaper_at_a_time(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        advance(store, QUEUE_LEASE)

        assert orphans(store, key, "first") == ["f"]

        assert (store.due(), orphans(store, key, "second")) == ([], [])
        assert promote(store, key, "f", "second") == "gone"
        assert orphans(store, key, "first") == ["f"]

    def test_another_reaper_goes_on_when_the_claim_has_lapsed(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        advance(store, QUEUE_LEASE)
        reap(store, key, "first")
        advance(store, RUN_LEASE)

        assert (store.due(), orphans(store, key, "second")) == ([key], ["f"])
        assert orphans(store, key, "first") == []

    def test_a_claim_ends_with_the_work(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        advance(store, QUEUE_LEASE)
        reap(store, key, "first")
        publish(store, key, "new")
        promote(store, key, "f", "first")  # it follows the new one

        store.cancel(key, "new", QUEUE_LEASE)

        assert (store.due(), orphans(store, key, "second")) == ([key], ["f"])

    def test_the_orphans_of_one_holder_are_told_of_alone(self, store: LockStore, key: str) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        publish(store, key, "other", states=SUCCESS)
        joined(store, key, "g", states="w")

        store.cancel(key, "other", QUEUE_LEASE)

        assert reap(store, key) == [Orphan("g", "other", "message of g", fate="revoked")]

    def test_followers_outlive_everything_by_days(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        advance(store, QUEUE_LEASE + KEPT_MS - MINUTE)
        assert store.due() == [key]
        store.sweep()

        assert orphans(store, key) == ["f"]

    def test_followers_that_nobody_looks_after_lapse_in_the_end(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        advance(store, QUEUE_LEASE + KEPT_MS)

        assert not record_of(store, key)
        store.sweep()
        assert (orphans(store, key), store.followers(key), dict(store.walk())) == ([], [], {})
        assert store.due() == []


class PromoteContract:
    """A follower becomes a task itself."""

    @pytest.fixture
    def abandoned(self, store: LockStore, key: str) -> str:
        """A key whose holder died; a worker has found its followers."""
        run(store, key, "h", keep=SUCCESS)
        joined(store, key, "f", "g", "i", keep=SUCCESS, window_ms=3 * QUEUE_LEASE)
        advance(store, QUEUE_LEASE)
        assert orphans(store, key) == ["f", "g", "i"]
        return key

    def test_the_first_becomes_a_task_and_the_others_follow_it(
        self, store: LockStore, abandoned: str
    ) -> None:
        assert promote(store, abandoned, "f") == "publish"

        task = task_of(store, abandoned, "f")
        now = now_of(store)
        assert (task.state, task.task_name, task.keep) == ("p", "shop.rebuild", SUCCESS)
        assert task.created_at == about(now)
        assert task.lease == about(now + GRACE)
        assert task.window_ends == about(now + 3 * QUEUE_LEASE)
        assert task.copies
        assert follow(store, abandoned, "f") == ["g", "i"]
        assert store.followers(abandoned)[0] == ("f", Follower("f", "message of f", True))

    def test_the_others_need_no_promotion(self, store: LockStore, abandoned: str) -> None:
        promote(store, abandoned, "f")

        assert promote(store, abandoned, "g") == "follows"

        assert list(record_of(store, abandoned).tasks) == ["f"]
        assert reap(store, abandoned) == []

    def test_promoting_again_says_the_same(self, store: LockStore, abandoned: str) -> None:
        """The answer may have been lost."""
        assert promote(store, abandoned, "f") == "publish"
        assert promote(store, abandoned, "f") == "publish"

        assert promote(store, abandoned, "f", "another") == "gone"
        assert follow(store, abandoned, "f") == ["g", "i"]

    @pytest.mark.parametrize("how", ["confirm", "start", "renew"])
    def test_a_promoted_one_that_is_published_is_a_follower_no_more(
        self, store: LockStore, abandoned: str, how: str
    ) -> None:
        promote(store, abandoned, "f")

        if how == "confirm":
            confirm(store, abandoned, "f")
        elif how == "renew":
            store.renew([held(abandoned, "f")])
        else:
            assert store.start(abandoned, start("f", "d2")).verdict == "run"

        assert [i for i, _ in store.followers(abandoned)] == ["g", "i"]
        assert (store.due(), reap(store, abandoned)) == ([], [])

    def test_a_promoted_one_runs_and_ends_as_any_task(
        self, store: LockStore, abandoned: str
    ) -> None:
        promote(store, abandoned, "f")
        confirm(store, abandoned, "f")
        store.start(abandoned, start("f", "d2"))

        assert store.finish(abandoned, finish("f", "d2")) == Finished("ended", True, 0, True)
        assert follow(store, abandoned, "f") == ["g", "i"]

    def test_a_promoted_one_that_ends_unstarted_is_a_follower_no_more(
        self, store: LockStore, abandoned: str
    ) -> None:
        promote(store, abandoned, "f")

        store.finish(abandoned, finish("f", "d2", state=State.CANCELLED))

        assert [i for i, _ in store.followers(abandoned)] == ["g", "i"]

    def test_a_promoted_one_can_be_revoked(self, store: LockStore, abandoned: str) -> None:
        promote(store, abandoned, "f")

        assert store.cancel(abandoned, "f", QUEUE_LEASE) == "cancelled"

        assert [replace(one, message="") for one in reap(store, abandoned)] == [
            Orphan("g", "f", "", fate="revoked"),
            Orphan("i", "f", "", fate="revoked"),
        ]

    def test_a_promoted_one_is_not_given_back(self, store: LockStore, abandoned: str) -> None:
        """There may be a copy of its message."""
        promote(store, abandoned, "f")

        assert not store.give_back(abandoned, "f", QUEUE_LEASE)

        assert list(record_of(store, abandoned).tasks) == ["f"]

    def test_a_promoted_one_that_asks_again_has_joined(
        self, store: LockStore, abandoned: str
    ) -> None:
        promote(store, abandoned, "f")

        reply = join(store, abandoned, "f", again=True)

        assert reply.outcome == "joined"
        assert reply.holder is not None
        assert reply.holder.task_id == "f"

    def test_a_promoted_one_that_nobody_published_is_found(
        self, store: LockStore, abandoned: str
    ) -> None:
        promote(store, abandoned, "f")
        advance(store, RUN_LEASE)

        assert store.due() == [abandoned]
        assert reap(store, abandoned, "another") == [
            Orphan("f", "f", "message of f", promoted=True),
            Orphan("g", "f", "message of g"),
            Orphan("i", "f", "message of i"),
        ]
        assert promote(store, abandoned, "f", "another") == "publish"
        assert promote(store, abandoned, "g", "another") == "follows"
        assert task_of(store, abandoned, "f").copies

    def test_a_promoted_one_waits_again_for_a_task_that_came_meanwhile(
        self, store: LockStore, abandoned: str
    ) -> None:
        promote(store, abandoned, "f")
        advance(store, RUN_LEASE)
        publish(store, abandoned, "new")
        reap(store, abandoned)

        assert promote(store, abandoned, "f") == "follows"

        assert follow(store, abandoned, "new") == ["f", "g", "i"]
        # Its message may have gone out: the result comes from the new one.
        assert store.start(abandoned, start("f", "d2")).verdict == "done"

    def test_a_promotion_takes_the_mark_away_that_would_drop_the_message(
        self, store: LockStore, abandoned: str
    ) -> None:
        promote(store, abandoned, "f")
        advance(store, RUN_LEASE)
        publish(store, abandoned, "new")
        reap(store, abandoned)
        promote(store, abandoned, "f")  # it waits again, and its id is marked done
        store.cancel(abandoned, "new", QUEUE_LEASE)
        reap(store, abandoned)

        assert promote(store, abandoned, "f") == "publish"

        assert store.start(abandoned, start("f", "d2")).verdict == "run"

    def test_an_orphan_follows_a_task_that_lives(self, store: LockStore, abandoned: str) -> None:
        publish(store, abandoned, "new")

        assert promote(store, abandoned, "f") == "follows"

        assert follow(store, abandoned, "new") == ["f", "g", "i"]
        assert "f" not in record_of(store, abandoned).tasks
        assert reap(store, abandoned) == []

    def test_a_task_that_runs_is_followed_before_one_that_waits(
        self, store: LockStore, abandoned: str
    ) -> None:
        run(store, abandoned, "runs", "d2")
        advance(store, MINUTE)
        publish(store, abandoned, "waits", states=SUCCESS)

        promote(store, abandoned, "f")

        assert follow(store, abandoned, "runs") == ["f", "g", "i"]

    def test_a_task_that_is_done_and_kept_is_followed_rather_than_run_again(
        self, store: LockStore, abandoned: str
    ) -> None:
        """The follower is a duplicate of it; its result is looked for first."""
        run(store, abandoned, "new", "d2", keep=SUCCESS)
        store.finish(abandoned, finish("new", "d2"))

        assert promote(store, abandoned, "f") == "follows"

        assert {(one.holder, one.fate) for one in reap(store, abandoned)} == {("new", "done")}
        # No result there after all:
        assert promote(store, abandoned, "f") == "publish"

    @pytest.mark.parametrize("why", ["released", "in limbo", "cancelled", "other work"])
    def test_a_task_that_promises_nothing_is_not_followed(
        self, store: LockStore, key: str, why: str
    ) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        store.cancel(key, "h", QUEUE_LEASE)
        reap(store, key)
        if why == "released":
            publish(store, key, "other")
            store.release(key, "other")
        elif why == "other work":
            publish(store, key, "other", arguments="f00d")
        elif why == "cancelled":
            publish(store, key, "other", keep="x")
            store.finish(key, finish("other", "d2", state=State.CANCELLED))
        else:
            publish(store, key, "other")
            assert join(store, key, "new", on_conflict="replace").replaced == ("other",)

        assert promote(store, key, "f") == ("follows" if why == "in limbo" else "publish")

        assert follow(store, key, "other") == []

    def test_orphans_of_two_holders_end_up_with_one(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        store.cancel(key, "h", QUEUE_LEASE)
        publish(store, key, "i")
        joined(store, key, "g")
        store.cancel(key, "i", QUEUE_LEASE)
        assert orphans(store, key) == ["f", "g"]

        assert promote(store, key, "f") == "publish"
        assert promote(store, key, "g") == "follows"

        assert follow(store, key, "f") == ["g"]

    def test_who_has_a_living_holder_is_not_promoted(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")

        assert promote(store, key, "f") == "follows"

        assert list(record_of(store, key).tasks) == ["h"]

    def test_who_has_left_is_gone(self, store: LockStore, abandoned: str) -> None:
        store.complete_follower(abandoned, "f")

        assert promote(store, abandoned, "f") == "gone"
        assert promote(store, abandoned, "g") == "publish"

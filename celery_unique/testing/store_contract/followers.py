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
    Key,
    about,
    advance,
    claim,
    fresh_key,
)


def join(key: Key, task_id: str, **fields: Any) -> Acquired:
    return key.acquire(task_id, **{"join": f"message of {task_id}", **fields})


def joined(key: Key, *task_ids: str, **fields: Any) -> None:
    for task_id in task_ids:
        # Listed oldest first: no two join in the same millisecond.
        key.advance(1)
        assert join(key, task_id, **fields).outcome == "joined"


def reap(key: Key, reaper: str = "worker") -> list[Orphan]:
    return key.store.reap(key.text, reaper, RUN_LEASE)


def orphans(key: Key, reaper: str = "worker") -> list[str]:
    return [one.follower_id for one in reap(key, reaper)]


def promote(key: Key, follower_id: str, reaper: str = "worker") -> str:
    return key.store.promote(key.text, follower_id, reaper, GRACE, QUEUE_LEASE)


def follow(key: Key, holder: str) -> list[str]:
    return [follower_id for follower_id, _ in key.followers(holder)]


def replaced(key: Key, *task_ids: str, **fields: Any) -> None:
    """Each replaces the one before; the first is in a canvas."""
    key.publish(task_ids[0], canvas=True)
    for task_id in task_ids[1:]:
        key.advance(1)
        key.publish(task_id, on_conflict="replace", **fields)


def follows(key: Key, task_id: str, by: str, **fields: Any) -> bool:
    return key.store.follow(key.text, claim(task_id, join=f"message of {task_id}", **fields), by)


class SupersededContract:
    """A superseded task of a canvas, whose message a worker has in hand."""

    def test_a_replacement_is_told_which_of_the_replaced_a_canvas_waits_for(self, key: Key) -> None:
        key.publish("a", canvas=True)

        one = key.acquire("b", on_conflict="replace")
        key.confirm("b")
        other = key.acquire("c", on_conflict="replace")

        assert (one.replaced, one.followers) == (("a",), ("a",))
        assert (other.replaced, other.followers) == (("b",), ())

    def test_a_superseded_task_follows_what_took_its_place(self, key: Key) -> None:
        replaced(key, "a", "b")

        assert follows(key, "a", "b")

        assert key.followers("b") == [("a", Follower("b", "message of a"))]
        assert reap(key) == []

    def test_it_follows_the_last_of_a_chain_of_replacements(self, key: Key) -> None:
        replaced(key, "a", "b", "c")

        assert follows(key, "a", "b")

        assert follow(key, "c") == ["a"]

    def test_it_follows_the_newest_task_where_the_mark_of_the_one_in_between_is_gone(
        self, key: Key
    ) -> None:
        """The message of that one was reached first; the task that runs is older than both."""
        key.run("running")
        key.advance(1)
        created_at = key.now()
        key.publish("a", canvas=True, on_conflict="rerun")
        for task_id in ("b", "c"):
            key.advance(1)
            key.publish(task_id, on_conflict="rerun")
        key.store.forget(key.text, "b")

        assert follows(key, "a", "b", created_at=created_at)

        assert key.followers() == [("a", Follower("c", "message of a"))]
        assert reap(key) == []

    def test_it_follows_no_older_task_than_itself(self, key: Key) -> None:
        key.run("running")
        key.advance(1)

        assert follows(key, "a", "b", created_at=key.now())

        assert key.followers() == [("a", Follower("b", "message of a"))]

    def test_following_twice_is_following_once(self, key: Key) -> None:
        replaced(key, "a", "b")

        assert follows(key, "a", "b")
        assert follows(key, "a", "b")

        assert follow(key, "b") == ["a"]

    def test_a_follower_of_what_is_gone_is_an_orphan_and_due(self, key: Key) -> None:
        assert follows(key, "a", "b")

        assert key.text in key.store.due()
        assert [(one.follower_id, one.holder) for one in reap(key)] == [("a", "b")]
        assert promote(key, "a") == "publish"
        assert key.task("a").state == "p"

    def test_a_task_of_the_key_does_not_follow(self, key: Key) -> None:
        key.publish("a")

        assert not follows(key, "a", "b")

        assert key.followers() == []

    def test_a_task_that_a_canvas_will_follow_stays_until_its_result_is_stored(
        self, key: Key
    ) -> None:
        """The message of the one whose place it took is reached while it ends."""
        replaced(key, "a", "b", "c")
        key.start("c")

        ended = key.finish("c")

        assert ended == Finished("ended", settle=True, followers=True)
        assert follows(key, "a", "b")
        assert reap(key) == [], "the delivery that ends it completes its followers"
        key.settle("c")
        assert orphans(key) == ["a"]

    def test_a_task_that_took_the_place_of_a_plain_call_goes_at_once(self, key: Key) -> None:
        key.publish("a")
        key.publish("b", on_conflict="replace")
        key.start("b")

        assert key.finish("b") == Finished("ended")


class JoinContract:
    """Becoming a follower, and having been one."""

    def test_a_duplicate_that_joins_follows_the_holder(self, key: Key) -> None:
        key.publish("h")

        reply = join(key, "f")

        assert reply.outcome == "joined"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("h", State.AVAILABLE)
        assert key.followers("h") == [("f", Follower("h", "message of f"))]

    def test_a_call_that_would_join_is_created_where_nothing_blocks_it(self, key: Key) -> None:
        reply = join(key, "h")

        assert (reply.outcome, key.followers()) == ("created", [])

    def test_a_renewal_tells_how_many_follow_the_task(self, key: Key) -> None:
        key.run("h")
        before = key.store.renew([key.running("h")])
        joined(key, "f", "g")

        after = key.store.renew([key.running("h"), key.running("h", "another")])

        assert (before, after) == ([1], [3, 0])

    def test_joining_is_counted_as_a_duplicate(self, key: Key) -> None:
        key.publish("h")

        joined(key, "f", "g")

        assert key.task("h").duplicates == 2
        assert key.task("h").last_duplicate_at == about(key.now())

    def test_the_same_call_joins_once(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")

        again = join(key, "f", again=True)
        anew = join(key, "f")

        assert (again.outcome, anew.outcome) == ("joined", "joined")
        assert again.holder is not None
        assert again.holder.task_id == "h"
        assert follow(key, "h") == ["f"]
        assert key.task("h").duplicates == 1

    def test_a_message_is_kept_as_it_was_given(self, key: Key) -> None:
        odd = 'größe/量 "quoted" \\ \n and a line\t{"a": [1, {}]}\x01'
        key.publish("h")

        join(key, "f:1 ö", join=odd)

        assert key.followers("h") == [("f:1 ö", Follower("h", odd))]

    @pytest.mark.parametrize("strategy", ["reject", "replace", "replace_except_schedule"])
    def test_what_is_rejected_does_not_join(self, key: Key, strategy: str) -> None:
        key.run("h")

        reply = join(key, "f", on_conflict=strategy)

        assert (reply.outcome, key.followers()) == ("rejected", [])

    def test_a_successor_is_created_and_does_not_join(self, key: Key) -> None:
        key.run("h")

        reply = join(key, "f", on_conflict="rerun")

        assert (reply.outcome, reply.after, key.followers()) == ("created", "h", [])

    def test_rerun_joins_a_task_that_waits(self, key: Key) -> None:
        key.publish("h")

        assert join(key, "f", on_conflict="rerun").outcome == "joined"

    @pytest.mark.parametrize(
        "state", [s for s in State if s.value not in ("completed", "discarded", "cancelled")]
    )
    def test_a_task_in_any_live_state_can_be_followed(self, key: Key, state: State) -> None:
        key.bring_to("h", state)

        assert join(key, "f", states=EVERY_STATE).outcome == "joined"

    @pytest.mark.parametrize("state", [State.COMPLETED, State.DISCARDED, State.CANCELLED])
    def test_a_task_that_has_ended_is_not_followed(self, key: Key, state: State) -> None:
        """Its result is there: the caller completes the follower itself."""
        key.bring_to("h", state)

        reply = join(key, "f", states=EVERY_STATE)

        assert reply.outcome == "ended"
        assert reply.holder is not None
        assert (reply.holder.task_id, reply.holder.state) == ("h", state)
        assert key.followers() == []
        assert key.task("h").duplicates == 1

    def test_a_task_whose_result_is_not_stored_yet_is_followed(self, key: Key) -> None:
        key.run("h")
        key.finish("h", settle_later=True)

        assert join(key, "f", states=EVERY_STATE).outcome == "joined"

    def test_a_task_cannot_follow_itself(self, key: Key) -> None:
        key.publish("h")

        reply = join(key, "h")

        assert (reply.outcome, key.followers()) == ("duplicate", [])

    def test_other_work_behind_the_same_key_is_not_followed(self, key: Key) -> None:
        key.publish("h", arguments="one")

        reply = join(key, "f", arguments="two")

        assert (reply.outcome, key.followers()) == ("duplicate", [])

    def test_calls_of_one_batch_follow_its_first(self, key: Key) -> None:
        other = fresh_key()
        claims = [
            (k, claim(i, join=i)) for k, i in [(key.text, "a"), (key.text, "b"), (other, "c")]
        ]

        replies = key.store.acquire_many([*claims, (key.text, claim("d", join="d"))])

        assert [getattr(reply, "outcome", reply) for reply in replies] == [
            "created",
            "joined",
            "created",
            "joined",
        ]
        assert sorted(follow(key, "a")) == ["b", "d"]
        assert key.store.followers(other) == []

    def test_followers_are_told_of_oldest_first(self, key: Key) -> None:
        key.publish("h")

        joined(key, "z", "b", "m", "a")

        assert follow(key, "h") == ["z", "b", "m", "a"]

    def test_each_task_of_a_key_has_followers_of_its_own(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.publish("other", states=SUCCESS)  # beside the one that runs
        joined(key, "g", states="w")

        assert (follow(key, "h"), follow(key, "other")) == (["f"], ["g"])
        assert key.followers() == [
            ("f", Follower("h", "message of f")),
            ("g", Follower("other", "message of g")),
        ]

    def test_what_is_read_tells_how_many_follow(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f", "g")

        record, walked = key.record(), dict(key.store.walk())[key.text]

        assert record.following == walked.following
        assert record.following is not None
        assert [(g.holder, g.count) for g in record.following.groups.values()] == [("h", 2)]

    def test_a_completed_follower_is_forgotten(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f", "g")

        key.complete_follower("f")
        key.complete_follower("f")
        key.complete_follower("unknown")

        assert follow(key, "h") == ["g"]

    def test_nothing_is_left_when_the_last_one_is_completed(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.finish("h")
        key.complete_follower("f")

        key.settle("h")

        assert not key.record()
        assert (dict(key.store.walk()), key.store.due()) == ({}, [])

    def test_completing_where_nothing_is_recorded_creates_nothing(self, key: Key) -> None:
        key.complete_follower("f")

        assert (dict(key.store.walk()), key.followers(), reap(key)) == ({}, [], [])
        assert promote(key, "f") == "gone"

    def test_a_follower_that_asks_after_its_holder_died_is_created(self, key: Key) -> None:
        key.run("h")
        joined(key, "f", "g")
        key.advance(QUEUE_LEASE)

        reply = join(key, "f")

        assert reply.outcome == "created"
        assert [i for i, _ in key.followers()] == ["g"]

    def test_a_follower_that_asks_after_its_holder_died_may_follow_another(self, key: Key) -> None:
        key.run("h")
        joined(key, "f", "g")
        key.advance(QUEUE_LEASE)
        key.publish("new")

        reply = join(key, "f")

        assert reply.outcome == "joined"
        assert (follow(key, "new"), follow(key, "h")) == (["f"], ["g"])

    def test_a_follower_that_starts_is_one_no_more(self, key: Key) -> None:
        """A message of its own has turned up: never both run and completed."""
        key.publish("h")
        joined(key, "f", "g")

        assert key.start("f", "d2").verdict == "run"

        assert follow(key, "h") == ["g"]

    def test_followers_and_messages_do_not_block_anybody(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.advance(QUEUE_LEASE)

        assert key.acquire("new").outcome == "created"


class CompleteContract:
    """What the acts on a task do to those who follow it."""

    def test_a_task_that_is_followed_stays_until_it_is_settled(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")

        first = key.finish("h")
        second = key.finish("h")

        assert first == second == Finished("ended", True, 1, True)
        assert key.task("h").ending
        assert follow(key, "h") == ["f"]

    def test_a_task_that_nobody_follows_says_so(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.complete_follower("f")

        assert key.finish("h") == Finished("ended", False, 1, False)

    def test_a_task_that_ends_blocks_nobody_while_its_followers_are_completed(
        self, key: Key
    ) -> None:
        key.run("h")
        joined(key, "f")
        key.finish("h")

        assert key.acquire("new").outcome == "created"

    def test_followers_that_are_left_at_settle_are_due(self, key: Key) -> None:
        key.run("h")
        joined(key, "f", "g")
        key.finish("h")
        key.complete_follower("f")
        assert key.store.due() == []

        key.settle("h")

        assert key.record().tasks == {}
        assert key.store.due() == [key.text]
        assert reap(key) == [Orphan("g", "h", "message of g")]

    @pytest.mark.parametrize("mark_done", [True, False])
    def test_the_fate_of_a_holder_that_is_marked_done_is_told(
        self, key: Key, mark_done: bool
    ) -> None:
        key.run("h")
        joined(key, "f")
        key.finish("h")

        key.settle("h", mark_done=mark_done)

        assert [one.fate for one in reap(key)] == ["done" if mark_done else ""]

    def test_the_fate_of_a_holder_that_is_kept_is_done(self, key: Key) -> None:
        key.run("h", keep=SUCCESS)
        joined(key, "f")
        key.finish("h")

        key.settle("h")

        assert reap(key) == [Orphan("f", "h", "message of f", fate="done")]

    def test_followers_wait_through_a_retry(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")

        key.retry("h")

        assert (key.store.due(), orphans(key), follow(key, "h")) == ([], [], ["f"])

    def test_followers_of_a_task_that_is_given_back_are_due(self, key: Key) -> None:
        key.acquire("h")
        joined(key, "f")

        key.give_back("h")

        assert key.store.due() == [key.text]
        assert reap(key) == [Orphan("f", "h", "message of f", fate="withdrawn")]

    def test_followers_of_a_revoked_task_are_due(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")

        key.cancel("h")

        assert key.store.due() == [key.text]
        assert reap(key) == [Orphan("f", "h", "message of f", fate="revoked")]

    def test_a_revoke_that_has_no_effect_leaves_followers_alone(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")

        assert key.cancel("h") == "active"

        assert (key.store.due(), follow(key, "h")) == ([], ["f"])

    def test_a_revoked_follower_is_due_by_itself(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f", "g")

        assert key.cancel("f") == "cancelled"

        assert key.store.due() == [key.text]
        assert reap(key) == [Orphan("f", "f", "message of f", fate="revoked")]
        assert follow(key, "h") == ["g"]

    def test_followers_of_a_replaced_task_follow_its_replacement(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f", "g")
        key.acquire("new", on_conflict="replace")
        assert follow(key, "h") == ["f", "g"]

        key.confirm("new")

        assert (follow(key, "h"), follow(key, "new")) == ([], ["f", "g"])
        assert (key.store.due(), orphans(key)) == ([], [])

    def test_followers_of_a_whole_chain_follow_the_last_replacement(self, key: Key) -> None:
        key.publish("a")
        joined(key, "f")
        key.acquire("b", on_conflict="replace")
        joined(key, "g")  # pending: it can be followed
        key.acquire("c", on_conflict="replace")

        key.store.renew([key.held("c")])  # a message in hand is published
        joined(key, "i")

        assert follow(key, "c") == ["f", "g", "i"]

    def test_followers_of_a_failed_replacement_may_follow_what_is_back(self, key: Key) -> None:
        key.publish("h")
        key.acquire("new", on_conflict="replace")
        joined(key, "f")
        key.give_back("new")

        assert orphans(key) == ["f"]
        assert promote(key, "f") == "follows"

        assert follow(key, "h") == ["f"]

    def test_followers_of_a_released_task_that_runs_stay_with_it(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")

        key.release()

        assert (key.store.due(), orphans(key), follow(key, "h")) == ([], [], ["f"])
        assert key.finish("h") == Finished("ended", True, 1, True)

    def test_followers_of_a_released_task_that_waits_are_due(self, key: Key) -> None:
        """Released, perhaps, since its message is lost: they would wait for a day."""
        key.publish("h")
        joined(key, "f")

        key.release()

        assert (key.store.due(), orphans(key)) == ([key.text], ["f"])


class ReapContract:
    """When followers are due, and for whom."""

    def test_nobody_is_due_while_the_holder_lives(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.advance(QUEUE_LEASE - MINUTE)

        assert (key.store.due(), reap(key)) == ([], [])

    def test_keys_without_followers_are_never_due(self, key: Key) -> None:
        key.run("h")
        key.advance(QUEUE_LEASE)

        assert (key.store.due(), reap(key)) == ([], [])

    def test_followers_of_a_task_that_lapsed_are_due(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f", "g")
        key.advance(QUEUE_LEASE)

        assert key.store.due() == [key.text]
        assert reap(key) == [
            Orphan("f", "h", "message of f"),
            Orphan("g", "h", "message of g"),
        ]

    def test_followers_of_a_caller_that_died_before_it_published_are_due(self, key: Key) -> None:
        key.acquire("h")
        joined(key, "f")
        assert key.store.due() == []
        key.advance(GRACE)

        assert (key.store.due(), orphans(key)) == ([key.text], ["f"])

    def test_a_start_that_shortens_the_lease_makes_them_due_sooner(self, key: Key) -> None:
        """Acknowledged early: the worker's death must be noticed within the run lease."""
        key.publish("h")
        joined(key, "f")
        key.start("h", lease_ms=RUN_LEASE)
        assert key.store.due() == []
        key.advance(RUN_LEASE)

        assert (key.store.due(), orphans(key)) == ([key.text], ["f"])

    def test_a_look_that_comes_too_early_finds_the_holder_alive(self, key: Key) -> None:
        """Renewing does not write when they are due."""
        key.publish("h")
        joined(key, "f")
        key.start("h", lease_ms=RUN_LEASE)
        key.advance(RUN_LEASE - MINUTE)
        key.store.renew([key.running("h", lease_ms=RUN_LEASE)])
        key.advance(MINUTE)
        assert key.store.due() == [key.text]

        assert reap(key) == []
        assert key.store.due() == []
        key.advance(RUN_LEASE)
        assert (key.store.due(), orphans(key)) == ([key.text], ["f"])

    def test_followers_of_a_task_that_was_never_settled_are_due(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.finish("h")
        assert (key.store.due(), orphans(key)) == ([], [])
        key.advance(RUN_LEASE)

        assert key.store.due() == [key.text]
        assert reap(key) == [Orphan("f", "h", "message of f", fate="done")]

    def test_a_delivery_that_completes_followers_is_alive_while_it_renews(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.finish("h")
        key.advance(RUN_LEASE - MINUTE)
        key.store.renew([key.running("h")])
        key.advance(RUN_LEASE - MINUTE)

        assert (key.store.due(), orphans(key), key.store.due()) == ([key.text], [], [])

    def test_a_task_that_never_started_is_alive_while_its_followers_are_completed(
        self, key: Key
    ) -> None:
        key.publish("h")
        joined(key, "f")
        key.finish("h", state=State.CANCELLED, run_lease_ms=RUN_LEASE)

        assert (key.store.due(), orphans(key)) == ([], [])
        key.advance(RUN_LEASE)
        assert (key.store.due(), orphans(key)) == ([key.text], ["f"])

    def test_the_keys_that_wait_longest_come_first(self, store: LockStore) -> None:
        keys = [Key(store, fresh_key()) for _ in range(5)]
        for delay, key in enumerate(keys):
            key.publish("h", delay_ms=delay * MINUTE)
            joined(key, "f")
        advance(store, QUEUE_LEASE + 3 * MINUTE)
        texts = [key.text for key in keys]

        assert (store.due(), store.due(limit=2)) == (texts[:4], texts[:2])

    def test_one_reaper_at_a_time(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")
        key.advance(QUEUE_LEASE)

        assert orphans(key, "first") == ["f"]

        assert (key.store.due(), orphans(key, "second")) == ([], [])
        assert promote(key, "f", "second") == "gone"
        assert orphans(key, "first") == ["f"]

    def test_another_reaper_goes_on_when_the_claim_has_lapsed(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")
        key.advance(QUEUE_LEASE)
        reap(key, "first")
        key.advance(RUN_LEASE)

        assert (key.store.due(), orphans(key, "second")) == ([key.text], ["f"])
        assert orphans(key, "first") == []

    def test_a_claim_ends_with_the_work(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")
        key.advance(QUEUE_LEASE)
        reap(key, "first")
        key.publish("new")
        promote(key, "f", "first")  # it follows the new one

        key.cancel("new")

        assert (key.store.due(), orphans(key, "second")) == ([key.text], ["f"])

    def test_the_orphans_of_one_holder_are_told_of_alone(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.publish("other", states=SUCCESS)
        joined(key, "g", states="w")

        key.cancel("other")

        assert reap(key) == [Orphan("g", "other", "message of g", fate="revoked")]

    def test_followers_outlive_everything_by_days(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")
        key.advance(QUEUE_LEASE + KEPT_MS - MINUTE)
        assert key.store.due() == [key.text]
        key.store.sweep()

        assert orphans(key) == ["f"]

    def test_followers_that_nobody_looks_after_lapse_in_the_end(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")
        key.advance(QUEUE_LEASE + KEPT_MS)

        assert not key.record()
        key.store.sweep()
        assert (orphans(key), key.followers(), dict(key.store.walk())) == ([], [], {})
        assert key.store.due() == []


class PromoteContract:
    """A follower becomes a task itself."""

    @pytest.fixture
    def abandoned(self, key: Key) -> Key:
        """A key whose holder died; a worker has found its followers."""
        key.run("h", keep=SUCCESS)
        joined(key, "f", "g", "i", keep=SUCCESS, window_ms=3 * QUEUE_LEASE)
        key.advance(QUEUE_LEASE)
        assert orphans(key) == ["f", "g", "i"]
        return key

    def test_the_first_becomes_a_task_and_the_others_follow_it(self, abandoned: Key) -> None:
        assert promote(abandoned, "f") == "publish"

        task = abandoned.task("f")
        now = abandoned.now()
        assert (task.state, task.task_name, task.keep) == ("p", "shop.rebuild", SUCCESS)
        assert task.created_at == about(now)
        assert task.lease == about(now + GRACE)
        assert task.window_ends == about(now + 3 * QUEUE_LEASE)
        assert task.copies
        assert follow(abandoned, "f") == ["g", "i"]
        assert abandoned.followers()[0] == ("f", Follower("f", "message of f", True))

    def test_the_others_need_no_promotion(self, abandoned: Key) -> None:
        promote(abandoned, "f")

        assert promote(abandoned, "g") == "follows"

        assert list(abandoned.record().tasks) == ["f"]
        assert reap(abandoned) == []

    def test_promoting_again_says_the_same(self, abandoned: Key) -> None:
        """The answer may have been lost."""
        assert promote(abandoned, "f") == "publish"
        assert promote(abandoned, "f") == "publish"

        assert promote(abandoned, "f", "another") == "gone"
        assert follow(abandoned, "f") == ["g", "i"]

    @pytest.mark.parametrize("how", ["confirm", "start", "renew"])
    def test_a_promoted_one_that_is_published_is_a_follower_no_more(
        self, abandoned: Key, how: str
    ) -> None:
        promote(abandoned, "f")

        if how == "confirm":
            abandoned.confirm("f")
        elif how == "renew":
            abandoned.store.renew([abandoned.held("f")])
        else:
            assert abandoned.start("f", "d2").verdict == "run"

        assert [i for i, _ in abandoned.followers()] == ["g", "i"]
        assert (abandoned.store.due(), reap(abandoned)) == ([], [])

    def test_a_promoted_one_runs_and_ends_as_any_task(self, abandoned: Key) -> None:
        promote(abandoned, "f")
        abandoned.confirm("f")
        abandoned.start("f", "d2")

        assert abandoned.finish("f", "d2") == Finished("ended", True, 0, True)
        assert follow(abandoned, "f") == ["g", "i"]

    def test_a_promoted_one_that_ends_unstarted_is_a_follower_no_more(self, abandoned: Key) -> None:
        promote(abandoned, "f")

        abandoned.finish("f", "d2", state=State.CANCELLED)

        assert [i for i, _ in abandoned.followers()] == ["g", "i"]

    def test_a_promoted_one_can_be_revoked(self, abandoned: Key) -> None:
        promote(abandoned, "f")

        assert abandoned.cancel("f") == "cancelled"

        assert [replace(one, message="") for one in reap(abandoned)] == [
            Orphan("g", "f", "", fate="revoked"),
            Orphan("i", "f", "", fate="revoked"),
        ]

    def test_a_promoted_one_is_not_given_back(self, abandoned: Key) -> None:
        """There may be a copy of its message."""
        promote(abandoned, "f")

        assert not abandoned.give_back("f")

        assert list(abandoned.record().tasks) == ["f"]

    def test_a_promoted_one_that_asks_again_has_joined(self, abandoned: Key) -> None:
        promote(abandoned, "f")

        reply = join(abandoned, "f", again=True)

        assert reply.outcome == "joined"
        assert reply.holder is not None
        assert reply.holder.task_id == "f"

    def test_a_promoted_one_that_nobody_published_is_found(self, abandoned: Key) -> None:
        promote(abandoned, "f")
        abandoned.advance(RUN_LEASE)

        assert abandoned.store.due() == [abandoned.text]
        assert reap(abandoned, "another") == [
            Orphan("f", "f", "message of f", promoted=True),
            Orphan("g", "f", "message of g"),
            Orphan("i", "f", "message of i"),
        ]
        assert promote(abandoned, "f", "another") == "publish"
        assert promote(abandoned, "g", "another") == "follows"
        assert abandoned.task("f").copies

    def test_a_promoted_one_waits_again_for_a_task_that_came_meanwhile(
        self, abandoned: Key
    ) -> None:
        promote(abandoned, "f")
        abandoned.advance(RUN_LEASE)
        abandoned.publish("new")
        reap(abandoned)

        assert promote(abandoned, "f") == "follows"

        assert follow(abandoned, "new") == ["f", "g", "i"]
        # Its message may have gone out: the result comes from the new one.
        assert abandoned.start("f", "d2").verdict == "done"

    def test_a_promotion_takes_the_mark_away_that_would_drop_the_message(
        self, abandoned: Key
    ) -> None:
        promote(abandoned, "f")
        abandoned.advance(RUN_LEASE)
        abandoned.publish("new")
        reap(abandoned)
        promote(abandoned, "f")  # it waits again, and its id is marked done
        abandoned.cancel("new")
        reap(abandoned)

        assert promote(abandoned, "f") == "publish"

        assert abandoned.start("f", "d2").verdict == "run"

    def test_an_orphan_follows_a_task_that_lives(self, abandoned: Key) -> None:
        abandoned.publish("new")

        assert promote(abandoned, "f") == "follows"

        assert follow(abandoned, "new") == ["f", "g", "i"]
        assert "f" not in abandoned.record().tasks
        assert reap(abandoned) == []

    def test_a_task_that_runs_is_followed_before_one_that_waits(self, abandoned: Key) -> None:
        abandoned.run("runs", "d2")
        abandoned.advance(MINUTE)
        abandoned.publish("waits", states=SUCCESS)

        promote(abandoned, "f")

        assert follow(abandoned, "runs") == ["f", "g", "i"]

    def test_a_task_that_is_done_and_kept_is_followed_rather_than_run_again(
        self, abandoned: Key
    ) -> None:
        """The follower is a duplicate of it; its result is looked for first."""
        abandoned.run("new", "d2", keep=SUCCESS)
        abandoned.finish("new", "d2")

        assert promote(abandoned, "f") == "follows"

        assert {(one.holder, one.fate) for one in reap(abandoned)} == {("new", "done")}
        # No result there after all:
        assert promote(abandoned, "f") == "publish"

    @pytest.mark.parametrize("why", ["released", "in limbo", "cancelled", "other work"])
    def test_a_task_that_promises_nothing_is_not_followed(self, key: Key, why: str) -> None:
        key.publish("h")
        joined(key, "f")
        key.cancel("h")
        reap(key)
        if why == "released":
            key.publish("other")
            key.release("other")
        elif why == "other work":
            key.publish("other", arguments="f00d")
        elif why == "cancelled":
            key.publish("other", keep="x")
            key.finish("other", "d2", state=State.CANCELLED)
        else:
            key.publish("other")
            assert join(key, "new", on_conflict="replace").replaced == ("other",)

        assert promote(key, "f") == ("follows" if why == "in limbo" else "publish")

        assert follow(key, "other") == []

    def test_orphans_of_two_holders_end_up_with_one(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")
        key.cancel("h")
        key.publish("i")
        joined(key, "g")
        key.cancel("i")
        assert orphans(key) == ["f", "g"]

        assert promote(key, "f") == "publish"
        assert promote(key, "g") == "follows"

        assert follow(key, "f") == ["g"]

    def test_who_has_a_living_holder_is_not_promoted(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")

        assert promote(key, "f") == "follows"

        assert list(key.record().tasks) == ["h"]

    def test_who_has_left_is_gone(self, abandoned: Key) -> None:
        abandoned.complete_follower("f")

        assert promote(abandoned, "f") == "gone"
        assert promote(abandoned, "g") == "publish"

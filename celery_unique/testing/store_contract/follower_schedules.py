"""What goes wrong without each rule of followers, as schedules that go right.

As in ``schedules``: each test plays the order that goes wrong when its rule is left out. A follower
is lost if no worker completes or runs it; a canvas then hangs.
"""

from __future__ import annotations

from celery_unique.stores.base import Orphan
from celery_unique.testing.store_contract.factories import (
    RUN_LEASE,
    SUCCESS,
    Key,
)
from celery_unique.testing.store_contract.followers import (
    follow,
    join,
    joined,
    orphans,
    promote,
    reap,
)


def found_due(key: Key, reaper: str = "worker") -> list[str]:
    """The orphans that any reaping worker finds."""
    return orphans(key, reaper) if key.text in key.store.due() else []


def abandoned(key: Key) -> None:
    """The holder's worker died, acknowledged early; two calls follow it."""
    key.publish("h")
    joined(key, "f", "g")
    key.start("h", lease_ms=RUN_LEASE)
    key.advance(RUN_LEASE)


class FollowerScheduleContract:
    # -- the holder ends -------------------------------------------------------------

    def test_followers_survive_a_worker_that_dies_before_it_completed_them(self, key: Key) -> None:
        key.run("h")
        joined(key, "f")
        key.finish("h")
        # The worker dies here: the result may be stored or not.
        key.advance(RUN_LEASE)

        assert found_due(key) == ["f"]

    def test_followers_survive_a_worker_that_dies_while_it_completes_them(self, key: Key) -> None:
        """Removed before they are completed, the second one would be lost."""
        key.run("h")
        joined(key, "f", "g")
        key.finish("h")
        assert follow(key, "h") == ["f", "g"]
        key.complete_follower("f")
        # The worker dies here.
        key.advance(RUN_LEASE)

        assert found_due(key) == ["g"]

    def test_nobody_else_completes_followers_while_the_worker_lives_that_does(
        self, key: Key
    ) -> None:
        """Else their chords are counted twice."""
        key.run("h")
        joined(key, "f")

        key.finish("h")

        assert (key.store.due(), orphans(key, "another")) == ([], [])

    def test_a_follower_that_joined_at_the_last_moment_is_found(self, key: Key) -> None:
        """Between the worker's last look and its settle."""
        key.run("h")
        joined(key, "f")
        key.finish("h")
        for follower_id in follow(key, "h"):
            key.complete_follower(follower_id)
        assert join(key, "late", states="pswrtc").outcome == "joined"

        key.settle("h")

        assert found_due(key) == ["late"]

    # -- the holder goes away ----------------------------------------------------------

    def test_followers_of_a_worker_that_died_are_found_within_the_run_lease(self, key: Key) -> None:
        abandoned(key)

        assert found_due(key) == ["f", "g"]

    def test_followers_of_a_call_that_could_not_publish_are_found_at_once(self, key: Key) -> None:
        key.acquire("h")
        joined(key, "f")

        key.give_back("h")

        assert found_due(key) == ["f"]

    def test_followers_of_a_superseded_task_are_not_lost(self, key: Key) -> None:
        key.publish("h")
        joined(key, "f")
        key.acquire("new", on_conflict="replace")

        key.confirm("new")

        assert [i for i, _ in key.followers()] == ["f"]

    def test_a_look_that_comes_too_early_takes_nobody(self, key: Key) -> None:
        """The holder is renewed: its followers would be run beside it."""
        key.publish("h")
        joined(key, "f")
        key.start("h", lease_ms=RUN_LEASE)
        key.advance(RUN_LEASE // 5)
        key.store.renew([key.running("h", lease_ms=RUN_LEASE)])
        key.advance(RUN_LEASE * 4 // 5)
        assert key.store.due() == [key.text]

        assert orphans(key) == []

    def test_two_reapers_do_not_complete_the_same_followers(self, key: Key) -> None:
        abandoned(key)

        first, second = orphans(key, "first"), orphans(key, "second")

        assert (first, second) == (["f", "g"], [])

    # -- promotion ------------------------------------------------------------------------

    def test_a_reaper_that_dies_before_it_published_loses_nobody(self, key: Key) -> None:
        abandoned(key)
        reap(key, "first")
        assert promote(key, "f", "first") == "publish"
        # The reaper dies here; its claim lapses, and so does the grace.
        key.advance(RUN_LEASE)

        assert reap(key, "second") == [
            Orphan("f", "f", "message of f", promoted=True),
            Orphan("g", "f", "message of g"),
        ]
        assert promote(key, "f", "second") == "publish"

    def test_a_follower_that_two_reapers_published_runs_once(self, key: Key) -> None:
        abandoned(key)
        reap(key, "first")
        promote(key, "f", "first")
        # The reaper publishes, and dies before it confirms.
        key.advance(RUN_LEASE)
        reap(key, "second")
        promote(key, "f", "second")
        # The second one publishes it too. Its message runs to its end, then the other arrives.
        key.confirm("f")
        assert key.start("f", "d2").verdict == "run"
        key.finish("f", "d2")
        key.settle("f", "d2")

        assert key.start("f", "d3").verdict == "done"

    def test_a_follower_is_not_run_beside_a_new_holder(self, key: Key) -> None:
        abandoned(key)
        key.run("new", "d2")
        reap(key)

        assert promote(key, "f") == "follows"

        assert list(key.record().tasks) == ["new"]
        assert follow(key, "new") == ["f", "g"]

    def test_a_second_promotion_looks_for_a_live_task_again(self, key: Key) -> None:
        abandoned(key)
        reap(key, "first")
        promote(key, "f", "first")
        key.advance(RUN_LEASE)
        key.run("new", "d2")
        reap(key, "second")

        assert promote(key, "f", "second") == "follows"

        assert list(key.record().tasks) == ["new"]

    def test_a_follower_that_waits_again_does_not_run_too(self, key: Key) -> None:
        abandoned(key)
        reap(key, "first")
        promote(key, "f", "first")
        # The reaper publishes, and dies before it confirms; the message is slow.
        key.advance(RUN_LEASE)
        key.publish("new")
        reap(key, "second")
        promote(key, "f", "second")

        assert key.start("f", "d2").verdict == "done"

    def test_a_follower_that_waited_again_runs_when_it_is_promoted_again(self, key: Key) -> None:
        """Else its message is dropped at the gate, and it is lost."""
        abandoned(key)
        reap(key, "first")
        promote(key, "f", "first")
        key.advance(RUN_LEASE)
        key.publish("new")
        reap(key, "second")
        promote(key, "f", "second")
        key.cancel("new")
        reap(key, "second")

        assert promote(key, "f", "second") == "publish"
        assert key.start("f", "d2").verdict == "run"

    def test_a_follower_whose_own_publish_failed_before_runs_when_it_is_promoted(
        self, key: Key
    ) -> None:
        key.acquire("f")
        key.give_back("f")  # marked withdrawn; then the caller tries again
        key.publish("h")
        joined(key, "f")
        key.cancel("h")
        reap(key)

        assert promote(key, "f") == "publish"
        assert key.start("f", "d2").verdict == "run"

    # -- never both --------------------------------------------------------------------------

    def test_a_follower_that_runs_is_not_completed_too(self, key: Key) -> None:
        """A message of its own has turned up (its done mark lapsed, or the message was resent)."""
        key.run("h", states=SUCCESS)
        joined(key, "f")

        assert key.start("f", "d2").verdict == "run"

        assert key.finish("h").followers is False
        assert key.followers() == []

    def test_nobody_gets_the_result_of_other_work(self, key: Key) -> None:
        """The same idempotency key with other arguments."""
        key.publish("h", arguments="one")

        join(key, "f", arguments="two")

        assert key.followers() == []

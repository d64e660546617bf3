"""What goes wrong without each rule of followers, as schedules that go right.

As in ``schedules``: each test plays the order that goes wrong when its rule is left out. A follower
is lost if no worker completes or runs it; a canvas then hangs.
"""

from __future__ import annotations

from celery_unique.stores.base import LockStore, Orphan
from celery_unique.testing.store_contract.factories import (
    QUEUE_LEASE,
    RUN_LEASE,
    SUCCESS,
    advance,
    claim,
    confirm,
    finish,
    publish,
    record_of,
    run,
    running,
    settle,
    start,
)
from celery_unique.testing.store_contract.followers import (
    follow,
    join,
    joined,
    orphans,
    promote,
    reap,
)


def found_due(store: LockStore, key: str, reaper: str = "worker") -> list[str]:
    """What any worker finds that looks after followers."""
    return orphans(store, key, reaper) if key in store.due() else []


def abandoned(store: LockStore, key: str) -> None:
    """The holder's worker died, acknowledged early; two calls follow it."""
    publish(store, key, "h")
    joined(store, key, "f", "g")
    store.start(key, start("h", lease_ms=RUN_LEASE))
    advance(store, RUN_LEASE)


class FollowerScheduleContract:
    # -- the holder ends -------------------------------------------------------------

    def test_followers_survive_a_worker_that_dies_before_it_completed_them(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h"))
        # The worker dies here: the result may be stored or not.
        advance(store, RUN_LEASE)

        assert found_due(store, key) == ["f"]

    def test_followers_survive_a_worker_that_dies_while_it_completes_them(
        self, store: LockStore, key: str
    ) -> None:
        """Removed before they are told: the second one is lost."""
        run(store, key, "h")
        joined(store, key, "f", "g")
        store.finish(key, finish("h"))
        assert follow(store, key, "h") == ["f", "g"]
        store.complete_follower(key, "f")
        # The worker dies here.
        advance(store, RUN_LEASE)

        assert found_due(store, key) == ["g"]

    def test_nobody_else_completes_followers_while_the_worker_lives_that_does(
        self, store: LockStore, key: str
    ) -> None:
        """Else their chords are counted twice."""
        run(store, key, "h")
        joined(store, key, "f")

        store.finish(key, finish("h"))

        assert (store.due(), orphans(store, key, "another")) == ([], [])

    def test_a_follower_that_joined_at_the_last_moment_is_found(
        self, store: LockStore, key: str
    ) -> None:
        """Between the worker's last look and its settle."""
        run(store, key, "h")
        joined(store, key, "f")
        store.finish(key, finish("h"))
        for follower_id in follow(store, key, "h"):
            store.complete_follower(key, follower_id)
        assert join(store, key, "late", states="pswrtc").outcome == "joined"

        settle(store, key, "h")

        assert found_due(store, key) == ["late"]

    # -- the holder goes away ----------------------------------------------------------

    def test_followers_of_a_worker_that_died_are_found_within_the_run_lease(
        self, store: LockStore, key: str
    ) -> None:
        abandoned(store, key)

        assert found_due(store, key) == ["f", "g"]

    def test_followers_of_a_call_that_could_not_publish_are_found_at_once(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("h"))
        joined(store, key, "f")

        store.give_back(key, "h", QUEUE_LEASE)

        assert found_due(store, key) == ["f"]

    def test_followers_of_a_superseded_task_are_not_lost(self, store: LockStore, key: str) -> None:
        publish(store, key, "h")
        joined(store, key, "f")
        store.acquire(key, claim("new", on_conflict="replace"))

        confirm(store, key, "new")

        assert [i for i, _ in store.followers(key)] == ["f"]

    def test_a_look_that_comes_too_early_takes_nobody(self, store: LockStore, key: str) -> None:
        """The holder is renewed: its followers would be run beside it."""
        publish(store, key, "h")
        joined(store, key, "f")
        store.start(key, start("h", lease_ms=RUN_LEASE))
        advance(store, RUN_LEASE // 5)
        store.renew([running(key, "h", lease_ms=RUN_LEASE)])
        advance(store, RUN_LEASE * 4 // 5)
        assert store.due() == [key]

        assert orphans(store, key) == []

    def test_two_reapers_do_not_complete_the_same_followers(
        self, store: LockStore, key: str
    ) -> None:
        abandoned(store, key)

        first, second = orphans(store, key, "first"), orphans(store, key, "second")

        assert (first, second) == (["f", "g"], [])

    # -- promotion ------------------------------------------------------------------------

    def test_a_reaper_that_dies_before_it_published_loses_nobody(
        self, store: LockStore, key: str
    ) -> None:
        abandoned(store, key)
        reap(store, key, "first")
        assert promote(store, key, "f", "first") == "publish"
        # The reaper dies here; its claim lapses, and so does the grace.
        advance(store, RUN_LEASE)

        assert reap(store, key, "second") == [
            Orphan("f", "f", "message of f", promoted=True),
            Orphan("g", "f", "message of g"),
        ]
        assert promote(store, key, "f", "second") == "publish"

    def test_a_follower_that_two_reapers_published_runs_once(
        self, store: LockStore, key: str
    ) -> None:
        abandoned(store, key)
        reap(store, key, "first")
        promote(store, key, "f", "first")
        # The reaper publishes, and dies before it confirms.
        advance(store, RUN_LEASE)
        reap(store, key, "second")
        promote(store, key, "f", "second")
        # The second one publishes it too. Its message runs to its end, then the other arrives.
        confirm(store, key, "f")
        assert store.start(key, start("f", "d2")).verdict == "run"
        store.finish(key, finish("f", "d2"))
        settle(store, key, "f", "d2")

        assert store.start(key, start("f", "d3")).verdict == "done"

    def test_a_follower_is_not_run_beside_a_new_holder(self, store: LockStore, key: str) -> None:
        abandoned(store, key)
        run(store, key, "new", "d2")
        reap(store, key)

        assert promote(store, key, "f") == "follows"

        assert list(record_of(store, key).tasks) == ["new"]
        assert follow(store, key, "new") == ["f", "g"]

    def test_a_second_promotion_looks_for_a_live_task_again(
        self, store: LockStore, key: str
    ) -> None:
        abandoned(store, key)
        reap(store, key, "first")
        promote(store, key, "f", "first")
        advance(store, RUN_LEASE)
        run(store, key, "new", "d2")
        reap(store, key, "second")

        assert promote(store, key, "f", "second") == "follows"

        assert list(record_of(store, key).tasks) == ["new"]

    def test_a_follower_that_waits_again_does_not_run_too(self, store: LockStore, key: str) -> None:
        abandoned(store, key)
        reap(store, key, "first")
        promote(store, key, "f", "first")
        # The reaper publishes, and dies before it confirms; the message is slow.
        advance(store, RUN_LEASE)
        publish(store, key, "new")
        reap(store, key, "second")
        promote(store, key, "f", "second")

        assert store.start(key, start("f", "d2")).verdict == "done"

    def test_a_follower_that_waited_again_runs_when_it_is_promoted_again(
        self, store: LockStore, key: str
    ) -> None:
        """Else its message is dropped at the gate, and it is lost."""
        abandoned(store, key)
        reap(store, key, "first")
        promote(store, key, "f", "first")
        advance(store, RUN_LEASE)
        publish(store, key, "new")
        reap(store, key, "second")
        promote(store, key, "f", "second")
        store.cancel(key, "new", QUEUE_LEASE)
        reap(store, key, "second")

        assert promote(store, key, "f", "second") == "publish"
        assert store.start(key, start("f", "d2")).verdict == "run"

    def test_a_follower_whose_own_publish_failed_before_runs_when_it_is_promoted(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("f"))
        store.give_back(key, "f", QUEUE_LEASE)  # marked withdrawn; then the caller tries again
        publish(store, key, "h")
        joined(store, key, "f")
        store.cancel(key, "h", QUEUE_LEASE)
        reap(store, key)

        assert promote(store, key, "f") == "publish"
        assert store.start(key, start("f", "d2")).verdict == "run"

    # -- never both --------------------------------------------------------------------------

    def test_a_follower_that_runs_is_not_completed_too(self, store: LockStore, key: str) -> None:
        """A message of its own has turned up (its done mark lapsed, or somebody resent it)."""
        run(store, key, "h", states=SUCCESS)
        joined(store, key, "f")

        assert store.start(key, start("f", "d2")).verdict == "run"

        assert store.finish(key, finish("h")).followers is False
        assert store.followers(key) == []

    def test_nobody_gets_the_result_of_other_work(self, store: LockStore, key: str) -> None:
        """The same idempotency key with other arguments."""
        publish(store, key, "h", arguments="one")

        join(store, key, "f", arguments="two")

        assert store.followers(key) == []

"""What goes wrong without each rule of replacing and succeeding, as schedules that go right.

As in ``schedules``: each test plays the order that goes wrong when its rule is left out.
"""

from __future__ import annotations

from typing import Any

from celery_unique.stores.base import LockStore, Started
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    advance,
    claim,
    confirm,
    finish,
    held,
    publish,
    record_of,
    run,
    start,
)


def stand_in(store: LockStore, key: str, task_id: str, **fields: Any) -> tuple[str, ...]:
    reply = store.acquire(key, claim(task_id, on_conflict="replace", **fields))
    assert reply.outcome == "created"
    return reply.replaced


def succeed(store: LockStore, key: str, task_id: str) -> None:
    assert store.acquire(key, claim(task_id, on_conflict="rerun")).outcome == "created"
    confirm(store, key, task_id)


def live(store: LockStore, key: str) -> list[str]:
    """Whom a call may be told of: not in limbo, not ended."""
    record = record_of(store, key)
    return [i for i, task in record.tasks.items() if task.by not in record.tasks]


class ReplaceScheduleContract:
    # -- replacing -------------------------------------------------------------------

    def test_the_old_task_is_not_dropped_before_the_new_one_is_published(
        self, store: LockStore, key: str
    ) -> None:
        """No limbo: a worker drops the old one, then the publish fails, and neither runs."""
        publish(store, key, "old")
        stand_in(store, key, "new")

        # A worker reaches the old message while the new one is being published.
        meanwhile = store.start(key, start("old"))
        store.give_back(key, "new", QUEUE_LEASE)  # the publish raised

        assert meanwhile == Started("wait")
        assert store.start(key, start("old")).verdict == "run"

    def test_the_old_task_runs_when_the_caller_that_replaces_it_dies(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "old")
        stand_in(store, key, "new")
        # The caller dies here.
        advance(store, GRACE)

        assert store.start(key, start("old")).verdict == "run"

    def test_a_failed_replacement_brings_the_old_task_back(
        self, store: LockStore, key: str
    ) -> None:
        """No restore: neither runs."""
        publish(store, key, "old")
        stand_in(store, key, "new")

        store.give_back(key, "new", QUEUE_LEASE)

        assert live(store, key) == ["old"]
        assert store.start(key, start("old")).verdict == "run"

    def test_a_failed_replacement_that_landed_does_not_run_beside_the_old_task(
        self, store: LockStore, key: str
    ) -> None:
        """No withdrawn mark: the publish raised but landed, and both run."""
        publish(store, key, "old")
        stand_in(store, key, "new")
        store.give_back(key, "new", QUEUE_LEASE)
        store.start(key, start("old", "d1"))

        landed = store.start(key, start("new", "d2"))

        assert landed == Started("superseded", mark="withdrawn")

    def test_the_old_message_does_not_run_once_the_new_one_is_published(
        self, store: LockStore, key: str
    ) -> None:
        """No superseded mark: both run."""
        publish(store, key, "old")
        stand_in(store, key, "new")
        confirm(store, key, "new")

        assert store.start(key, start("old", "d1")).verdict == "superseded"
        assert store.start(key, start("new", "d2")).verdict == "run"

    def test_the_old_task_does_not_start_while_the_new_one_is_being_published(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "old")
        stand_in(store, key, "new")

        early = store.start(key, start("old", "d1"))
        confirm(store, key, "new")

        assert early == Started("wait")
        assert store.start(key, start("new", "d2")).verdict == "run"
        assert store.start(key, start("old", "d1")).verdict == "superseded"

    def test_giving_back_a_replacement_in_the_middle_frees_nothing(
        self, store: LockStore, key: str
    ) -> None:
        """No chain: the first and the last are both live."""
        publish(store, key, "a")
        stand_in(store, key, "b")
        stand_in(store, key, "c")

        store.give_back(key, "b", QUEUE_LEASE)

        assert live(store, key) == ["c"]
        assert store.start(key, start("a")) == Started("wait")

    def test_a_middle_replacement_whose_caller_died_frees_nothing(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "a")
        stand_in(store, key, "b")
        advance(store, GRACE - MINUTE)
        stand_in(store, key, "c")
        advance(store, MINUTE)  # the grace of b is over, that of c is not

        assert live(store, key) == ["c"]
        assert store.start(key, start("a")) == Started("wait")

    def test_when_all_replacements_fail_the_first_runs(self, store: LockStore, key: str) -> None:
        publish(store, key, "a")
        for task_id in ("b", "c", "d"):
            stand_in(store, key, task_id)

        for task_id in ("c", "b", "d"):
            store.give_back(key, task_id, QUEUE_LEASE)

        assert live(store, key) == ["a"]
        assert store.start(key, start("a")).verdict == "run"

    def test_a_replacement_that_started_before_its_confirm_came_has_ended_the_old_task(
        self, store: LockStore, key: str
    ) -> None:
        """A start is a confirm: else the old one would run when the new one has ended."""
        publish(store, key, "old")
        stand_in(store, key, "new")
        store.start(key, start("new", "d1", mark_ms=QUEUE_LEASE))
        store.finish(key, finish("new", "d1"))
        confirm(store, key, "new")  # one way, and late

        assert store.start(key, start("old", "d2")).verdict == "superseded"

    def test_a_replacement_in_a_workers_hand_has_ended_the_old_task(
        self, store: LockStore, key: str
    ) -> None:
        """The confirm was lost, but the message has an ETA and waits in a worker."""
        publish(store, key, "old")
        stand_in(store, key, "new", delay_ms=30 * MINUTE)
        store.renew([held(key, "new")])
        advance(store, GRACE)

        assert store.start(key, start("old")).verdict == "superseded"

    def test_a_task_that_runs_is_not_replaced(self, store: LockStore, key: str) -> None:
        run(store, key, "old", "d1")

        reply = store.acquire(key, claim("new", on_conflict="replace"))

        assert reply.outcome == "rejected"
        assert store.finish(key, finish("old", "d1")).verdict == "ended"

    def test_a_steady_stream_of_calls_does_not_push_a_task_back_for_ever(
        self, store: LockStore, key: str
    ) -> None:
        """Nor in a queue that no worker comes to: what is due is not replaced any more."""
        publish(store, key, "t0", delay_ms=5 * MINUTE)
        outcomes = []
        for number in range(1, 20):
            advance(store, MINUTE)
            asked = claim(
                f"t{number}", on_conflict="replace", delay_ms=5 * MINUTE, max_wait_ms=10 * MINUTE
            )
            outcomes.append(store.acquire(key, asked))
            confirm(store, key, f"t{number}")

        # Due after 10 minutes, it stays; those that come later give way to each other.
        assert sorted(record_of(store, key).tasks) == ["t19", "t9"]
        assert {reply.after for reply in outcomes[:9]} == {""}
        assert {reply.after for reply in outcomes[9:]} == {"t9"}
        assert store.start(key, start("t9", "d1")).verdict == "run"

    # -- succeeding --------------------------------------------------------------------

    def test_a_successor_does_not_overlap_its_holder(self, store: LockStore, key: str) -> None:
        run(store, key, "holder", "d1")
        succeed(store, key, "successor")

        early = store.start(key, start("successor", "d2"))
        store.finish(key, finish("holder", "d1"))

        assert early == Started("wait")
        assert store.start(key, start("successor", "d2")).verdict == "run"

    def test_there_is_one_successor_and_it_is_the_newest(self, store: LockStore, key: str) -> None:
        run(store, key, "holder", "d1")
        for number in range(5):
            succeed(store, key, f"successor{number}")
        store.finish(key, finish("holder", "d1"))

        verdicts = [store.start(key, start(f"successor{n}", f"s{n}")).verdict for n in range(5)]

        assert verdicts == ["superseded"] * 4 + ["run"]

    def test_an_older_successor_gives_way_also_when_its_predecessor_has_ended(
        self, store: LockStore, key: str
    ) -> None:
        """Between the end of the first and the start of the second, a third is published."""
        run(store, key, "first", "d1")
        succeed(store, key, "second")
        # Not counted by this call, so that it is not its successor's duplicate.
        store.finish(key, finish("first", "d1"))
        assert stand_in(store, key, "third") == ("second",)
        confirm(store, key, "third")

        assert store.start(key, start("second", "d2")).verdict == "superseded"
        assert store.start(key, start("third", "d3")).verdict == "run"

    def test_a_successor_runs_when_the_worker_of_its_holder_was_killed(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "holder")
        store.start(key, start("holder", "d1", lease_ms=RUN_LEASE))  # acknowledged early
        succeed(store, key, "successor")
        advance(store, RUN_LEASE)

        assert store.start(key, start("successor", "d2")).verdict == "run"

    def test_a_successor_waits_for_the_redelivery_of_a_holder_that_was_killed(
        self, store: LockStore, key: str
    ) -> None:
        """Acknowledged late, the holder will run again: its successor comes after that."""
        run(store, key, "holder", "d1")
        succeed(store, key, "successor")
        advance(store, RUN_LEASE)

        assert store.start(key, start("successor", "d2")) == Started("wait")
        assert store.start(key, start("holder", "d3")).verdict == "run"
        store.finish(key, finish("holder", "d3"))
        assert store.start(key, start("successor", "d2")).verdict == "run"

    def test_an_older_successor_is_not_lost_with_the_failed_publish_of_a_newer_one(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "holder", "d1")
        succeed(store, key, "older")
        store.acquire(key, claim("newer", on_conflict="rerun"))
        store.give_back(key, "newer", QUEUE_LEASE)
        store.finish(key, finish("holder", "d1"))

        assert store.start(key, start("older", "d2")).verdict == "run"

    def test_a_task_that_schedules_itself_is_not_swallowed_by_itself(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first", "d1")

        again = store.acquire(key, claim("second", parent="first"))
        confirm(store, key, "second")
        store.finish(key, finish("first", "d1"))

        assert again.outcome == "created"
        assert store.start(key, start("second", "d2")).verdict == "run"

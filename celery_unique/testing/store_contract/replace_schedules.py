"""What goes wrong without each rule of replacing and succeeding, as schedules that go right.

As in ``schedules``: each test plays the order that goes wrong when its rule is left out.
"""

from __future__ import annotations

from typing import Any

from celery_unique.stores.base import Started
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    Key,
    claim,
)


def stand_in(key: Key, task_id: str, **fields: Any) -> tuple[str, ...]:
    reply = key.acquire(task_id, on_conflict="replace", **fields)
    assert reply.outcome == "created"
    return reply.replaced


def succeed(key: Key, task_id: str) -> None:
    assert key.acquire(task_id, on_conflict="rerun").outcome == "created"
    key.confirm(task_id)


def live(key: Key) -> list[str]:
    """The tasks that a reply may name: not in limbo, not ended."""
    record = key.record()
    return [i for i, task in record.tasks.items() if task.by not in record.tasks]


class ReplaceScheduleContract:
    # -- replacing -------------------------------------------------------------------

    def test_the_old_task_is_not_dropped_before_the_new_one_is_published(self, key: Key) -> None:
        """No limbo: a worker drops the old one, then the publish fails, and neither runs."""
        key.publish("old")
        stand_in(key, "new")

        # A worker reaches the old message while the new one is being published.
        meanwhile = key.start("old")
        key.give_back("new")  # the publish raised

        assert meanwhile == Started("wait")
        assert key.start("old").verdict == "run"

    def test_the_old_task_runs_when_the_caller_that_replaces_it_dies(self, key: Key) -> None:
        key.publish("old")
        stand_in(key, "new")
        # The caller dies here.
        key.advance(GRACE)

        assert key.start("old").verdict == "run"

    def test_a_failed_replacement_brings_the_old_task_back(self, key: Key) -> None:
        """No restore: neither runs."""
        key.publish("old")
        stand_in(key, "new")

        key.give_back("new")

        assert live(key) == ["old"]
        assert key.start("old").verdict == "run"

    def test_a_failed_replacement_that_landed_does_not_run_beside_the_old_task(
        self, key: Key
    ) -> None:
        """No withdrawn mark: the publish raised but landed, and both run."""
        key.publish("old")
        stand_in(key, "new")
        key.give_back("new")
        key.start("old", "d1")

        landed = key.start("new", "d2")

        assert landed == Started("superseded", mark="withdrawn")

    def test_the_old_message_does_not_run_once_the_new_one_is_published(self, key: Key) -> None:
        """No superseded mark: both run."""
        key.publish("old")
        stand_in(key, "new")
        key.confirm("new")

        assert key.start("old", "d1").verdict == "superseded"
        assert key.start("new", "d2").verdict == "run"

    def test_the_old_task_does_not_start_while_the_new_one_is_being_published(
        self, key: Key
    ) -> None:
        key.publish("old")
        stand_in(key, "new")

        early = key.start("old", "d1")
        key.confirm("new")

        assert early == Started("wait")
        assert key.start("new", "d2").verdict == "run"
        assert key.start("old", "d1").verdict == "superseded"

    def test_giving_back_a_replacement_in_the_middle_frees_nothing(self, key: Key) -> None:
        """No chain: the first and the last are both live."""
        key.publish("a")
        stand_in(key, "b")
        stand_in(key, "c")

        key.give_back("b")

        assert live(key) == ["c"]
        assert key.start("a") == Started("wait")

    def test_a_middle_replacement_whose_caller_died_frees_nothing(self, key: Key) -> None:
        key.publish("a")
        stand_in(key, "b")
        key.advance(GRACE - MINUTE)
        stand_in(key, "c")
        key.advance(MINUTE)  # the grace of b has passed, that of c has not

        assert live(key) == ["c"]
        assert key.start("a") == Started("wait")

    def test_when_all_replacements_fail_the_first_runs(self, key: Key) -> None:
        key.publish("a")
        for task_id in ("b", "c", "d"):
            stand_in(key, task_id)

        for task_id in ("c", "b", "d"):
            key.give_back(task_id)

        assert live(key) == ["a"]
        assert key.start("a").verdict == "run"

    def test_a_replacement_that_started_before_its_confirm_came_has_ended_the_old_task(
        self, key: Key
    ) -> None:
        """A start is a confirm: else the old one would run when the new one has ended."""
        key.publish("old")
        stand_in(key, "new")
        key.start("new", "d1", mark_ms=QUEUE_LEASE)
        key.finish("new", "d1")
        key.confirm("new")  # fire-and-forget, and late

        assert key.start("old", "d2").verdict == "superseded"

    def test_a_replacement_in_a_workers_hand_has_ended_the_old_task(self, key: Key) -> None:
        """The confirm was lost, but the message has an ETA and waits in a worker."""
        key.publish("old")
        stand_in(key, "new", delay_ms=30 * MINUTE)
        key.store.renew([key.held("new")])
        key.advance(GRACE)

        assert key.start("old").verdict == "superseded"

    def test_a_task_that_runs_is_not_replaced(self, key: Key) -> None:
        key.run("old", "d1")

        reply = key.acquire("new", on_conflict="replace")

        assert reply.outcome == "rejected"
        assert key.finish("old", "d1").verdict == "ended"

    def test_a_steady_stream_of_calls_does_not_push_a_task_back_for_ever(self, key: Key) -> None:
        """Nor in a queue that no worker comes to: what is due is not replaced any more."""
        key.publish("t0", delay_ms=5 * MINUTE)
        outcomes = []
        for number in range(1, 20):
            key.advance(MINUTE)
            asked = claim(
                f"t{number}", on_conflict="replace", delay_ms=5 * MINUTE, max_wait_ms=10 * MINUTE
            )
            outcomes.append(key.store.acquire(key.text, asked))
            key.confirm(f"t{number}")

        # Due after 10 minutes, it stays; those that come later give way to each other.
        assert sorted(key.record().tasks) == ["t19", "t9"]
        assert {reply.after for reply in outcomes[:9]} == {""}
        assert {reply.after for reply in outcomes[9:]} == {"t9"}
        assert key.start("t9", "d1").verdict == "run"

    # -- succeeding --------------------------------------------------------------------

    def test_a_successor_does_not_overlap_its_holder(self, key: Key) -> None:
        key.run("holder", "d1")
        succeed(key, "successor")

        early = key.start("successor", "d2")
        key.finish("holder", "d1")

        assert early == Started("wait")
        assert key.start("successor", "d2").verdict == "run"

    def test_there_is_one_successor_and_it_is_the_newest(self, key: Key) -> None:
        key.run("holder", "d1")
        for number in range(5):
            succeed(key, f"successor{number}")
        key.finish("holder", "d1")

        verdicts = [key.start(f"successor{n}", f"s{n}").verdict for n in range(5)]

        assert verdicts == ["superseded"] * 4 + ["run"]

    def test_an_older_successor_gives_way_also_when_its_predecessor_has_ended(
        self, key: Key
    ) -> None:
        """Between the end of the first and the start of the second, a third is published."""
        key.run("first", "d1")
        succeed(key, "second")
        # Not counted by this call, so that it is not its successor's duplicate.
        key.finish("first", "d1")
        assert stand_in(key, "third") == ("second",)
        key.confirm("third")

        assert key.start("second", "d2").verdict == "superseded"
        assert key.start("third", "d3").verdict == "run"

    def test_a_successor_runs_when_the_worker_of_its_holder_was_killed(self, key: Key) -> None:
        key.publish("holder")
        key.start("holder", "d1", lease_ms=RUN_LEASE)  # acknowledged early
        succeed(key, "successor")
        key.advance(RUN_LEASE)

        assert key.start("successor", "d2").verdict == "run"

    def test_a_successor_waits_for_the_redelivery_of_a_holder_that_was_killed(
        self, key: Key
    ) -> None:
        """Acknowledged late, the holder will run again: its successor comes after that."""
        key.run("holder", "d1")
        succeed(key, "successor")
        key.advance(RUN_LEASE)

        assert key.start("successor", "d2") == Started("wait")
        assert key.start("holder", "d3").verdict == "run"
        key.finish("holder", "d3")
        assert key.start("successor", "d2").verdict == "run"

    def test_an_older_successor_is_not_lost_with_the_failed_publish_of_a_newer_one(
        self, key: Key
    ) -> None:
        key.run("holder", "d1")
        succeed(key, "older")
        key.acquire("newer", on_conflict="rerun")
        key.give_back("newer")
        key.finish("holder", "d1")

        assert key.start("older", "d2").verdict == "run"

    def test_a_task_that_schedules_itself_is_not_swallowed_by_itself(self, key: Key) -> None:
        key.run("first", "d1")

        again = key.acquire("second", parent="first")
        key.confirm("second")
        key.finish("first", "d1")

        assert again.outcome == "created"
        assert key.start("second", "d2").verdict == "run"

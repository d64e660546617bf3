"""confirm, give_back and help: what a caller does around its publish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.record import Mark, Record, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    Key,
    about,
    claim,
    record_of,
)

PUBLISHED = [state for state in State if state is not State.PENDING]


class ConfirmContract:
    # -- confirm ------------------------------------------------------------

    def test_confirm_makes_a_pending_task_available(self, key: Key) -> None:
        created = key.acquire("first")

        key.confirm("first", QUEUE_LEASE)

        lease = about(created.now + QUEUE_LEASE)
        assert key.record().tasks == {"first": TaskEntry("w", created.now, lease, "shop.rebuild")}

    def test_many_are_confirmed_as_each_of_them_would_be(self, key: Key) -> None:
        keys = [key.text, key.text[:-2] + "aa", key.text[:-2] + "bb"]
        for number, each in enumerate(keys):
            key.store.acquire(each, claim(f"task{number}"))

        key.store.confirm_many(
            [(each, f"task{number}", QUEUE_LEASE) for number, each in enumerate(keys)]
            + [(key.text, "unknown", QUEUE_LEASE)]
        )
        key.store.flush()

        states = [[t.state for t in record_of(key.store, each).tasks.values()] for each in keys]
        assert states == [["w"], ["w"], ["w"]]

    def test_the_lease_of_a_confirmed_task_runs_from_its_eta(self, key: Key) -> None:
        created = key.acquire("first", delay_ms=10 * MINUTE)
        eta = created.now + 10 * MINUTE

        key.confirm("first", QUEUE_LEASE)

        assert key.record().tasks == {
            "first": TaskEntry("w", created.now, about(eta + QUEUE_LEASE), "shop.rebuild", eta=eta)
        }

    def test_confirm_does_not_create_a_task(self, key: Key) -> None:
        key.confirm("first")

        assert key.record() == Record()

    @pytest.mark.parametrize("state", PUBLISHED)
    def test_a_late_confirm_changes_nothing(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()
        key.advance(MINUTE)

        key.confirm("first")

        assert key.record() == before

    def test_confirm_leaves_a_withdrawn_task_withdrawn(self, key: Key) -> None:
        key.acquire("first")
        key.give_back("first")
        before = key.record()

        key.confirm("first")

        assert key.record() == before

    def test_confirm_touches_only_its_own_task(self, key: Key) -> None:
        key.acquire("first")
        key.acquire("second", states="")
        before = key.task("first")

        key.confirm("second")

        assert key.task("first") == before

    # -- give_back ----------------------------------------------------------

    def test_give_back_frees_the_key_and_marks_the_id_withdrawn(self, key: Key) -> None:
        created = key.acquire("first")

        removed = key.give_back("first")

        assert removed is True
        assert key.record() == Record(
            marks={"first": Mark("withdrawn", about(created.now + QUEUE_LEASE))}
        )
        assert key.acquire("second").outcome == "created"

    def test_give_back_of_an_unknown_task_changes_nothing(self, key: Key) -> None:
        removed = key.give_back("first")

        assert removed is False
        assert key.record() == Record()

    @pytest.mark.parametrize("state", PUBLISHED)
    def test_give_back_of_a_published_task_changes_nothing(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()

        removed = key.give_back("first")

        assert removed is False
        assert key.record() == before

    def test_give_back_of_a_task_that_another_call_published_changes_nothing(
        self, key: Key
    ) -> None:
        key.acquire("first")
        key.help("first")
        before = key.record()

        removed = key.give_back("first")

        assert removed is False
        assert key.record() == before

    def test_give_back_twice_changes_nothing_the_second_time(self, key: Key) -> None:
        key.acquire("first")
        key.give_back("first")
        before = key.record()
        key.advance(MINUTE)

        removed = key.give_back("first")

        assert removed is False
        assert key.record() == before

    def test_give_back_touches_only_its_own_task(self, key: Key) -> None:
        key.acquire("first")
        key.acquire("second", states="")
        before = key.task("first")

        key.give_back("second")

        assert key.record().tasks == {"first": before}

    # -- help ---------------------------------------------------------------

    def test_help_lets_a_caller_publish_a_copy_of_a_pending_task(self, key: Key) -> None:
        created = key.acquire("first")

        verdict = key.help("first")

        assert verdict == "go"
        assert key.record().tasks == {
            "first": TaskEntry("p", created.now, created.now + GRACE, "shop.rebuild", flags="m")
        }

    def test_help_says_go_to_every_caller_that_asks(self, key: Key) -> None:
        key.acquire("first")
        key.help("first")
        before = key.record()

        verdict = key.help("first")

        assert verdict == "go"
        assert key.record() == before

    def test_help_publishes_no_copy_of_a_task_in_a_canvas(self, key: Key) -> None:
        """The copy would have none of the callbacks that wait for the task's id."""
        key.acquire("first", canvas=True)
        before = key.record()

        verdict = key.help("first")

        assert verdict == "again"
        assert key.record() == before

    @pytest.mark.parametrize("state", PUBLISHED)
    def test_help_says_published_once_the_task_is(self, key: Key, state: State) -> None:
        key.bring_to("first", state)
        before = key.record()

        verdict = key.help("first")

        assert verdict == "published"
        assert key.record() == before

    def test_help_says_published_when_a_task_has_run_and_left_a_done_mark(self, key: Key) -> None:
        key.run("first")
        key.finish("first", settle_later=True)
        key.settle("first", mark_done=True)

        assert key.help("first") == "published"

    # -- a message whose worker died ------------------------------------------

    @pytest.mark.parametrize("state", [State.AVAILABLE, State.SCHEDULED, State.RETRYABLE])
    @pytest.mark.parametrize("strategy", ["ignore", "reject", "rerun"])
    def test_a_task_is_abandoned_when_the_worker_that_held_its_message_is_dead(
        self, key: Key, state: State, strategy: str
    ) -> None:
        key.bring_to("first", state)
        key.store.renew([key.held("first", held_ms=RUN_LEASE)])
        alive = key.acquire("second", on_conflict=strategy).holder
        key.advance(RUN_LEASE)

        dead = key.acquire("third", on_conflict=strategy).holder

        assert alive is not None
        assert dead is not None
        assert (alive.task_id, alive.abandoned) == ("first", False)
        assert dead == replace(alive, abandoned=True, lease=dead.lease)
        assert key.task("first").duplicates == 2

    def test_one_caller_may_publish_a_copy_for_an_abandoned_task(self, key: Key) -> None:
        key.publish("first")
        key.store.renew([key.held("first", held_ms=RUN_LEASE)])
        assert key.help("first", GRACE) == "published"
        key.advance(RUN_LEASE)

        verdicts = [key.help("first", GRACE) for _ in range(3)]

        assert verdicts == ["go", "published", "published"]
        assert key.task("first").copies
        holder = key.acquire("second").holder
        assert holder is not None
        assert not holder.abandoned
        # It dies before it publishes: the next caller may once the claim has lapsed.
        key.advance(GRACE)
        assert key.help("first", GRACE) == "go"

    def test_a_message_that_is_in_the_broker_again_waits_and_is_not_abandoned(
        self, key: Key
    ) -> None:
        key.publish("first")
        key.store.renew([key.held("first", held_ms=RUN_LEASE)])

        key.store.renew([key.held("first", returned=True)])

        assert key.task("first").held_until == 0
        key.advance(RUN_LEASE)
        assert key.help("first", GRACE) == "published"

    @pytest.mark.parametrize("then", ["start", "retry"])
    def test_a_task_that_has_started_is_not_abandoned(self, key: Key, then: str) -> None:
        key.publish("first")
        key.store.renew([key.held("first", held_ms=RUN_LEASE)])
        key.start("first", "d1")
        if then == "retry":
            key.retry("first", "d1")
        # The renewal of a copy that waits at the gate does not make it so.
        elif then == "start":
            key.store.renew([key.held("first", held_ms=RUN_LEASE)])

        assert key.task("first").held_until == 0
        key.advance(RUN_LEASE)
        assert key.help("first", GRACE) == "published"

    def test_help_says_again_when_an_abandoned_task_was_released(self, key: Key) -> None:
        key.publish("first")
        key.store.renew([key.held("first", held_ms=RUN_LEASE)])
        key.release()
        key.advance(RUN_LEASE)

        assert key.help("first", GRACE) == "again"

    def test_help_says_again_when_the_holder_is_gone(self, key: Key) -> None:
        assert key.help("first") == "again"
        assert key.record() == Record()

    def test_help_says_again_when_the_grace_has_passed(self, key: Key) -> None:
        key.acquire("first")
        key.advance(GRACE)

        assert key.help("first") == "again"

    def test_help_says_again_when_the_publish_was_given_back(self, key: Key) -> None:
        key.acquire("first")
        key.give_back("first")

        assert key.help("first") == "again"

    def test_help_says_again_when_the_holder_was_revoked(self, key: Key) -> None:
        key.acquire("first")
        key.cancel("first")

        assert key.help("first") == "again"

    def test_help_says_again_when_an_operator_released_the_holder(self, key: Key) -> None:
        key.acquire("first")
        key.release()
        before = key.record()

        verdict = key.help("first")

        assert verdict == "again"
        assert key.record() == before

    # -- marks --------------------------------------------------------------

    def test_a_mark_is_gone_when_its_time_is_over(self, key: Key) -> None:
        key.acquire("first")
        key.give_back("first", 10 * MINUTE)
        key.advance(9 * MINUTE)
        within = key.start("first")
        key.advance(MINUTE)

        after = key.start("first")

        assert (within.verdict, after.verdict, after.lost) == ("superseded", "run", True)

    def test_a_confirmed_task_is_not_shortened_by_a_second_confirm(self, key: Key) -> None:
        key.publish("first")

        key.confirm("first", MINUTE)

        assert key.task("first").lease == about(key.now() + QUEUE_LEASE)

"""confirm, give_back and help: what a caller does around its publish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_unique.stores.base import LockStore
from celery_unique.stores.record import Mark, Record, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    RUN_LEASE,
    about,
    advance,
    bring_to,
    claim,
    confirm,
    finish,
    held,
    now_of,
    publish,
    record_of,
    retry,
    run,
    settle,
    start,
    task_of,
)

PUBLISHED = [state for state in State if state is not State.PENDING]


class ConfirmContract:
    # -- confirm ------------------------------------------------------------

    def test_confirm_makes_a_pending_task_available(self, store: LockStore, key: str) -> None:
        created = store.acquire(key, claim("first"))

        confirm(store, key, "first", QUEUE_LEASE)

        lease = about(created.now + QUEUE_LEASE)
        assert record_of(store, key).tasks == {
            "first": TaskEntry("w", created.now, lease, "shop.rebuild")
        }

    def test_many_are_confirmed_as_each_of_them_would_be(self, store: LockStore, key: str) -> None:
        keys = [key, key[:-2] + "aa", key[:-2] + "bb"]
        for number, each in enumerate(keys):
            store.acquire(each, claim(f"task{number}"))

        store.confirm_many(
            [(each, f"task{number}", QUEUE_LEASE) for number, each in enumerate(keys)]
            + [(key, "unknown", QUEUE_LEASE)]
        )
        store.flush()

        states = [[t.state for t in record_of(store, each).tasks.values()] for each in keys]
        assert states == [["w"], ["w"], ["w"]]

    def test_the_lease_of_a_confirmed_task_runs_from_its_eta(
        self, store: LockStore, key: str
    ) -> None:
        created = store.acquire(key, claim("first", delay_ms=10 * MINUTE))
        eta = created.now + 10 * MINUTE

        confirm(store, key, "first", QUEUE_LEASE)

        assert record_of(store, key).tasks == {
            "first": TaskEntry("w", created.now, about(eta + QUEUE_LEASE), "shop.rebuild", eta=eta)
        }

    def test_confirm_does_not_create_a_task(self, store: LockStore, key: str) -> None:
        confirm(store, key, "first")

        assert record_of(store, key) == Record()

    @pytest.mark.parametrize("state", PUBLISHED)
    def test_a_late_confirm_changes_nothing(self, store: LockStore, key: str, state: State) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)
        advance(store, MINUTE)

        confirm(store, key, "first")

        assert record_of(store, key) == before

    def test_confirm_leaves_a_withdrawn_task_withdrawn(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.give_back(key, "first", QUEUE_LEASE)
        before = record_of(store, key)

        confirm(store, key, "first")

        assert record_of(store, key) == before

    def test_confirm_touches_only_its_own_task(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.acquire(key, claim("second", states=""))
        before = task_of(store, key, "first")

        confirm(store, key, "second")

        assert task_of(store, key, "first") == before

    # -- give_back ----------------------------------------------------------

    def test_give_back_frees_the_key_and_marks_the_id_withdrawn(
        self, store: LockStore, key: str
    ) -> None:
        created = store.acquire(key, claim("first"))

        removed = store.give_back(key, "first", QUEUE_LEASE)

        assert removed is True
        assert record_of(store, key) == Record(
            marks={"first": Mark("withdrawn", about(created.now + QUEUE_LEASE))}
        )
        assert store.acquire(key, claim("second")).outcome == "created"

    def test_give_back_of_an_unknown_task_changes_nothing(self, store: LockStore, key: str) -> None:
        removed = store.give_back(key, "first", QUEUE_LEASE)

        assert removed is False
        assert record_of(store, key) == Record()

    @pytest.mark.parametrize("state", PUBLISHED)
    def test_give_back_of_a_published_task_changes_nothing(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        removed = store.give_back(key, "first", QUEUE_LEASE)

        assert removed is False
        assert record_of(store, key) == before

    def test_give_back_of_a_task_that_another_call_published_changes_nothing(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("first"))
        store.help(key, "first")
        before = record_of(store, key)

        removed = store.give_back(key, "first", QUEUE_LEASE)

        assert removed is False
        assert record_of(store, key) == before

    def test_give_back_twice_changes_nothing_the_second_time(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("first"))
        store.give_back(key, "first", QUEUE_LEASE)
        before = record_of(store, key)
        advance(store, MINUTE)

        removed = store.give_back(key, "first", QUEUE_LEASE)

        assert removed is False
        assert record_of(store, key) == before

    def test_give_back_touches_only_its_own_task(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.acquire(key, claim("second", states=""))
        before = task_of(store, key, "first")

        store.give_back(key, "second", QUEUE_LEASE)

        assert record_of(store, key).tasks == {"first": before}

    # -- help ---------------------------------------------------------------

    def test_help_lets_a_caller_publish_a_copy_of_a_pending_task(
        self, store: LockStore, key: str
    ) -> None:
        created = store.acquire(key, claim("first"))

        verdict = store.help(key, "first")

        assert verdict == "go"
        assert record_of(store, key).tasks == {
            "first": TaskEntry("p", created.now, created.now + GRACE, "shop.rebuild", flags="m")
        }

    def test_help_says_go_to_every_caller_that_asks(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.help(key, "first")
        before = record_of(store, key)

        verdict = store.help(key, "first")

        assert verdict == "go"
        assert record_of(store, key) == before

    def test_help_publishes_no_copy_of_a_task_in_a_canvas(self, store: LockStore, key: str) -> None:
        """The copy would have none of the callbacks that wait for the task's id."""
        store.acquire(key, claim("first", canvas=True))
        before = record_of(store, key)

        verdict = store.help(key, "first")

        assert verdict == "again"
        assert record_of(store, key) == before

    @pytest.mark.parametrize("state", PUBLISHED)
    def test_help_says_published_once_the_task_is(
        self, store: LockStore, key: str, state: State
    ) -> None:
        bring_to(store, key, "first", state)
        before = record_of(store, key)

        verdict = store.help(key, "first")

        assert verdict == "published"
        assert record_of(store, key) == before

    def test_help_says_published_when_a_task_has_run_and_left_a_done_mark(
        self, store: LockStore, key: str
    ) -> None:
        run(store, key, "first")
        store.finish(key, finish("first", settle_later=True))
        settle(store, key, "first", mark_done=True)

        assert store.help(key, "first") == "published"

    # -- a message whose worker died ------------------------------------------

    @pytest.mark.parametrize("state", [State.AVAILABLE, State.SCHEDULED, State.RETRYABLE])
    @pytest.mark.parametrize("strategy", ["ignore", "reject", "rerun"])
    def test_a_task_is_abandoned_when_the_worker_that_held_its_message_is_dead(
        self, store: LockStore, key: str, state: State, strategy: str
    ) -> None:
        bring_to(store, key, "first", state)
        store.renew([held(key, "first", held_ms=RUN_LEASE)])
        alive = store.acquire(key, claim("second", on_conflict=strategy)).holder
        advance(store, RUN_LEASE)

        dead = store.acquire(key, claim("third", on_conflict=strategy)).holder

        assert alive is not None
        assert dead is not None
        assert (alive.task_id, alive.abandoned) == ("first", False)
        assert dead == replace(alive, abandoned=True, lease=dead.lease)
        assert task_of(store, key, "first").duplicates == 2

    def test_one_caller_may_publish_a_copy_for_an_abandoned_task(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        store.renew([held(key, "first", held_ms=RUN_LEASE)])
        assert store.help(key, "first", GRACE) == "published"
        advance(store, RUN_LEASE)

        verdicts = [store.help(key, "first", GRACE) for _ in range(3)]

        assert verdicts == ["go", "published", "published"]
        assert task_of(store, key, "first").copies
        holder = store.acquire(key, claim("second")).holder
        assert holder is not None
        assert not holder.abandoned
        # It dies before it has published: the next one may, once the time is over.
        advance(store, GRACE)
        assert store.help(key, "first", GRACE) == "go"

    def test_a_message_that_is_in_the_broker_again_waits_and_is_not_abandoned(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        store.renew([held(key, "first", held_ms=RUN_LEASE)])

        store.renew([held(key, "first", returned=True)])

        assert task_of(store, key, "first").held_until == 0
        advance(store, RUN_LEASE)
        assert store.help(key, "first", GRACE) == "published"

    @pytest.mark.parametrize("then", ["start", "retry"])
    def test_a_task_that_has_started_is_not_abandoned(
        self, store: LockStore, key: str, then: str
    ) -> None:
        publish(store, key, "first")
        store.renew([held(key, "first", held_ms=RUN_LEASE)])
        store.start(key, start("first", "d1"))
        if then == "retry":
            retry(store, key, "first", "d1")
        # The renewal of a copy that waits at the gate does not make it so.
        elif then == "start":
            store.renew([held(key, "first", held_ms=RUN_LEASE)])

        assert task_of(store, key, "first").held_until == 0
        advance(store, RUN_LEASE)
        assert store.help(key, "first", GRACE) == "published"

    def test_help_says_again_when_an_abandoned_task_was_released(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        store.renew([held(key, "first", held_ms=RUN_LEASE)])
        store.release(key)
        advance(store, RUN_LEASE)

        assert store.help(key, "first", GRACE) == "again"

    def test_help_says_again_when_the_holder_is_gone(self, store: LockStore, key: str) -> None:
        assert store.help(key, "first") == "again"
        assert record_of(store, key) == Record()

    def test_help_says_again_when_the_grace_has_passed(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        advance(store, GRACE)

        assert store.help(key, "first") == "again"

    def test_help_says_again_when_the_publish_was_given_back(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("first"))
        store.give_back(key, "first", QUEUE_LEASE)

        assert store.help(key, "first") == "again"

    def test_help_says_again_when_the_holder_was_revoked(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.cancel(key, "first", QUEUE_LEASE)

        assert store.help(key, "first") == "again"

    def test_help_says_again_when_an_operator_released_the_holder(
        self, store: LockStore, key: str
    ) -> None:
        store.acquire(key, claim("first"))
        store.release(key)
        before = record_of(store, key)

        verdict = store.help(key, "first")

        assert verdict == "again"
        assert record_of(store, key) == before

    # -- marks --------------------------------------------------------------

    def test_a_mark_is_gone_when_its_time_is_over(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.give_back(key, "first", 10 * MINUTE)
        advance(store, 9 * MINUTE)
        within = store.start(key, start("first"))
        advance(store, MINUTE)

        after = store.start(key, start("first"))

        assert (within.verdict, after.verdict, after.lost) == ("superseded", "run", True)

    def test_a_confirmed_task_is_not_shortened_by_a_second_confirm(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")

        confirm(store, key, "first", MINUTE)

        assert task_of(store, key, "first").lease == about(now_of(store) + QUEUE_LEASE)

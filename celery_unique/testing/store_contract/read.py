"""read, walk, sweep, and the store's own life."""

from __future__ import annotations

from celery_unique.stores.base import LockStore
from celery_unique.stores.record import Mark, Record, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    about,
    advance,
    bring_to,
    claim,
    fresh_key,
    now_of,
    publish,
    record_of,
    run,
    start,
)


class ReadContract:
    # -- read ---------------------------------------------------------------

    def test_read_of_a_free_key_is_an_empty_record(self, store: LockStore, key: str) -> None:
        before = now_of(store)

        assert store.read(key) == (Record(), about(before))

    def test_read_tells_the_stores_clock(self, store: LockStore, key: str) -> None:
        _, before = store.read(key)
        advance(store, 7 * MINUTE)

        _, after = store.read(key)

        assert after == about(before + 7 * MINUTE)

    def test_read_leaves_out_what_has_lapsed(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        publish(store, key, "second", states="")
        store.cancel(key, "third", MINUTE)
        store.cancel(key, "fourth", QUEUE_LEASE)
        advance(store, GRACE)

        record = record_of(store, key)

        assert list(record.tasks) == ["second"]
        assert list(record.marks) == ["fourth"]

    def test_read_changes_nothing(self, store: LockStore, key: str) -> None:
        bring_to(store, key, "first", State.ACTIVE)

        assert record_of(store, key) == record_of(store, key)

    def test_what_read_returned_is_the_readers_own(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        mine = record_of(store, key)

        mine.tasks["first"].state = "x"
        mine.tasks.clear()

        assert record_of(store, key).tasks["first"].state == "w"

    def test_read_returns_text_as_it_was_given(self, store: LockStore, key: str) -> None:
        task_id, delivery, arguments = 'ta"sk\\{}:\n\u00e9', "d\u4e2d|,;'%s", "\U0001f511\t\x01"

        created = store.acquire(key, claim(task_id, arguments=arguments))
        started = store.start(key, start(task_id, delivery))

        now = now_of(store)
        assert record_of(store, key) == Record(
            token=started.token,
            tasks={
                task_id: TaskEntry(
                    state="r",
                    created_at=created.now,
                    lease=about(now + QUEUE_LEASE),
                    task_name="shop.rebuild",
                    delivery=delivery,
                    delivery_lease=about(now + 5 * MINUTE),
                    token=started.token,
                    arguments=arguments,
                )
            },
        )

    def test_a_token_is_read_exactly_as_it_was_given(self, store: LockStore, key: str) -> None:
        started = run(store, key, "first")

        record = record_of(store, key)

        assert (record.token, record.tasks["first"].token) == (started.token, started.token)

    # -- walk ---------------------------------------------------------------

    def test_walk_yields_every_key_with_its_record(self, store: LockStore) -> None:
        keys = [fresh_key() for _ in range(7)]
        for one in keys:
            publish(store, one, "first")

        walked = dict(store.walk(batch=2))

        assert walked == {one: record_of(store, one) for one in keys}

    def test_walk_leaves_out_keys_whose_record_has_lapsed(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        store.acquire(fresh_key(), claim("second"))
        advance(store, GRACE)

        walked = dict(store.walk())

        assert walked == {key: record_of(store, key)}

    def test_walk_yields_a_key_that_has_only_a_mark(self, store: LockStore, key: str) -> None:
        store.cancel(key, "first", QUEUE_LEASE)

        walked = dict(store.walk())

        until = about(now_of(store) + QUEUE_LEASE)
        assert walked == {key: Record(marks={"first": Mark("revoked", until)})}

    def test_walk_of_an_empty_store_yields_nothing(self, store: LockStore) -> None:
        assert list(store.walk()) == []

    # -- sweep --------------------------------------------------------------

    def test_sweep_leaves_what_has_not_lapsed(self, store: LockStore, key: str) -> None:
        publish(store, key, "first")
        store.acquire(fresh_key(), claim("second"))
        advance(store, GRACE)
        before = record_of(store, key)

        store.sweep()

        assert record_of(store, key) == before

    def test_sweep_counts_what_it_deleted_and_finds_nothing_the_second_time(
        self, store: LockStore
    ) -> None:
        for _ in range(5):
            store.acquire(fresh_key(), claim("first"))
        advance(store, GRACE)

        swept = [store.sweep(batch=3), store.sweep(batch=3), store.sweep(batch=3)]

        # A store that forgets by itself has nothing to do here.
        assert swept in ([3, 2, 0], [0, 0, 0])

    # -- life ---------------------------------------------------------------

    def test_ping_is_silent_when_the_store_answers(self, store: LockStore) -> None:
        store.ping()

    def test_flush_waits_for_every_one_way_act(self, store: LockStore) -> None:
        keys = [fresh_key() for _ in range(20)]
        for one in keys:
            store.acquire(one, claim("first"))
            store.confirm(one, "first", QUEUE_LEASE)

        store.flush()

        assert [record_of(store, one).tasks["first"].state for one in keys] == ["w"] * 20

    def test_a_closed_store_connects_again_when_it_is_used_again(
        self, store: LockStore, key: str
    ) -> None:
        publish(store, key, "first")
        store.close()

        assert store.acquire(key, claim("second")).outcome == "duplicate"

    def test_close_twice_does_no_harm(self, store: LockStore) -> None:
        store.close()
        store.close()

    def test_close_does_not_lose_a_one_way_act(self, store: LockStore, key: str) -> None:
        store.acquire(key, claim("first"))
        store.confirm(key, "first", QUEUE_LEASE)

        store.close()

        assert record_of(store, key).tasks["first"].state == "w"

    def test_the_guarantee_is_one_of_the_two_words(self, store: LockStore) -> None:
        assert store.guarantee in ("strong", "best-effort")
        assert store.mechanism

"""read, walk, sweep, and the store's own life."""

from __future__ import annotations

from celery_unique.stores.base import LockStore
from celery_unique.stores.record import Mark, Record, State, TaskEntry
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    Key,
    about,
    advance,
    claim,
    fresh_key,
    publish,
    record_of,
)


class ReadContract:
    # -- read ---------------------------------------------------------------

    def test_read_of_a_free_key_is_an_empty_record(self, key: Key) -> None:
        before = key.now()

        assert key.store.read(key.text) == (Record(), about(before))

    def test_read_tells_the_stores_clock(self, key: Key) -> None:
        _, before = key.store.read(key.text)
        key.advance(7 * MINUTE)

        _, after = key.store.read(key.text)

        assert after == about(before + 7 * MINUTE)

    def test_read_leaves_out_what_has_lapsed(self, key: Key) -> None:
        key.acquire("first")
        key.publish("second", states="")
        key.cancel("third", MINUTE)
        key.cancel("fourth")
        key.advance(GRACE)

        record = key.record()

        assert list(record.tasks) == ["second"]
        assert list(record.marks) == ["fourth"]

    def test_read_changes_nothing(self, key: Key) -> None:
        key.bring_to("first", State.ACTIVE)

        assert key.record() == key.record()

    def test_what_read_returned_is_the_readers_own(self, key: Key) -> None:
        key.publish("first")
        mine = key.record()

        mine.tasks["first"].state = "x"
        mine.tasks.clear()

        assert key.record().tasks["first"].state == "w"

    def test_read_returns_text_as_it_was_given(self, key: Key) -> None:
        task_id, delivery, arguments = 'ta"sk\\{}:\n\u00e9', "d\u4e2d|,;'%s", "\U0001f511\t\x01"

        created = key.acquire(task_id, arguments=arguments)
        started = key.start(task_id, delivery)

        now = key.now()
        assert key.record() == Record(
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

    def test_a_token_is_read_exactly_as_it_was_given(self, key: Key) -> None:
        started = key.run("first")

        record = key.record()

        assert (record.token, record.tasks["first"].token) == (started.token, started.token)

    # -- walk ---------------------------------------------------------------

    def test_walk_yields_every_key_with_its_record(self, store: LockStore) -> None:
        keys = [fresh_key() for _ in range(7)]
        for one in keys:
            publish(store, one, "first")

        walked = dict(store.walk(batch=2))

        assert walked == {one: record_of(store, one) for one in keys}

    def test_walk_leaves_out_keys_whose_record_has_lapsed(self, key: Key) -> None:
        key.publish("first")
        key.store.acquire(fresh_key(), claim("second"))
        key.advance(GRACE)

        walked = dict(key.store.walk())

        assert walked == {key.text: key.record()}

    def test_walk_yields_a_key_that_has_only_a_mark(self, key: Key) -> None:
        key.cancel("first")

        walked = dict(key.store.walk())

        until = about(key.now() + QUEUE_LEASE)
        assert walked == {key.text: Record(marks={"first": Mark("revoked", until)})}

    def test_walk_of_an_empty_store_yields_nothing(self, store: LockStore) -> None:
        assert list(store.walk()) == []

    # -- sweep --------------------------------------------------------------

    def test_sweep_leaves_what_has_not_lapsed(self, key: Key) -> None:
        key.publish("first")
        key.store.acquire(fresh_key(), claim("second"))
        key.advance(GRACE)
        before = key.record()

        key.store.sweep()

        assert key.record() == before

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

    def test_a_closed_store_connects_again_when_it_is_used_again(self, key: Key) -> None:
        key.publish("first")
        key.store.close()

        assert key.acquire("second").outcome == "duplicate"

    def test_close_twice_does_no_harm(self, store: LockStore) -> None:
        store.close()
        store.close()

    def test_close_does_not_lose_a_one_way_act(self, key: Key) -> None:
        key.acquire("first")
        key.store.confirm(key.text, "first", QUEUE_LEASE)

        key.store.close()

        assert key.record().tasks["first"].state == "w"

    def test_the_guarantee_is_one_of_the_two_words(self, store: LockStore) -> None:
        assert store.guarantee in ("strong", "best-effort")
        assert store.mechanism

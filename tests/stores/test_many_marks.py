"""A key whose task is replaced again and again: every act costs the same, and no mark is missed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from sqlalchemy import event, text

from celery_unique.stores.base import LockStore
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import MARKS_INLINE
from celery_unique.stores.redis import RedisStore
from celery_unique.stores.sql import SqlStore
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    advance,
    claim,
    confirm,
    fresh_key,
    held,
    publish,
    start,
)
from tests.stores.many_marks import marks_inline
from tests.stores.test_following_state_machine import FollowersAgainstModel
from tests.stores.test_state_machine import (
    UNTIL_THE_FIRST_DIFFERENCE,
    StoreAgainstModel,
    budget,
    check,
    told,
)
from tests.stores.timing import PATIENCE_S

#: Some in the record, some beside it.
MANY = MARKS_INLINE + 8


def replace_many(store: LockStore, key: str, count: int, first: int = 0) -> list[str]:
    """The ids of all calls, each of which took the place of the one before."""
    ids = [f"call {number}" for number in range(first, first + count)]
    for task_id in ids:
        publish(store, key, task_id, on_conflict="replace", delay_ms=MINUTE)
    return ids


# -- what every store does ----------------------------------------------------------------


def test_none_of_many_replaced_tasks_starts(store, key):
    *replaced, last = replace_many(store, key, MANY)

    verdicts = [store.start(key, start(task_id)) for task_id in replaced]

    assert [(one.verdict, one.mark) for one in verdicts] == [("superseded", "superseded")] * (
        MANY - 1
    )
    assert [one.by for one in verdicts] == [*replaced[1:], last]
    assert store.start(key, start(last)).verdict == "run"


def test_the_record_of_a_key_does_not_grow_with_its_marks(store, key):
    replace_many(store, key, MANY)

    record, now = store.read(key)

    assert len(record.marks) == MARKS_INLINE
    assert record.more_marks == MANY - 1 - MARKS_INLINE
    assert record.more_until > now
    assert [found for found, _ in store.walk()] == [key]


def test_a_mark_beside_the_record_is_read_by_its_id(store, key):
    *replaced, last = replace_many(store, key, MANY)

    marks = [store.mark(key, task_id) for task_id in replaced]

    assert [mark.by if mark else None for mark in marks] == [*replaced[1:], last]
    assert store.mark(key, last) is None
    assert store.mark(fresh_key(), last) is None


def test_a_mark_beside_the_record_is_forgotten_once_its_message_was_dropped(store, key):
    *replaced, last = replace_many(store, key, MANY)
    beside = replaced[MARKS_INLINE:]

    for task_id in beside:
        store.forget(key, task_id)
        store.forget(key, task_id)
    store.flush()

    record, _ = store.read(key)
    assert (record.more_until, record.more_marks, len(record.marks)) == (0, 0, MARKS_INLINE)
    assert store.start(key, start(beside[0])).lost
    assert store.start(key, start(last)).verdict == "run"


def test_a_mark_beside_the_record_lapses(store, key):
    *replaced, _ = replace_many(store, key, MANY)
    store.renew([held(key, replaced[-1], 3 * QUEUE_LEASE)])

    advance(store, 2 * QUEUE_LEASE)

    assert store.mark(key, replaced[-2]) is None
    assert store.start(key, start(replaced[-2])).verdict == "run"
    assert store.start(key, start(replaced[-1])).verdict == "superseded"


def test_a_worker_that_holds_the_message_keeps_its_mark_beside_the_record(store, key):
    *replaced, _ = replace_many(store, key, MANY)

    assert store.renew([held(key, replaced[-1], 10 * QUEUE_LEASE)]) == [True]

    advance(store, 9 * QUEUE_LEASE)
    record, _ = store.read(key)
    assert not record.marks
    assert store.start(key, start(replaced[-1])).verdict == "superseded"


def test_a_task_that_is_called_again_under_its_id_loses_its_mark_beside_the_record(store, key):
    *replaced, last = replace_many(store, key, MANY)

    publish(store, key, replaced[-1], on_conflict="replace")

    record, _ = store.read(key)
    assert record.tasks[replaced[-1]].copies
    assert store.mark(key, replaced[-1]) is None
    assert store.start(key, start(last)).verdict == "superseded"
    assert store.start(key, start(replaced[-1])).verdict == "run"


def test_a_revoked_and_a_withdrawn_task_are_marked_beside_the_record(store, key):
    replace_many(store, key, MANY)

    store.cancel(key, "revoked", QUEUE_LEASE)
    store.acquire(key, claim("withdrawn", on_conflict="replace"))
    assert store.give_back(key, "withdrawn", QUEUE_LEASE)

    assert store.start(key, start("revoked")).mark == "revoked"
    assert store.start(key, start("withdrawn")).mark == "withdrawn"
    assert store.help(key, "revoked") == "again"
    assert store.acquire(key, claim("revoked", on_conflict="replace", again=True)).replaced == ()


# -- every act, on records that have no room ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("inline", [0, 1])
def test_the_store_answers_as_the_model_does_with_marks_beside_the_record(
    store, inline, request, report
):
    kind = f"{request.node.callspec.params['store']}".removeprefix("shared_").removesuffix("_url")

    with marks_inline(inline):
        figures = check(store, f"{kind} {inline}", budget(kind, share=0.4))
        check(store, f"{kind} {inline}", budget(kind, share=0.2), FollowersAgainstModel)

    report(told(figures, f"{kind}, {inline} marks in the record"))


class MissesMarksBeside(MemoryStore):
    def _act(self, key: str, act: Any) -> Any:
        def without_them(record: Any, now_us: int) -> Any:
            record.more_until = 0
            return act(record, now_us)

        return super()._act(key, without_them)


@pytest.mark.slow
def test_the_machine_finds_a_store_that_does_not_look_beside_the_record():
    with marks_inline(0), pytest.raises(AssertionError):
        check(MissesMarksBeside(), "misses", UNTIL_THE_FIRST_DIFFERENCE, StoreAgainstModel)


# -- what it costs ------------------------------------------------------------------------


def test_marks_that_have_lapsed_do_not_pile_up_in_memory():
    store, key = MemoryStore(), fresh_key()

    replace_for_hours(store, key)

    assert store._records[key].more_marks < 2 * PER_LEASE


#: So many calls are made while one mark lasts.
PER_LEASE = 60


def replace_for_hours(store: LockStore, key: str) -> None:
    """A debounce that never ends: after each lease as many marks have lapsed as are new."""
    for number in range(10 * PER_LEASE):
        publish(store, key, f"call {number}", on_conflict="replace")
        advance(store, QUEUE_LEASE // PER_LEASE)


@pytest.fixture
def on_redis(redis_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(redis_url, timeout_s=PATIENCE_S)
    yield store
    store.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.mark.server
def test_marks_that_have_lapsed_do_not_pile_up_on_redis(on_redis, client, key):
    replace_for_hours(on_redis, key)

    assert client.hlen(on_redis._layout.names_of(key).marks) < 2 * PER_LEASE


@pytest.mark.server
def test_the_marks_beside_a_record_expire_with_it(on_redis, client, key):
    replace_many(on_redis, key, MANY)

    names = on_redis._layout.names_of(key)
    # As times, not as durations that are read one after the other.
    assert 0 < client.pexpiretime(names.marks) <= client.pexpiretime(names.record)


def calls_of(client: redis.Redis) -> dict[str, int]:
    """How often the server has carried out each command, those of scripts too."""
    stats: Any = client.info("commandstats")
    ours = ("hset", "hget", "hgetall", "hdel", "hlen", "hrandfield", "pexpireat", "del", "time")
    return {name: int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ours}


@pytest.mark.server
def test_the_3000th_replace_costs_redis_what_the_100th_did(on_redis, client, key):
    """In commands, and in what each of them reads: there is nothing that grows."""

    def cost(first: int) -> dict[str, int]:
        before = calls_of(client)
        replace_many(on_redis, key, 50, first)
        on_redis.renew([held(key, f"call {first}")] * 50)
        started = [on_redis.start(key, start(f"call {first + n}")) for n in range(49)]
        assert {one.verdict for one in started} == {"superseded"}
        return {name: count - before[name] for name, count in calls_of(client).items()}

    replace_many(on_redis, key, 100)
    early = cost(100)
    size_then = record_bytes(client, on_redis, key)
    replace_many(on_redis, key, 2900, 150)
    late = cost(3050)

    # What is deleted for having lapsed is chance, and here nothing has.
    assert late == early
    assert record_bytes(client, on_redis, key) == pytest.approx(size_then, abs=50)


def record_bytes(client: redis.Redis, store: RedisStore, key: str) -> int:
    found: Any = client.hgetall(store._layout.name_of(key))
    return sum(len(name) + len(value) for name, value in found.items())


# -- SQL ----------------------------------------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param("sqlite_url", id="sqlite"),
        pytest.param("postgres_url", id="postgresql", marks=pytest.mark.server),
        pytest.param("mariadb_url", id="mariadb", marks=pytest.mark.server),
    ]
)
def on_sql(request: pytest.FixtureRequest) -> Iterator[SqlStore]:
    store = SqlStore.from_url(request.getfixturevalue(request.param), timeout_s=PATIENCE_S)
    store.create_tables()
    yield store
    store.close()


def rows(store: SqlStore, statement: str) -> list[Any]:
    def run(session: Any) -> list[Any]:
        result = session.execute(text(statement), {})
        return list(result.all()) if result.returns_rows else []

    return store._database.run(run)


def test_the_300th_replace_costs_a_database_what_the_50th_did(on_sql, key):
    """In statements, each of which finds its rows by an index (see test_sql_plans), and in the
    length of the record that they read and write."""
    statements: list[str] = []
    event.listen(
        on_sql._database._engine,
        "before_cursor_execute",
        lambda _connection, _cursor, statement, *_: statements.append(statement),
    )

    def cost(first: int) -> tuple[int, int]:
        statements.clear()
        replace_many(on_sql, key, 10, first)
        assert on_sql.start(key, start(f"call {first}")).verdict == "superseded"
        [[length]] = rows(on_sql, "SELECT length(record) FROM celery_unique_lock")
        return len(statements), length

    replace_many(on_sql, key, 50)
    early = cost(50)
    replace_many(on_sql, key, 240, 60)
    late = cost(300)

    assert late[0] == early[0]
    assert late[1] == pytest.approx(early[1], abs=50)


def test_workers_sweep_marks_that_have_lapsed(on_sql, key):
    replace_many(on_sql, key, MANY)
    kept = fresh_key()
    advance(on_sql, QUEUE_LEASE)
    replace_many(on_sql, kept, MANY)
    advance(on_sql, 2 * MINUTE)

    assert on_sql.sweep() == 1 + MANY - 1 - MARKS_INLINE  # the row of the key, and its marks

    [[left]] = rows(on_sql, "SELECT count(*) FROM celery_unique_lock_marks")
    assert left == MANY - 1 - MARKS_INLINE
    assert on_sql.start(kept, start(f"call {MANY - 2}")).verdict == "superseded"


def test_a_database_without_the_table_of_marks_gets_it(on_sql, key):
    """It was set up by a release that had none."""
    replace_many(on_sql, key, 2)
    rows(on_sql, "DROP TABLE celery_unique_lock_marks")

    *replaced, _ = replace_many(on_sql, key, MANY, 2)

    assert on_sql.start(key, start(replaced[-1])).verdict == "superseded"


def test_an_act_that_is_overtaken_leaves_no_mark_behind(on_sql, key):
    replace_many(on_sql, key, MANY)
    on_sql.acquire(key, claim("next", on_conflict="replace"))
    write = on_sql._write
    overtaken = []

    def overtaken_once(*arguments: Any, **options: Any) -> bool:
        if not overtaken:
            overtaken.append(True)
            return False
        return write(*arguments, **options)

    on_sql._write = overtaken_once  # type: ignore[method-assign]
    confirm(on_sql, key, "next")

    record, _ = on_sql.read(key)
    [[stored]] = rows(on_sql, "SELECT count(*) FROM celery_unique_lock_marks")
    assert overtaken
    assert stored == record.more_marks

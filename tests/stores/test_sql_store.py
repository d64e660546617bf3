"""What is special to the SQL store: statements, the table, races on a row, its options."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, inspect, text

from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.stores import acts, open_store
from celery_unique.stores.base import Acquired
from celery_unique.stores.record import Record
from celery_unique.stores.sql import SqlStore, side_tables
from celery_unique.testing.store_contract.factories import (
    GRACE,
    MINUTE,
    QUEUE_LEASE,
    SUCCESS,
    UNTIL_DONE,
    advance,
    claim,
    confirm,
    finish,
    fresh_key,
    publish,
    run,
    running,
    start,
)
from tests.stores.timing import PATIENCE_S


@pytest.fixture
def open_sql(sql_url: str, opened: Callable[..., SqlStore]) -> Callable[..., SqlStore]:
    """Another store on the same database, as another process would have it."""
    return partial(opened, sql_url)


@pytest.fixture
def sql(open_sql: Callable[..., SqlStore]) -> SqlStore:
    return open_sql()


class Statements:
    """Everything that was sent to the database, transactions included."""

    def __init__(self, store: SqlStore) -> None:
        self.sent: list[str] = []
        event.listen(store._database._engine, "before_cursor_execute", self._hear)

    def _hear(self, _connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        # What is one statement that begins WITH on the others is INSERT .. RETURNING on MariaDB.
        is_acquire = "INSERT" in statement and "RETURNING" in statement
        self.sent.append("WITH" if is_acquire else statement.split(maxsplit=1)[0])

    def of(self, act: Callable[[], Any]) -> list[str]:
        self.sent.clear()
        act()
        return list(self.sent)


# -- one statement for a call -----------------------------------------------------------


def test_a_call_is_one_statement_new_or_duplicate(sql, key):
    sql.ping()
    statements = Statements(sql)

    new = statements.of(lambda: sql.acquire(key, claim("holder")))
    of_pending = statements.of(lambda: sql.acquire(key, claim("second")))
    confirm(sql, key, "holder")
    of_waiting = statements.of(lambda: sql.acquire(key, claim("third")))
    rejected = statements.of(lambda: sql.acquire(key, claim("fourth", on_conflict="reject")))
    sql.start(key, start("holder"))
    of_active = statements.of(lambda: sql.acquire(key, claim("fifth")))
    in_window = statements.of(lambda: sql.acquire(key, claim("sixth", window_ms=QUEUE_LEASE)))

    assert new == of_pending == of_waiting == rejected == of_active == in_window == ["WITH"]
    assert sql.read(key)[0].tasks["holder"].duplicates == 5


def test_a_duplicate_of_a_kept_task_is_one_statement(sql, key):
    run(sql, key, "holder", keep=SUCCESS)
    sql.finish(key, finish("holder"))
    statements = Statements(sql)

    duplicate = statements.of(lambda: sql.acquire(key, claim("next", states=UNTIL_DONE + SUCCESS)))

    assert duplicate == ["WITH"]


def test_a_call_that_takes_over_a_row_is_two_statements(sql, key):
    publish(sql, key, "lapsed")
    advance(sql, 2 * QUEUE_LEASE)
    statements = Statements(sql)

    assert statements.of(lambda: sql.acquire(key, claim("next"))) == ["WITH", "UPDATE"]


def test_other_acts_read_and_write_once_each(sql, key):
    sql.acquire(key, claim("task"))
    statements = Statements(sql)

    assert statements.of(lambda: confirm(sql, key, "task")) == ["SELECT", "UPDATE"]
    assert statements.of(lambda: sql.start(key, start("task"))) == ["SELECT", "UPDATE"]
    assert statements.of(lambda: sql.finish(key, finish("task"))) == ["SELECT", "DELETE"]
    assert statements.of(lambda: sql.start(key, start("task"))) == ["SELECT", "INSERT"]
    assert statements.of(lambda: sql.read(key)) == ["SELECT"]


def test_an_act_without_effect_writes_nothing(sql, key):
    run(sql, key, "task")
    sql.acquire(key, claim("duplicate"))
    statements = Statements(sql)

    assert statements.of(lambda: sql.renew([running(key, "task", "another")])) == ["SELECT"]
    assert statements.of(lambda: sql.finish(key, finish("task", "another"))) == ["SELECT"]
    assert statements.of(lambda: sql.give_back(key, "task", MINUTE)) == ["SELECT"]


def test_a_call_from_another_task_is_one_statement_and_from_the_holder_none_is_counted(sql, key):
    run(sql, key, "holder")
    statements = Statements(sql)

    elsewhere = statements.of(lambda: sql.acquire(key, claim("duplicate", parent="another")))
    successor = sql.acquire(key, claim("successor", parent="holder"))

    assert elsewhere == ["WITH"]
    assert (successor.outcome, successor.after) == ("created", "holder")
    assert row_of(sql, key).conflicts == 0
    assert sql.read(key)[0].tasks["holder"].duplicates == 1


def test_to_revoke_a_parked_call_reads_no_other_however_many_are_parked(sql, key, monkeypatch):
    read, joined = [], side_tables._joined

    def counted(facts: str, message: str) -> Any:
        read.append(message)
        return joined(facts, message)

    publish(sql, key, "holder")
    for n in range(60):
        sql.acquire(key, claim(f"call {n}", on_conflict="queue", join=f"message {n}"))
    sql.acquire(key, claim("follower", join="message of it"))
    monkeypatch.setattr(side_tables, "_joined", counted)

    assert sql.cancel(key, "call 30", MINUTE) == "cancelled"
    [orphan] = sql.reap(key, "reaper", MINUTE)
    assert (orphan.follower_id, orphan.fate) == ("call 30", "revoked")
    assert [one for one, _ in sql.followers(key, "holder")] == ["follower"]
    sql.complete_follower(key, "call 30")

    # The call itself, and in each act the next one with its place in the lane.
    assert set(read) <= {"message 30", "call 30", "message 0", "call 0", "message of it"}


def test_many_claims_share_one_connection(sql):
    taken: list[Any] = []
    event.listen(sql._database._engine, "checkout", lambda *args: taken.append(args))
    keys = [fresh_key() for _ in range(20)]

    replies = sql.acquire_many([(each, claim(f"of {each}")) for each in [*keys, keys[0]]])

    assert [reply.outcome for reply in replies] == ["created"] * 20 + ["duplicate"]
    assert len(taken) <= 3  # one, and two more where the table had to be made first


# -- duplicates that wait beside the record ----------------------------------------------


def test_duplicates_are_folded_into_the_record_by_the_next_write(sql, key):
    publish(sql, key, "holder")
    for number in range(3):
        sql.acquire(key, claim(f"duplicate {number}"))
    assert row_of(sql, key).conflicts == 3

    sql.start(key, start("holder"))

    assert row_of(sql, key).conflicts == 0
    assert sql.read(key)[0].tasks["holder"].duplicates == 3
    assert sql.finish(key, finish("holder")).duplicates == 3


def test_duplicates_of_one_of_several_tasks_are_counted_in_the_record(sql, key):
    run(sql, key, "first")
    sql.acquire(key, claim("waits", states="psw"))

    for number in range(3):
        assert named(sql.acquire(key, claim(f"{number}", states="psw"))) == "waits"
    for number in range(2):
        assert named(sql.acquire(key, claim(f"{number}"))) == "first"

    assert row_of(sql, key).conflicts == 0
    tasks = sql.read(key)[0].tasks
    assert (tasks["first"].duplicates, tasks["waits"].duplicates) == (2, 3)


def test_a_duplicate_does_not_undo_an_act_that_leaves_the_holder(sql, open_sql, key):
    publish(sql, key, "holder")
    other = open_sql()
    statements = Statements(sql)

    def start_slowly(record: Record, now_us: int) -> Any:
        other.acquire(key, claim("duplicate"))
        return acts.start(record, start("holder"), now_us)

    started = sql._act(key, start_slowly)

    assert started.verdict == "run"
    assert statements.sent == ["SELECT", "UPDATE"]
    assert sql.finish(key, finish("holder")).duplicates == 1


def test_a_duplicate_that_comes_during_finish_is_in_its_answer(sql, open_sql, key):
    run(sql, key, "holder")
    other = open_sql()

    finished = sql._act(
        key,
        interrupted_once(
            lambda: other.acquire(key, claim("duplicate")),
            lambda record, us: acts.finish(record, finish("holder"), us // 1000),
        ),
    )

    assert finished.duplicates == 1
    assert not sql.read(key)[0]


def interrupted_once(
    others: Callable[[], Any], act: Callable[[Record, int], Any]
) -> Callable[[Record, int], Any]:
    """An act during which, the first time, another process acts on the same key."""
    waiting = [others]

    def interrupted(record: Record, now_us: int) -> Any:
        if waiting:
            waiting.pop()()
        return act(record, now_us)

    return interrupted


def row_of(store: SqlStore, key: str) -> Any:
    return store._database.run(lambda session: store._row(session, store._statements.see, key))


def named(reply: Acquired) -> str | None:
    return reply.holder.task_id if reply.holder else None


# -- compare-and-set ----------------------------------------------------------------------


def test_whoever_was_overtaken_acts_on_the_new_record_and_alone(sql, open_sql, key):
    publish(sql, key, "task")
    other = open_sql()
    statements = Statements(sql)

    started = sql._act(
        key,
        interrupted_once(
            lambda: other.cancel(key, "task", QUEUE_LEASE),
            lambda record, us: acts.start(record, start("task"), us),
        ),
    )

    assert started.verdict == "superseded"
    assert "BEGIN" in statements.sent
    assert statements.sent[-1] == "COMMIT"


def test_a_row_made_anew_is_not_taken_for_the_old_one(sql, open_sql, key):
    run(sql, key, "first")
    other = open_sql()

    def let_another_task_run_and_come_to_the_same_place() -> None:
        other.finish(key, finish("first"))
        run(other, key, "second", delivery="d1")

    finished = sql._act(
        key,
        interrupted_once(
            let_another_task_run_and_come_to_the_same_place,
            lambda record, us: acts.finish(record, finish("first"), us // 1000),
        ),
    )

    assert finished.verdict == "not_yours"
    assert list(sql.read(key)[0].tasks) == ["second"]


def test_two_who_insert_the_same_key_see_each_other(sql, open_sql, key):
    other = open_sql()

    started = sql._act(
        key,
        interrupted_once(
            lambda: other.cancel(key, "task", QUEUE_LEASE),
            lambda record, us: acts.start(record, start("task"), us),
        ),
    )

    assert started.verdict == "superseded"


def test_one_of_many_takes_over_a_lapsed_key_and_the_others_are_counted(open_sql, key):
    stores = [open_sql() for _ in range(4)]
    publish(stores[0], key, "lapsed")
    for store in stores:
        advance(store, 2 * QUEUE_LEASE)
    barrier = threading.Barrier(16)

    def call(number: int) -> Acquired:
        barrier.wait()
        return stores[number % 4].acquire(key, claim(f"caller {number}"))

    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(call, range(16)))

    created = [number for number, reply in enumerate(replies) if reply.outcome == "created"]
    assert len(created) == 1
    record, _ = stores[0].read(key)
    assert {name: task.duplicates for name, task in record.tasks.items()} == {
        f"caller {created[0]}": 15
    }


def test_no_duplicate_is_lost_or_counted_twice_under_contention(open_sql, key):
    """Tasks come and go on one key while others ask for it all the time."""
    stores = [open_sql(timeout_s=20) for _ in range(4)]
    reported: list[int] = []
    duplicates = [0] * 12

    def take_turns(number: int) -> None:
        store = stores[number % 4]
        for turn in range(15):
            task_id = f"{number}.{turn}"
            if store.acquire(key, claim(task_id)).outcome != "created":
                duplicates[number] += 1
                continue
            assert store.start(key, start(task_id, task_id)).verdict == "run"
            ended = store.finish(key, finish(task_id, task_id))
            assert ended.verdict == "ended"
            reported.append(ended.duplicates)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(take_turns, range(12)))

    assert sum(reported) == sum(duplicates)
    assert sum(duplicates) + len(reported) == 12 * 15
    assert not stores[0].read(key)[0]


def test_a_key_under_a_storm_of_duplicates_can_be_finished(open_sql, key):
    stores = [open_sql() for _ in range(4)]
    over = threading.Event()

    def ask(store: SqlStore) -> int:
        count = 0
        while not over.is_set():
            count += store.acquire(key, claim("asks", states="r")).outcome == "duplicate"
            if count == 0:
                store.give_back(key, "asks", 0)
        return count

    run(stores[0], key, "holder")
    with ThreadPoolExecutor(12) as threads:
        asking = [threads.submit(ask, stores[number % 4]) for number in range(12)]
        time.sleep(0.3)
        began = time.monotonic()
        try:
            finished = stores[0].finish(key, finish("holder", settle_later=True))
        finally:  # or they ask for ever
            over.set()
        took = time.monotonic() - began
        counted = [future.result() for future in asking]

    assert finished.verdict == "ended"
    assert took < PATIENCE_S / 2  # it would go on trying for as long as it may
    assert sum(counted) >= finished.duplicates > 0


# -- the table ------------------------------------------------------------------------------


def _first_act(url: str, ready: Any, go: Any, answers: Any, number: int) -> None:
    store = SqlStore.from_url(url, timeout_s=20)
    ready.put(number)
    go.wait()
    try:
        answers.put(store.acquire("1:race", claim(f"process {number}")).outcome)
    except BaseException as error:
        answers.put(repr(error))


@pytest.mark.slow
def test_16_processes_create_the_table_at_once(sql_url):
    # Not forked from this process: its threads, those of other tests too, may hold any mutex.
    clean = multiprocessing.get_context("forkserver")
    clean.set_forkserver_preload([__name__])
    ready, go, answers = clean.Queue(), clean.Event(), clean.Queue()
    processes = [
        clean.Process(target=_first_act, args=(sql_url, ready, go, answers, number))
        for number in range(16)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.get(timeout=60)

    go.set()
    outcomes = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)

    assert sorted(outcomes) == ["created"] + ["duplicate"] * 15


def test_the_table_can_be_made_by_hand(sql_url, key):
    store = SqlStore.from_url(sql_url, create_table=False, table="locks")
    with pytest.raises(
        StoreUnavailable,
        match=r"tables locks, .*, locks_marks and locks_payloads must exist.*create_tables\(\)",
    ):
        store.acquire(key, claim("task"))

    engine = create_engine(sql_url)
    with engine.begin() as connection:
        for statement in store.ddl().split(";\n"):
            if statement:
                connection.execute(text(statement))
    columns = {column["name"] for column in inspect(engine).get_columns("locks")}
    engine.dispose()

    assert store.acquire(key, claim("task")).outcome == "created"
    assert {"namespace", "lock_key", "record", "revision", "schema_version"} <= columns
    store.close()


@pytest.mark.parametrize(
    "url", ["sqlite:///locks.db", "postgresql://host/locks", "mysql://host/locks"]
)
def test_the_sql_in_the_documentation_is_that_of_the_store(url):
    page = Path(__file__).parents[2] / "docs/reference/stores-sql.md"

    assert f"```sql\n{SqlStore.from_url(url).ddl()}```" in page.read_text(encoding="utf-8")


def test_create_tables_can_be_called_again_and_again(sql, key):
    sql.create_tables()
    sql.acquire(key, claim("task"))

    sql.create_tables()

    assert list(sql.read(key)[0].tasks) == ["task"]


def test_a_table_that_was_dropped_is_made_again(sql, sql_url, key):
    sql.acquire(key, claim("task"))
    engine = create_engine(sql_url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE celery_unique_lock"))
    engine.dispose()

    assert sql.acquire(key, claim("other")).outcome == "created"


def test_a_user_without_the_right_to_create_is_told_who_must(postgres_url, postgres_server, key):
    postgres_server.execute("DROP ROLE IF EXISTS reader")
    postgres_server.execute("CREATE ROLE reader LOGIN PASSWORD 'geheim'")
    store = SqlStore.from_url(
        postgres_url.replace("postgres@", "reader:geheim@"), timeout_s=PATIENCE_S
    )

    with pytest.raises(StoreUnavailable, match="as a user who may create tables, run") as raised:
        store.acquire(key, claim("task"))

    assert "geheim" not in str(raised.value)
    store.close()


def test_a_user_needs_no_more_than_to_read_and_write_the_table(postgres_url, postgres_server, key):
    owner = SqlStore.from_url(postgres_url, timeout_s=PATIENCE_S)
    owner.create_tables()
    owner.close()
    database = postgres_url.rpartition("/")[2]
    postgres_server.execute("DROP ROLE IF EXISTS writer")
    postgres_server.execute("CREATE ROLE writer LOGIN")
    tables = "celery_unique_lock, celery_unique_lock_marks, celery_unique_lock_payloads"
    grant = f"SELECT, INSERT, UPDATE, DELETE ON {tables}"
    postgres_server.execute(f"GRANT {grant} TO writer", database)
    store = SqlStore.from_url(postgres_url.replace("postgres@", "writer@"), timeout_s=PATIENCE_S)

    run(store, key, "task")
    store._database.run(lambda session: lock_once(store, session, key))
    assert store.finish(key, finish("task")).verdict == "ended"
    assert store.sweep() == 0
    store.close()
    postgres_server.execute(f"REVOKE {grant} FROM writer", database)


def lock_once(store: SqlStore, session: Any, key: str) -> None:
    with store._alone(session, key):
        pass


def test_a_server_that_only_reads_is_told_apart(postgres_url, key):
    store = SqlStore.from_url(
        f"{postgres_url}?options=-c%20default_transaction_read_only%3Don", timeout_s=PATIENCE_S
    )
    owner = SqlStore.from_url(postgres_url, timeout_s=PATIENCE_S)
    owner.create_tables()
    owner.close()

    with pytest.raises(StoreUnavailable, match="target_session_attrs=read-write"):
        store.acquire(key, claim("task"))
    store.close()


def test_a_record_that_cannot_be_read_is_said_to_be_so(sql, sql_url, key):
    sql.acquire(key, claim("task"))
    engine = create_engine(sql_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE celery_unique_lock SET record = '[]'"))
    engine.dispose()

    with pytest.raises(StoreUnavailable, match="cannot be read") as raised:
        sql.acquire(key, claim("other"))

    assert key not in str(raised.value)


def test_the_table_may_stand_in_another_schema(postgres_url, postgres_server, key):
    database = postgres_url.rpartition("/")[2]
    postgres_server.execute("CREATE SCHEMA locks", database)
    store = SqlStore.from_url(f"{postgres_url}?table=locks.Unique", timeout_s=PATIENCE_S)

    store.acquire(key, claim("task"))

    found = postgres_server.execute('SELECT lock_key FROM locks."Unique"', database)
    assert found == [(key,)]
    store.close()


# -- namespaces, walking, sweeping ----------------------------------------------------------


def test_namespaces_do_not_meet(open_sql, key):
    shop, shop_too, plain = open_sql(namespace="shop"), open_sql(namespace="shop2"), open_sql()
    publish(shop, key, "of shop")
    publish(shop_too, key, "of shop2")

    assert plain.acquire(key, claim("of none")).outcome == "created"
    advance(plain, 2 * QUEUE_LEASE)
    assert plain.sweep() == 1
    for store, task_id in ((shop, "of shop"), (shop_too, "of shop2")):
        assert [list(record.tasks) for _, record in store.walk()] == [[task_id]]
        assert store.sweep() == 0


def test_walk_gives_every_live_key_whatever_the_batch(sql):
    keys = sorted(fresh_key() for _ in range(23))
    for each in keys:
        publish(sql, each, "task")
    publish(sql, "1:lapses", "task", grace_ms=1)
    sql.cancel("1:lapses", "task", 0)
    time.sleep(0.01)

    for batch in (1, 5, 23, 500):
        assert [each for each, _ in sql.walk(batch)] == keys


def test_sweep_deletes_what_has_lapsed_in_batches(sql):
    keys = [fresh_key() for _ in range(25)]
    for each in keys:
        sql.acquire(each, claim("task"))
    advance(sql, GRACE // 2)
    publish(sql, "1:later", "task")
    advance(sql, GRACE)

    assert [sql.sweep(batch=10) for _ in range(4)] == [10, 10, 5, 0]
    assert [each for each, _ in sql.walk()] == ["1:later"]


# -- the clock --------------------------------------------------------------------------------


def test_tokens_grow_even_where_the_row_was_deleted_in_between(sql, key):
    tokens = []
    for number in range(50):
        sql.acquire(key, claim(f"{number}"))
        tokens.append(sql.start(key, start(f"{number}")).token)
        sql.finish(key, finish(f"{number}"))

    assert tokens == sorted(set(tokens))


def test_times_are_those_of_the_server(postgres_url, key, monkeypatch):
    store = SqlStore.from_url(postgres_url, timeout_s=PATIENCE_S)
    monkeypatch.setattr(store, "_client_us", lambda: 0)

    reply = store.acquire(key, claim("task"))

    assert abs(reply.now - time.time() * 1000) < MINUTE
    store.close()


# -- URLs and options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://", "memory://"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///file:locks?mode=memory&uri=true", "memory://"),
        (
            "sqlite+aiosqlite:///locks.db",
            r"write postgresql\+psycopg://, mysql\+pymysql:// or sqlite:///",
        ),
        (
            "postgresql+psycopg2://host/db",
            r"write postgresql\+psycopg://, mysql\+pymysql:// or sqlite:///",
        ),
        (
            "postgresql+asyncpg://host/db",
            r"write postgresql\+psycopg://, mysql\+pymysql:// or sqlite:///",
        ),
        ("postgresql://user:geheim@host:port/db", "is not a database URL"),
        ("sqlite:///locks.db?pool_size=0", "pool_size='0'.*a whole number above 0"),
        ("sqlite:///locks.db?pool_size=many", "pool_size='many'"),
        ("sqlite:///locks.db?create_table=maybe", "create_table='maybe'.*true or false"),
        ("sqlite:///locks.db?table=drop%20table", "table='drop table'"),
        ("sqlite:///locks.db?synchronous=off", "synchronous='off'.*normal or full"),
    ],
)
def test_a_wrong_url_says_what_to_write(url, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        open_store(url)

    assert "geheim" not in str(raised.value)
    assert raised.value.setting == "unique_store_url"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tabel": "x"}, "Did you mean 'table'"),
        ({"table": "a.b.c"}, "schema.table"),
        ({"table": 7}, "table=7"),
        ({"create_table": 2}, "true or false"),
        ({"pool_size": True}, "a whole number"),
        ({"synchronous": None}, "normal or full"),
        ({"namespace": "n" * 101}, "longer than 100"),
    ],
)
def test_a_wrong_option_says_what_to_write(option, message):
    with pytest.raises(ConfigurationError, match=message):
        open_store("sqlite:///locks.db", **option)


def test_opening_connects_to_nothing(tmp_path):
    open_store(f"sqlite:///{tmp_path / 'locks.db'}")
    open_store("postgresql+psycopg://nobody:geheim@host.invalid/nothing")

    assert list(tmp_path.iterdir()) == []


def test_a_relative_path_stays_where_the_store_was_opened(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    store = SqlStore.from_url("sqlite:///locks.db")
    (tmp_path / "elsewhere").mkdir()

    monkeypatch.chdir(tmp_path / "elsewhere")
    store.acquire(key, claim("task"))

    assert (tmp_path / "locks.db").exists()
    store.close()


def test_a_missing_directory_is_named(tmp_path):
    store = SqlStore.from_url(f"sqlite:///{tmp_path}/missing/locks.db")

    with pytest.raises(StoreUnavailable, match=rf"directory {tmp_path}/missing does not exist"):
        store.ping()


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("milk, bread, and something for the cat\n" * 50)
    store = SqlStore.from_url(f"sqlite:///{tmp_path}/notes.txt")

    with pytest.raises(StoreUnavailable, match=r"notes\.txt is not available: file is not a data"):
        store.ping()


def test_fingerprints_tell_stores_apart_and_no_secrets(tmp_path, monkeypatch):
    def fingerprint(url: str, **options: Any) -> str:
        return SqlStore.from_url(url, **options).fingerprint()

    monkeypatch.chdir(tmp_path)
    same = {
        fingerprint("sqlite:///locks.db"),
        fingerprint(f"sqlite:///{tmp_path}/locks.db", timeout_s=9),
    }
    same_server = {
        fingerprint("postgresql+psycopg://a:b@HOST/db"),
        fingerprint("postgresql://c:d@host:5432/db?sslmode=require"),
    }
    others = {
        fingerprint("sqlite:///other.db"),
        fingerprint("sqlite:///locks.db", namespace="shop"),
        fingerprint("sqlite:///locks.db", table="locks"),
        fingerprint("postgresql://host/db2"),
    }

    assert len(same) == len(same_server) == 1
    assert len(same | same_server | others) == 6
    assert all(len(one) == 8 and int(one, 16) >= 0 for one in same | same_server | others)


@pytest.mark.parametrize(("module", "url"), [("sqlalchemy", "sqlite:///x.db"),
                                             ("psycopg", "postgresql://host/db")])  # fmt: skip
def test_a_missing_package_names_the_pip_command(module, url, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    if module == "sqlalchemy":
        monkeypatch.setitem(sys.modules, "sqlalchemy.engine", None)

    with pytest.raises(ConfigurationError, match=r'pip install "celery-unique-tasks\[sql\]"'):
        SqlStore.from_url(url)


def test_what_a_url_says_to_psycopg_reaches_it(postgres_url, postgres_server):
    store = SqlStore.from_url(
        f"{postgres_url}?application_name=shop&options=-c%20work_mem%3D5MB&pool_size=2"
    )

    def shown(name: str) -> Any:
        return store._database.run(
            lambda session: session.execute(text(f"SHOW {name}"), {}).scalar()
        )

    assert shown("application_name") == "shop"
    assert shown("work_mem") == "5MB"
    assert shown("statement_timeout") == "2s"
    assert shown("idle_in_transaction_session_timeout") == "2s"
    assert shown("transaction_isolation") == "read committed"
    store.close()


def test_through_a_pooler_no_session_is_set_up(postgres_url, key):
    store = SqlStore.from_url(f"{postgres_url}?through_pooler=true", timeout_s=PATIENCE_S)

    for number in range(12):
        store.acquire(key, claim(f"{number}"))

    def asked(session: Any) -> tuple[Any, Any]:
        prepared = session.execute(text("SELECT count(*) FROM pg_prepared_statements"), {})
        return prepared.scalar(), session.execute(text("SHOW statement_timeout"), {}).scalar()

    assert store._database.run(asked) == (0, "0")
    store.close()


def test_a_deleted_sqlite_file_is_made_anew_for_all_and_said_once(tmp_path, caplog):
    """Who has it open would go on with the deleted file, and others with a new one."""
    path = tmp_path / "locks.db"
    with (
        closing(open_store(f"sqlite:///{path}")) as mine,
        closing(open_store(f"sqlite:///{path}")) as of_another,
    ):
        key = fresh_key()
        publish(mine, key, "first")
        assert of_another.acquire(key, claim("second")).outcome == "duplicate"
        for name in ("locks.db", "locks.db-wal", "locks.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)

        assert mine.acquire(key, claim("third")).outcome == "created"
        mine.confirm(key, "third", MINUTE)
        mine.flush()
        assert of_another.acquire(key, claim("fourth")).outcome == "duplicate"

    said = [one for one in caplog.records if "was deleted or replaced" in one.getMessage()]
    assert [one.levelname for one in said] == ["WARNING", "WARNING"]  # one of each store


def test_a_clock_set_back_keeps_a_dead_workers_key_as_much_longer(sqlite_url):
    with closing(open_store(sqlite_url)) as store:
        key = fresh_key()
        publish(store, key, "first")
        store.start(key, start("first", "celery@dead/1/2/3"))
        run_lease = store.read(key)[0].tasks["first"].lease - store.read(key)[1]
        back = 10 * MINUTE
        store.clock_offset_ms -= back

        store.clock_offset_ms += run_lease + 1000
        assert store.acquire(key, claim("second")).outcome == "duplicate"
        store.clock_offset_ms += back
        assert store.acquire(key, claim("third")).outcome == "created"

"""What is special to MariaDB, and to MySQL, whose statements MariaDB can run as well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
from sqlalchemy import event, text

from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.stores.base import Acquired
from celery_unique.stores.sql import SqlStore
from celery_unique.stores.sql.errors import DEADLOCK
from celery_unique.testing.store_contract.factories import (
    QUEUE_LEASE,
    claim,
    finish,
    fresh_key,
    publish,
    run,
    start,
)
from tests.stores.timing import after_all, unavailable_within
from tests.support import MariaDBServer
from tests.support.server import HOST

TIMEOUT = 1.0
#: What a busy machine may add to a time-out.
SLACK = 1.0

pytestmark = pytest.mark.server


@pytest.fixture
def store(opened: Callable[..., SqlStore], mariadb_url: str) -> SqlStore:
    return opened(mariadb_url)


def as_on_mysql(store: SqlStore) -> SqlStore:
    """Let the store believe that INSERT cannot answer, as it is on MySQL."""
    store.ping()
    store._database._engine.dialect.insert_returning = False
    return store


def other_session(url: str) -> pymysql.Connection[Any]:
    port, _, database = url.rpartition(":")[2].partition("/")
    return pymysql.connect(host=HOST, port=int(port), user="root", database=database)


# -- round trips ----------------------------------------------------------------------------------


def test_a_call_is_one_round_trip_new_or_duplicate(store, mariadb_server, key):
    def questions() -> int:
        [(_, number)] = mariadb_server.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(str(number))

    publish(store, fresh_key(), "warm")
    before = questions()
    asking = questions() - before  # what it costs to ask

    before = questions()
    store.acquire(key, claim("a"))
    new = questions() - before - asking
    before = questions()
    store.acquire(key, claim("b"))
    duplicate = questions() - before - asking
    before = questions()
    store.start(key, start("a"))
    started = questions() - before - asking

    assert (new, duplicate, started) == (1, 1, 2)


def test_on_mysql_a_call_is_a_read_and_a_write(store, key):
    as_on_mysql(store)
    sent: list[str] = []
    event.listen(
        store._database._engine,
        "before_cursor_execute",
        lambda _connection, _cursor, statement, *_: sent.append(statement.split()[0]),
    )

    outcomes = [store.acquire(key, claim(f"{number}")).outcome for number in range(3)]

    assert outcomes == ["created", "duplicate", "duplicate"]
    assert sent == ["SELECT", "INSERT", "SELECT", "UPDATE", "SELECT", "UPDATE"]
    assert store.read(key)[0].tasks["0"].duplicates == 2


def test_on_mysql_one_of_many_at_once_is_admitted(opened, mariadb_url):
    stores = [as_on_mysql(opened(mariadb_url)) for _ in range(8)]
    keys = [fresh_key() for _ in range(15)]
    barrier = threading.Barrier(len(stores))
    outcomes: dict[tuple[str, int], Acquired] = {}

    def call(number: int) -> None:
        for key in keys:
            barrier.wait(60)
            outcomes[key, number] = stores[number].acquire(key, claim(f"of {number}"))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    for key in keys:
        replies = [outcomes[key, number] for number in range(len(stores))]
        [winner] = [n for n, reply in enumerate(replies) if reply.outcome == "created"]
        named = {reply.holder.task_id for reply in replies if reply.holder}
        assert named == {f"of {winner}"}
        assert stores[0].read(key)[0].tasks[f"of {winner}"].duplicates == len(stores) - 1


# -- what the table keeps apart ------------------------------------------------------------------


def test_keys_that_differ_in_case_or_accent_alone_are_different_keys(opened, mariadb_url):
    keys = ["shop:a", "shop:A", "shop:ä", "shop:\uff21\uff22", "shop:ab"]
    stores = [opened(mariadb_url, namespace=name) for name in ("", "shop", "Shop")]

    outcomes = {each.acquire(key, claim("a")).outcome for each in stores for key in keys}

    assert outcomes == {"created"}
    assert [sorted(key for key, _ in each.walk()) for each in stores] == [sorted(keys)] * 3


def test_a_namespace_that_ends_with_a_space_is_refused(mariadb_url):
    with pytest.raises(ConfigurationError, match="ends with a space") as caught:
        SqlStore.from_url(mariadb_url, namespace="shop ")

    assert caught.value.setting == "unique_namespace"


def test_a_record_may_be_larger_than_a_text_column(store, key):
    names = [f"{number}-{'x' * 2000}" for number in range(40)]
    for name in names:
        store.cancel(key, name, QUEUE_LEASE)

    record, _ = store.read(key)

    assert len(record.dumps()) > 70_000
    assert sorted(record.marks) == sorted(names)


def test_names_that_have_to_be_escaped_come_back_as_they_were(store):
    for odd in ("quote ' \" ` \\", "percent % %s %(a)s :key", "\x00\n\r\x1a\x7f", "größe 量 🔒"):
        key = fresh_key()
        publish(store, key, odd, arguments=odd)
        duplicate = store.acquire(key, claim("b", arguments=odd, parent=odd + "!"))

        assert duplicate.holder is not None
        assert (duplicate.holder.task_id, duplicate.holder.arguments) == (odd, odd)


# -- sessions, locks and deadlocks ---------------------------------------------------------------


def test_how_a_session_is_set_up(store):
    asked = text(
        "SELECT @@tx_isolation, @@autocommit, @@time_zone, @@innodb_lock_wait_timeout, "
        "@@character_set_connection, @@max_statement_time, @@idle_transaction_timeout"
    )

    found: Any = store._database.run(lambda session: session.execute(asked, {}).one())

    assert tuple(found) == ("READ-COMMITTED", 1, "+00:00", 20, "utf8mb4", 20, 20)


def test_the_victim_of_a_deadlock_begins_again(store, mariadb_url):
    mine, theirs = fresh_key(), fresh_key()
    for key in (mine, theirs):
        publish(store, key, "a")
    has_mine, has_theirs = threading.Event(), threading.Event()
    tries: list[int] = []
    codes: list[int] = []

    @event.listens_for(store._database._engine, "handle_error")
    def hear(context: Any) -> None:
        codes.append(context.original_exception.args[0])

    def lock_both(session: Any) -> str:
        tries.append(1)
        with store._alone(session, mine):
            has_mine.set()
            if len(tries) == 1:
                has_theirs.wait(20)
            session.execute(store._statements.lock, store._values(theirs)).close()
        return "done"

    def lock_the_other_way_round() -> None:
        with other_session(mariadb_url) as other, other.cursor() as cursor:
            # It has changed more rows: the other one is the victim.
            for key in (theirs, *(fresh_key() for _ in range(20))):
                cursor.execute(
                    "INSERT INTO celery_unique_lock (namespace, lock_key, record, token, revision,"
                    " expires_at, conflicts, conflict_at, holder_state, holder_since, holder_until)"
                    " VALUES ('', %s, '{}', 0, 0, 0, 0, 0, '-', 0, 0)"
                    " ON DUPLICATE KEY UPDATE token = token + 1",
                    (key,),
                )
            has_mine.wait(20)
            has_theirs.set()
            cursor.execute("UPDATE celery_unique_lock SET token = 0 WHERE lock_key = %s", (mine,))
            other.rollback()

    thread = threading.Thread(target=lock_the_other_way_round)
    thread.start()
    done = store._database.run(lock_both)
    thread.join(20)

    assert (done, len(tries), codes) == ("done", 2, [DEADLOCK])


def test_a_row_locked_by_somebody_else_is_not_waited_for_longer_than_the_time_out(
    opened, mariadb_url, key
):
    store = opened(mariadb_url, timeout_s=TIMEOUT)
    publish(opened(mariadb_url), key, "task")
    with other_session(mariadb_url) as other, other.cursor() as cursor:
        cursor.execute("UPDATE celery_unique_lock SET token = token + 1")

        unavailable_within(TIMEOUT + SLACK, lambda: store.acquire(key, claim("other")))
        other.rollback()

    assert after_all(lambda: store.acquire(key, claim("other")).outcome) == "duplicate"


# -- gone, silent, back again ------------------------------------------------------------------


def test_a_server_that_is_not_there_is_told_at_once(opened):
    store = opened(f"mysql+pymysql://shop:geheim@{HOST}:1/locks", timeout_s=TIMEOUT)

    message = str(unavailable_within(TIMEOUT + SLACK, store.ping))

    assert f"{HOST}:1/locks" in message
    assert "geheim" not in message


def test_a_server_that_falls_silent_in_the_middle(
    opened, start_proxy, mariadb_server, mariadb_url, key
):
    proxy = start_proxy(mariadb_server.port)
    store = opened(proxy.url_of(mariadb_url), timeout_s=TIMEOUT)
    publish(opened(mariadb_url), key, "task")
    after_all(store.ping)
    proxy.stall()

    for act in (
        lambda: store.acquire(key, claim("other")),
        lambda: store.start(key, start("task")),
        lambda: store.read(key),
    ):
        unavailable_within(TIMEOUT + SLACK, act)
    proxy.restore()

    assert after_all(lambda: store.start(key, start("task")).verdict) == "run"


# -- users --------------------------------------------------------------------------------------


@pytest.fixture
def user_url(mariadb_server: MariaDBServer, mariadb_url: str) -> Iterator[str]:
    mariadb_server.execute(f"CREATE USER shop@'{HOST}' IDENTIFIED BY 'geheim'")
    yield mariadb_url.replace("root@", "shop:geheim@")
    mariadb_server.execute(f"DROP USER shop@'{HOST}'")


def test_a_user_needs_no_more_than_to_read_and_write_the_tables(
    opened, mariadb_server, mariadb_url, user_url, key
):
    opened(mariadb_url).create_tables()
    database = mariadb_url.rpartition("/")[2]
    for suffix in ("", "_followers", "_marks", "_payloads"):
        table = f"celery_unique_lock{suffix}"
        mariadb_server.execute(
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.{table} TO shop@'{HOST}'"
        )
    store = opened(user_url)

    run(store, key, "task")
    store.acquire(key, claim("other"))
    assert store.finish(key, finish("task")).duplicates == 1
    merged = fresh_key()
    publish(store, merged, "holder", merge='{"numbers": [1]}')
    assert store.acquire(merged, claim("adds", merge='{"numbers": [2]}')).outcome == "merged"
    assert store.unmerge(merged, "adds")
    assert store.start(merged, start("holder", merge=True)).verdict == "run"
    store.finish(merged, finish("holder"))
    assert store.sweep() == 0


def test_a_user_without_the_right_to_create_is_told_who_must(
    opened, mariadb_server, mariadb_url, user_url, key
):
    database = mariadb_url.rpartition("/")[2]
    mariadb_server.execute(f"GRANT SELECT, INSERT ON {database}.* TO shop@'{HOST}'")

    with pytest.raises(StoreUnavailable, match="as a user who may create tables, run") as raised:
        opened(user_url).acquire(key, claim("task"))

    assert "geheim" not in str(raised.value)


def test_a_server_that_only_reads_is_told_apart(opened, mariadb_server, mariadb_url, user_url, key):
    opened(mariadb_url).create_tables()
    database = mariadb_url.rpartition("/")[2]
    mariadb_server.execute(f"GRANT ALL ON {database}.* TO shop@'{HOST}'")
    store = opened(user_url)
    mariadb_server.execute("SET GLOBAL read_only = 1")
    try:
        with pytest.raises(StoreUnavailable, match="write the host of the primary"):
            store.acquire(key, claim("task"))
    finally:
        mariadb_server.execute("SET GLOBAL read_only = 0")

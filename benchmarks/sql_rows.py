"""Fills tables of locks: copies of real rows under keys that no call has, made by the database."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, create_engine, event, text

from benchmarks.contenders import TASK
from benchmarks.storage import GRACE_MS, QUEUE_MS, RUN_MS, STATES
from celery_unique.keys.digest import key_of
from celery_unique.stores.base import Claim, Start
from celery_unique.stores.sql import SqlStore

LOCKS, FOLLOWERS = "celery_unique_lock", "celery_unique_lock_followers"
MARKS, PAYLOADS = "celery_unique_lock_marks", "celery_unique_lock_payloads"
TABLES = (LOCKS, FOLLOWERS, MARKS, PAYLOADS)
#: One copy expires so much after the other, as calls come one after the other.
APART_MS = 60


@dataclass(frozen=True)
class Ways:
    """How one database counts up, hashes a number, and is brought to rest after many rows, and
    before some more are measured."""

    numbers: str
    digest: str
    text: str
    rest: tuple[str, ...]
    catch_up: tuple[str, ...] = ()


WAYS = {
    "sqlite": Ways(
        numbers="(WITH RECURSIVE up(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM up"
        " WHERE n < {count}) SELECT n FROM up)",
        digest="sha256({number})",
        text="TEXT",
        # SQLite gathers statistics only on request, which an application rarely makes.
        rest=("PRAGMA wal_checkpoint(TRUNCATE)",),
    ),
    "postgresql": Ways(
        numbers="(SELECT generate_series(1, {count}) AS n)",
        digest="encode(sha256(CAST(CAST({number} AS TEXT) AS BYTEA)), 'hex')",
        text="TEXT",
        # What autovacuum and the checkpointer do in the minutes after.
        rest=(*(f"VACUUM ANALYZE {table}" for table in TABLES), "CHECKPOINT"),
    ),
    "mysql": Ways(
        numbers="(SELECT seq AS n FROM seq_1_to_{count})",
        digest="sha2({number}, 256)",
        text="CHAR",
        rest=(f"ANALYZE TABLE {', '.join(TABLES)}",),
        # MariaDB removes deleted rows from its indexes later, some thousands at a time. Until then
        # a reader visits each of them, on one server more than on the other.
        catch_up=("SET GLOBAL innodb_max_purge_lag_wait = 0",),
    ),
}


@dataclass(frozen=True)
class Copies:
    """What sets one copy of a row apart from the others, in terms of its number ``n``."""

    number: str = "n"  # from which the key is made
    later: str = f"n * {APART_MS}"  # than the copied one, in milliseconds
    share: str = "1 = 1"  # of all numbers


#: Of a hundred locks one is active, one waits and is followed, and the others wait.
LIVE = {
    "active": Copies(share="n % 100 = 1"),
    "followed": Copies(share="n % 100 = 2"),
    "waiting": Copies(share="n % 100 NOT IN (1, 2)"),
}
#: They have lapsed a day ago.
LAPSED = Copies(number="-n", later=f"n * {APART_MS} - {2 * QUEUE_MS}")


def fill(store: SqlStore, count: int) -> None:
    """Put ``count`` live locks into the empty tables."""
    with _connection(store) as connection:
        for kind, copies in LIVE.items():
            _copy(connection, _real_lock(store, kind), copies, count)
        _rest(connection)
        there = connection.scalar(text(f"SELECT count(*) FROM {LOCKS}"))
    if there != count:
        raise RuntimeError(f"{there} locks where {count} were to be")


def add_lapsed(store: SqlStore, count: int) -> None:
    """Put ``count`` lapsed locks beside what is there."""
    with _connection(store) as connection:
        _copy(connection, _real_lock(store, "waiting"), LAPSED, count)
        _rest(connection)


def add_marks(store: SqlStore, count: int) -> None:
    """Put ``count`` marks beside the records of a hundred keys; half of them have lapsed."""
    with _connection(store) as connection:
        ways = WAYS[connection.dialect.name]
        now = store.read("1:none")[1]
        task_id = f"substr({ways.digest.format(number='n')}, 1, 36)"
        connection.execute(
            text(
                f"INSERT INTO {MARKS} SELECT '', {ways.digest.format(number='(n % 100)')},"
                f" {task_id}, 'superseded', {now - count // 2 * APART_MS} + n * {APART_MS},"
                f" {task_id}"
                f" FROM {ways.numbers.format(count=count)} AS numbers"
            )
        )
        _rest(connection)


def add_payloads(store: SqlStore, count: int) -> None:
    """Put ``count`` rows of payloads there, four of each task; half of them have lapsed."""
    with _connection(store) as connection:
        ways = WAYS[connection.dialect.name]
        now = store.read("1:none")[1]
        digest = ways.digest.format(number="(n - n % 4)")
        connection.execute(
            text(
                f"INSERT INTO {PAYLOADS} SELECT '', {digest}, substr({digest}, 1, 36), n % 4 + 1,"
                f" 'its lines', 9, {now - count // 2 * APART_MS} + n * {APART_MS}"
                f" FROM {ways.numbers.format(count=count)} AS numbers"
            )
        )
        _rest(connection)


def catch_up(store: SqlStore) -> None:
    """Wait until the server has done what it puts off."""
    with _connection(store) as connection:
        for statement in WAYS[connection.dialect.name].catch_up:
            connection.exec_driver_sql(statement)


@contextmanager
def _connection(store: SqlStore) -> Iterator[Connection]:
    """One without the time-outs of the store's own."""
    engine = create_engine(store._options.url, isolation_level="AUTOCOMMIT")
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _teach_sha256)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _rest(connection: Connection) -> None:
    for statement in WAYS[connection.dialect.name].rest:
        connection.exec_driver_sql(statement)


def _teach_sha256(connection: Any, _record: Any) -> None:
    connection.create_function(
        "sha256", 1, lambda n: hashlib.sha256(str(n).encode()).hexdigest(), deterministic=True
    )


def _real_lock(store: SqlStore, kind: str) -> tuple[str, str]:
    key, task_id = key_of(f"the {kind} one that is copied"), str(uuid.uuid4())
    store.acquire(key, Claim(task_id, TASK, STATES, GRACE_MS))
    store.confirm(key, task_id, QUEUE_MS)
    store.flush()
    if kind == "active":
        delivery = "celery@worker1.example.org/12345/18769a7b3f2d1c00/1"
        store.start(key, Start(task_id, delivery, TASK, QUEUE_MS, RUN_MS, QUEUE_MS))
    elif kind == "followed":
        # A message of a usual size.
        store.acquire(key, Claim(str(uuid.uuid4()), TASK, STATES, GRACE_MS, join="x" * 600))
    return key, task_id


def _copy(connection: Connection, real: tuple[str, str], copies: Copies, count: int) -> None:
    """Copies instead of the real lock, in the order of their keys: so a tree fills fastest."""
    key, task_id = real
    ways = WAYS[connection.dialect.name]
    digest = ways.digest.format(number=copies.number)
    expires_at = f"one.expires_at + {copies.later}"
    own = {
        "lock_key": f"replace(one.lock_key, :digest, {digest})",
        "record": f"replace(replace(one.record, :task_id, substr({digest}, 1, 36)),"
        f" CAST(one.expires_at AS {ways.text}), CAST({expires_at} AS {ways.text}))",
        "expires_at": expires_at,
        "holder_until": expires_at,
        "due_at": f"one.due_at + {copies.later}",
    }
    numbers = ways.numbers.format(count=count)
    values = {"key": key, "task_id": task_id, "digest": key.partition(":")[2]}
    for table in (LOCKS, FOLLOWERS):
        columns = connection.execute(text(f"SELECT * FROM {table} WHERE 1 = 0")).keys()
        copied = ", ".join(own.get(name, f"one.{name}") for name in columns)
        insert = (
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {copied}"
            f" FROM {table} AS one CROSS JOIN {numbers} AS numbers"
            f" WHERE one.lock_key = :key AND {copies.share} ORDER BY {own['lock_key']}"
        )
        connection.execute(text(insert), values)
        connection.execute(text(f"DELETE FROM {table} WHERE lock_key = :key"), values)

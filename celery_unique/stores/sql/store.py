"""Lock store in a database: one row for each key, changed by single statements in autocommit.

The rules of every act are in :mod:`celery_unique.stores.acts`. The store reads a row, runs the act
on its record, and writes the record only if the row is still the one that was read
(compare-and-set on its revision). A new key and a plain duplicate, which is nearly every call, take
one statement.

Followers have a row each in a second table, marks that have no room in the record in a third, and
payloads some rows in a fourth. An act on a key that has any of these, or gets its first one, is a
transaction in which the key's row is locked.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores import acts
from celery_unique.stores.base import Acquired, Claim, Finish, Guarantee, Start, Started
from celery_unique.stores.diagnosis import Diagnosis
from celery_unique.stores.fire_and_forget import FireAndForgetQueue
from celery_unique.stores.record import Record
from celery_unique.stores.record_followers import KEPT_MS, UNREADABLE, unreadable
from celery_unique.stores.record_store import RecordedStore

from .database import Database, Session
from .diagnosis import diagnose
from .rows import Row, columns_of, fresh_record, parent_text, sole_task, sure_states
from .side_tables import FollowerRows, MarkRows, PayloadRows
from .statements import DIALECTS, Statements
from .statements_mysql import MySqlStatements
from .url import Options, read_options

if TYPE_CHECKING:
    from sqlalchemy import TextClause
    from sqlalchemy.engine import CursorResult

Reply = TypeVar("Reply")

NO_LIMIT = 2**62


class _Overtaken(Exception):
    """The row has changed since it was read: roll back, and try again."""


class _NeedsLock(Exception):
    """The act needs a transaction in which the row of the key is locked."""


class SqlStore(RecordedStore):
    """Tables of locks, followers, marks and payloads, on SQLite, PostgreSQL, MariaDB or MySQL."""

    guarantee: Guarantee = "strong"
    mechanism = (
        "one row for each key: an INSERT that creates or returns it, and compare-and-set on a "
        "revision, in autocommit; with followers, or many replaced tasks, a transaction"
    )

    def __init__(self, options: Options) -> None:
        self.clock_offset_ms = 0
        self._options = options
        dialect = DIALECTS[options.url.get_backend_name()]
        statements = MySqlStatements if dialect.name == "mysql" else Statements
        self._statements = statements(dialect, options.table)
        self._database = Database(options, self._statements.ddl())
        self._fire_and_forget = FireAndForgetQueue(options.timeout_s)

    @classmethod
    def from_url(
        cls, url: str, *, namespace: str = "", timeout_s: float = 2.0, **options: Any
    ) -> SqlStore:
        """The store at the URL. Does not connect yet."""
        return cls(read_options(url, namespace, timeout_s, options))

    def fingerprint(self) -> str:
        """Eight hex digits: equal where two processes use the same locks."""
        return self._options.fingerprint()

    def ddl(self) -> str:
        """The SQL that creates the tables and their indexes."""
        return "".join(f"{statement};\n" for statement in self._statements.ddl())

    def create_tables(self) -> None:
        """Create the tables and their indexes where they are missing."""
        self._database.create_tables()

    # -- acquire -------------------------------------------------------------

    def acquire(self, key: str, claim: Claim) -> Acquired:
        revision = _new_revision()
        return self._database.run(lambda session: self._acquire(session, key, claim, revision))

    def acquire_many(
        self, claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        requests = [(key, claim, _new_revision()) for key, claim in claims]
        replies: list[Acquired | StoreUnavailable] = []

        def acquire_the_rest(session: Session) -> list[Acquired | StoreUnavailable]:
            for request in requests[len(replies) :]:
                try:
                    replies.append(self._acquire(session, *request))
                except UnreadableRecord as error:
                    replies.append(error)
                # After a reply only: this runs again while the database is busy, and each run
                # would begin with a new time-out.
                session.next_act()
            return replies

        return self._database.run(acquire_the_rest)

    def _acquire(self, session: Session, key: str, claim: Claim, revision: int) -> Acquired:
        if claim.merge:
            return self._swap_acquire(session, key, claim, alone=True)
        if not session.has_insert_returning:  # MySQL: as any other act, a read and a write
            return self._swap_acquire(session, key, claim, alone=bool(claim.join))
        values = {
            "record": fresh_record(claim),
            "grace_ms": claim.grace_ms,
            "window_ms": claim.window_ms,
            "kept_ms": claim.keep_ms or claim.window_ms,
            "delay_ms": claim.delay_ms,
            "sure_states": sure_states(claim),
            "parent": parent_text(claim),
            "revision": revision,
        }
        tries = 0
        with self._reading(key):
            while True:
                row = self._row(session, self._statements.acquire, key, values)
                if row.revision == revision:  # this statement inserted it
                    eta = row.now + claim.delay_ms if claim.delay_ms else 0
                    return Acquired("created", now=row.now, eta=eta)
                if claim.join:
                    return self._swap_acquire(session, key, claim, alone=True)
                counted = row.counted(claim)
                record = row.load(row.conflicts - counted)
                has_rows = _has_rows(record)
                reply = acts.acquire(record, claim, row.now)
                if counted and reply.outcome != "created":
                    return reply
                if has_rows:
                    return self._swap_acquire(session, key, claim, alone=True)
                if self._write(session, key, row, record):
                    return reply
                # Another process has changed the row. The next attempt counts this duplicate,
                # if it still is one, in the same statement.
                tries += 1
                self._database.pause(tries)

    def _swap_acquire(self, session: Session, key: str, claim: Claim, alone: bool) -> Acquired:
        def act(record: Record, us: int) -> Acquired:
            return acts.acquire(record, claim, us // 1000)

        return self._swap(session, key, act, alone)

    # -- any other act -------------------------------------------------------

    def _act(self, key: str, act: Callable[[Record, int], Reply]) -> Reply:
        return self._database.run(lambda session: self._swap(session, key, act))

    def _swap(
        self,
        session: Session,
        key: str,
        act: Callable[[Record, int], Reply],
        alone: bool = False,
    ) -> Reply:
        tries = 0
        while True:
            # First without a lock, which nearly always suffices. After a lost race the row is
            # locked, or a key with many duplicates could never be finished.
            try:
                with self._reading(key), self._alone(session, key) if alone else nullcontext():
                    return self._try(session, key, act, alone)
            except _NeedsLock:
                alone = True
            except _Overtaken:
                alone = True
                tries += 1
                self._database.pause(tries)

    def _try(
        self, session: Session, key: str, act: Callable[[Record, int], Reply], alone: bool
    ) -> Reply:
        row = self._row(session, self._statements.see, key)
        record = row.load()
        followed = record.following is not None
        if alone:
            record.followers = FollowerRows(session, self._statements, self._values(key))
            record.beside = MarkRows(session, self._statements, self._values(key))
            record.payloads = PayloadRows(session, self._statements, self._values(key))
        elif _has_rows(record):
            raise _NeedsLock
        record.purge(row.now)
        forgotten = followed and record.following is None
        before = (record.dumps(), record.token, sole_task(record))
        reply = act(record, row.now_us)
        if not alone and record.more_until:
            raise _NeedsLock  # it left a mark that needs a row
        after = (record.dumps(), record.token, sole_task(record))
        # Duplicates that are counted meanwhile stay exact while their holder stays.
        same_holder = after[2] is not None and after[2] == before[2]
        if after == before and not forgotten:
            return reply
        if not self._write(session, key, row, record, same_holder):
            raise _Overtaken
        return reply

    def follow(self, key: str, claim: Claim, holder_id: str) -> bool:
        def act(record: Record, us: int) -> bool:
            return acts.follow(record, claim, holder_id, us // 1000)

        return self._database.run(lambda session: self._swap(session, key, act, alone=True))

    def start(self, key: str, start: Start) -> Started:
        if not start.merge:
            return super().start(key, start)

        def act(record: Record, us: int) -> Started:
            return acts.start(record, start, us)

        return self._database.run(lambda session: self._swap(session, key, act, alone=True))

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Raise UnreadableRecord for a stored value that is not a record."""
        try:
            yield
        except UNREADABLE as error:
            raise unreadable(key, error, self._options.shown_url) from error

    @contextmanager
    def _alone(self, session: Session, key: str) -> Iterator[None]:
        with session.transaction(self._statements.begin):
            if self._statements.lock is not None:
                session.execute(self._statements.lock, self._values(key)).close()
            yield

    def _write(
        self, session: Session, key: str, row: Row, record: Record, same_holder: bool = False
    ) -> bool:
        """Store the record unless the row has changed since it was read."""
        values = self._values(key) | {
            "revision": row.revision,
            "new_revision": _new_revision(),
            "folded": row.conflicts,
            "most_conflicts": NO_LIMIT if same_holder else row.conflicts,
        }
        if record:
            values |= columns_of(record)
            written = self._statements.insert if row.record is None else self._statements.update
        else:
            written = self._statements.delete
        return session.execute(written, values).rowcount == 1

    def _row(
        self,
        session: Session,
        statement: TextClause,
        key: str,
        values: dict[str, Any] | None = None,
    ) -> Row:
        columns: Any = session.execute(statement, self._values(key) | (values or {})).one()
        return Row(*columns)

    def _values(self, key: str = "") -> dict[str, Any]:
        return {
            "namespace": self._options.namespace,
            "key": key,
            "client_us": self._client_us(),
            "offset_us": self.clock_offset_ms * 1000,
        }

    def _client_us(self) -> int:
        return time.time_ns() // 1000

    # -- fire-and-forget -----------------------------------------------------

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        self._fire_and_forget.put(partial(super().confirm, key, task_id, lease_ms))

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        self._fire_and_forget.put(partial(super().retry, key, task_id, delivery, lease_ms, copies))

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        self._fire_and_forget.put(partial(super().settle, key, finish, mark_done))

    def forget(self, key: str, task_id: str) -> None:
        self._fire_and_forget.put(partial(super().forget, key, task_id))

    def flush(self, timeout_s: float | None = None) -> None:
        self._fire_and_forget.flush(timeout_s)

    # -- reading and maintenance ---------------------------------------------

    def read(self, key: str) -> tuple[Record, int]:
        row = self._database.run(lambda session: self._row(session, self._statements.see, key))
        with self._reading(key):
            return _alive(row), row.now

    def release(self, key: str, task_id: str | None = None, lease: int = 0) -> int:
        try:
            return super().release(key, task_id, lease)
        except UnreadableRecord:
            if task_id:
                raise
            return self._delete(key)

    def _delete(self, key: str) -> int:
        """Delete all rows of a key, readable or not."""

        def delete(session: Session) -> int:
            with self._alone(session, key):
                session.execute(self._statements.delete_followers, self._values(key)).close()
                session.execute(self._statements.delete_payloads, self._values(key)).close()
                return session.execute(self._statements.delete_any, self._values(key)).rowcount

        return self._database.run(delete)

    def walk(self, batch: int = 500, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        after = ""
        while True:
            page = self._page(after, batch)
            for key, row in page:
                try:
                    with self._reading(key):
                        record = _alive(row)
                except UnreadableRecord as error:
                    record = Record(unreadable=str(error))
                if record:
                    yield key, record
            if len(page) < batch or time.monotonic() > stop_at:
                return
            after = page[-1][0]

    def _page(self, after: str, batch: int) -> list[tuple[str, Row]]:
        values = self._values() | {"after": after, "batch": batch}
        rows: Any = self._database.run(
            lambda session: session.execute(self._statements.page, values).all()
        )
        return [(row[0], Row(*row[1:])) for row in rows]

    def due(self, limit: int = 20) -> list[str]:
        return self._keys(self._statements.due, {"batch": limit})

    def _keys(self, statement: TextClause, values: dict[str, Any]) -> list[str]:
        found = self._database.run(
            lambda session: session.execute(statement, self._values() | values).all()
        )
        return [row[0] for row in found]

    def sweep(self, batch: int = 500) -> int:
        abandoned = self._keys(self._statements.abandoned, {"batch": batch, "kept_ms": KEPT_MS})
        for key in abandoned:
            try:
                self._act(key, lambda record, us: None)  # deletes what has lapsed, in both tables
            except UnreadableRecord:
                self._delete(key)  # by its due time, which is a column, it has lapsed
        values = self._values() | {"batch": batch}

        def swept(session: Session, statement: TextClause) -> int:
            return _count(session.execute(statement, values))

        locks = self._database.run(lambda session: swept(session, self._statements.sweep))
        marks = self._database.run(lambda session: swept(session, self._statements.sweep_marks))
        payloads = self._database.run(
            lambda session: swept(session, self._statements.sweep_payloads)
        )
        return len(abandoned) + locks + marks + payloads

    def ping(self) -> None:
        self._database.run(lambda session: session.execute(self._statements.ping, {}).close())

    def diagnose(self) -> Diagnosis:
        url, place = self._options.url, self._options.shown_url
        return self._database.run(lambda session: diagnose(session, url.get_backend_name(), place))

    def close(self) -> None:
        self._fire_and_forget.drain(self._options.timeout_s)
        self._database.close()


def _has_rows(record: Record) -> bool:
    """Whether the key has rows in the other tables."""
    return (
        record.following is not None
        or record.more_until > 0
        or any(task.merges for task in record.tasks.values())
    )


def _alive(row: Row) -> Record:
    record = row.load()
    record.purge(row.now)
    return record


def _count(swept: CursorResult[Any]) -> int:
    # By its rows where it returns some: sqlite3 has no rowcount for a statement that begins WITH.
    return len(swept.all()) if swept.returns_rows else swept.rowcount


def _new_revision() -> int:
    """Random, so that a row that was deleted and inserted again is a different one.

    Not from ``random``, which a program may seed alike in all of its processes.
    """
    return int.from_bytes(os.urandom(8)) >> 2

"""Locks in a table: one row a key, changed by single statements that commit by themselves.

The rules of every act are in :mod:`celery_unique.stores.acts`. Here a row is
read, the act is run on its record, and the record is written back only where
the row is still the one that was read (compare-and-set on its revision). A new
key and a plain duplicate, which is nearly every call, take one statement.

Followers have a row each in a second table, and marks that have no room in the record in a third.
An act on a key that has either, or gets its first one, is a transaction in which the key's row is
locked.
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
from celery_unique.stores.base import Acquired, Claim, Finish, Guarantee
from celery_unique.stores.diagnosis import Diagnosis
from celery_unique.stores.fire_and_forget import FireAndForgetQueue
from celery_unique.stores.record import Record
from celery_unique.stores.record_followers import KEPT_MS, UNREADABLE, unreadable
from celery_unique.stores.record_store import RecordedStore

from .database import Database, Session
from .diagnosis import diagnose
from .followers import FollowerRows
from .marks import MarkRows
from .rows import Row, columns_of, fresh_record, parent_text, sole_task, sure_states
from .statements import DIALECTS, Statements
from .statements_mysql import MySqlStatements
from .url import Options, read_options

if TYPE_CHECKING:
    from sqlalchemy import TextClause
    from sqlalchemy.engine import CursorResult

Reply = TypeVar("Reply")

NO_LIMIT = 2**62


class _Overtaken(Exception):
    """The row was changed since it was seen: undo what was done, and try again."""


class _MustBeAlone(Exception):
    """The act needs the key's row for itself."""


class SqlStore(RecordedStore):
    """Tables of locks, followers and marks, on SQLite, PostgreSQL, MariaDB or MySQL."""

    guarantee: Guarantee = "strong"
    mechanism = (
        "one row a key: an INSERT that makes it or finds it, and compare-and-set on a revision, in "
        "autocommit; with followers, or many replaced tasks, a transaction"
    )

    def __init__(self, options: Options) -> None:
        self.clock_offset_ms = 0
        self._options = options
        dialect = DIALECTS[options.url.get_backend_name()]
        statements = MySqlStatements if dialect.name == "mysql" else Statements
        self._statements = statements(dialect, options.table)
        self._database = Database(options, self._statements.ddl())
        self._one_way = FireAndForgetQueue(options.timeout_s)

    @classmethod
    def from_url(
        cls, url: str, *, namespace: str = "", timeout_s: float = 2.0, **options: Any
    ) -> SqlStore:
        """The store behind the URL. Connects to nothing yet."""
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
        asked = (key, claim, _new_revision())
        return self._database.run(lambda session: self._acquire(session, *asked))

    def acquire_many(
        self, claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        asked = [(key, claim, _new_revision()) for key, claim in claims]
        replies: list[Acquired | StoreUnavailable] = []

        def acquire_the_rest(session: Session) -> list[Acquired | StoreUnavailable]:
            for one in asked[len(replies) :]:
                try:
                    replies.append(self._acquire(session, *one))
                except UnreadableRecord as error:
                    replies.append(error)
                # After an answer only: this runs again while the database is busy, and would
                # else begin with a new time-out each time.
                session.next_act()
            return replies

        return self._database.run(acquire_the_rest)

    def _acquire(self, session: Session, key: str, claim: Claim, revision: int) -> Acquired:
        with self._reading(key):
            return self._acquire_or_raise(session, key, claim, revision)

    def _acquire_or_raise(
        self, session: Session, key: str, claim: Claim, revision: int
    ) -> Acquired:
        if not session.answers_inserts:  # MySQL: as any other act, a read and a write
            return self._swap(
                session,
                key,
                lambda record, us: acts.acquire(record, claim, us // 1000),
                alone=bool(claim.join),
            )
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
        while True:
            row = self._row(session, self._statements.acquire, key, values)
            if row.revision == revision:  # ours: it was not there before
                eta = row.now + claim.delay_ms if claim.delay_ms else 0
                return Acquired("created", now=row.now, eta=eta)
            if claim.join:
                return self._acquire_alone(session, key, claim)
            counted = row.counted(claim)
            record = row.load(row.conflicts - counted)
            has_rows = _has_rows(record)
            reply = acts.acquire(record, claim, row.now)
            if counted and reply.outcome != "created":
                return reply
            if has_rows:
                return self._acquire_alone(session, key, claim)
            if self._write(session, key, row, record):
                return reply
            # Somebody changed the row since. Asking again counts this duplicate, if it still is
            # one, in the same statement.
            tries += 1
            self._database.pause(tries)

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
        with self._reading(key):
            return self._swap_or_raise(session, key, act, alone)

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Around an act on what is stored of one key, which may be anything."""
        try:
            yield
        except UNREADABLE as error:
            raise unreadable(key, error, self._options.shown_url) from error

    def _swap_or_raise(
        self,
        session: Session,
        key: str,
        act: Callable[[Record, int], Reply],
        alone: bool,
    ) -> Reply:
        tries = 0
        while True:
            # First without a lock, for that nearly always does. Whoever was overtaken then keeps
            # the others out, or a key with many duplicates could never be finished.
            try:
                with self._alone(session, key) if alone else nullcontext():
                    return self._try(session, key, act, alone)
            except _MustBeAlone:
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
        elif _has_rows(record):
            raise _MustBeAlone
        record.purge(row.now)
        forgotten = followed and record.following is None
        before = (record.dumps(), record.token, sole_task(record))
        reply = act(record, row.now_us)
        if not alone and record.more_until:
            raise _MustBeAlone  # it left a mark that is to be a row
        after = (record.dumps(), record.token, sole_task(record))
        # Duplicates that are counted meanwhile stay right while their holder stays.
        same_holder = after[2] is not None and after[2] == before[2]
        if after == before and not forgotten:
            return reply
        if not self._write(session, key, row, record, same_holder):
            raise _Overtaken
        return reply

    def _acquire_alone(self, session: Session, key: str, claim: Claim) -> Acquired:
        return self._swap(
            session, key, lambda record, us: acts.acquire(record, claim, us // 1000), alone=True
        )

    def follow(self, key: str, claim: Claim, holder_id: str) -> bool:
        def act(record: Record, us: int) -> bool:
            return acts.follow(record, claim, holder_id, us // 1000)

        return self._database.run(lambda session: self._swap(session, key, act, alone=True))

    @contextmanager
    def _alone(self, session: Session, key: str) -> Iterator[None]:
        with session.transaction(self._statements.begin):
            if self._statements.lock is not None:
                session.execute(self._statements.lock, self._values(key)).close()
            yield

    def _write(
        self, session: Session, key: str, row: Row, record: Record, same_holder: bool = False
    ) -> bool:
        """Store the record unless the row has changed since it was seen."""
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

    # -- one way -------------------------------------------------------------

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        self._one_way.put(partial(super().confirm, key, task_id, lease_ms))

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        self._one_way.put(partial(super().retry, key, task_id, delivery, lease_ms, copies))

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        self._one_way.put(partial(super().settle, key, finish, mark_done))

    def forget(self, key: str, task_id: str) -> None:
        self._one_way.put(partial(super().forget, key, task_id))

    def flush(self, timeout_s: float | None = None) -> None:
        self._one_way.flush(timeout_s)

    # -- reading and life ----------------------------------------------------

    def read(self, key: str) -> tuple[Record, int]:
        row = self._database.run(lambda session: self._row(session, self._statements.see, key))
        with self._reading(key):
            return _alive(row), row.now

    def release(self, key: str, task_id: str | None = None) -> int:
        try:
            return super().release(key, task_id)
        except UnreadableRecord:
            if task_id:
                raise
            return self._delete(key)

    def _delete(self, key: str) -> int:
        """Everything that is stored of a key, whatever it is."""

        def delete(session: Session) -> int:
            with self._alone(session, key):
                session.execute(self._statements.delete_followers, self._values(key)).close()
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
                self._act(key, lambda record, us: None)  # forgets what has lapsed, in both tables
            except UnreadableRecord:
                self._delete(key)  # by its due time, which is a column, it has lapsed
        values = self._values() | {"batch": batch}

        def swept(session: Session, statement: TextClause) -> int:
            return _count(session.execute(statement, values))

        locks = self._database.run(lambda session: swept(session, self._statements.sweep))
        marks = self._database.run(lambda session: swept(session, self._statements.sweep_marks))
        return len(abandoned) + locks + marks

    def ping(self) -> None:
        self._database.run(lambda session: session.execute(self._statements.ping, {}).close())

    def diagnose(self) -> Diagnosis:
        url, place = self._options.url, self._options.shown_url
        return self._database.run(lambda session: diagnose(session, url.get_backend_name(), place))

    def close(self) -> None:
        self._one_way.drain(self._options.timeout_s)
        self._database.close()


def _has_rows(record: Record) -> bool:
    """Whether a part of what is known of the key are rows of the other tables."""
    return record.following is not None or record.more_until > 0


def _alive(row: Row) -> Record:
    record = row.load()
    record.purge(row.now)
    return record


def _count(swept: CursorResult[Any]) -> int:
    # By its rows where it has some: Python's sqlite3 has no rowcount for what begins WITH.
    return len(swept.all()) if swept.returns_rows else swept.rowcount


def _new_revision() -> int:
    """Random, so that a row deleted and made anew is never taken for the old one.

    From the system: a program that seeds ``random`` alike in each of its
    processes would have them all write the same revisions.
    """
    return int.from_bytes(os.urandom(8)) >> 2

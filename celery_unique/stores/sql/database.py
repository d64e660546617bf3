"""One engine: turns, time-outs, reconnecting, and errors in the words of the contract."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from celery_unique.exceptions import StoreUnavailable

from .engine import Deadline, make_engine
from .errors import explain, is_busy, is_create_race, is_missing_table

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, TextClause
    from sqlalchemy.engine import CursorResult
    from sqlalchemy.exc import SQLAlchemyError

    from .url import Options

Result = TypeVar("Result")


class Session:
    """A connection for one act, and how far the act has come on it."""

    def __init__(self, connection: Connection, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline
        self.answered = 0

    def execute(self, statement: TextClause, values: dict[str, Any]) -> CursorResult[Any]:
        result = self._connection.execute(statement, values)
        self.answered += 1
        return result

    @property
    def answers_inserts(self) -> bool:
        """Whether INSERT .. RETURNING can be used: known once there is a connection."""
        return self._connection.dialect.insert_returning

    def next_act(self) -> None:
        """The same connection and a new act, with the whole time-out before it."""
        self.answered = 0
        self._deadline.restart()

    @contextmanager
    def transaction(self, begin: str) -> Iterator[None]:
        """Several statements in one transaction; otherwise each commits by itself."""
        self._connection.exec_driver_sql(begin)
        try:
            yield
        except BaseException:
            if not self._connection.invalidated:
                self._connection.exec_driver_sql("ROLLBACK")
            raise
        self._connection.exec_driver_sql("COMMIT")


class Database:
    """Runs acts on pooled connections, each act within the time-out."""

    def __init__(self, options: Options, ddl: list[str]) -> None:
        self._options = options
        self._ddl = ddl
        self._deadline = Deadline(options.timeout_s)
        self._made: Engine | None = make_engine(options, self._deadline)
        self._begin()
        _databases.add(self)

    def _begin(self) -> None:
        self._making = threading.Lock()
        # Entered in one step: a signal in ``Condition.__enter__`` could leave it taken for ever.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._turns: set[object] = set()  # of those that have a connection

    @property
    def _engine(self) -> Engine:
        engine = self._made
        if engine is None:  # in a forked child
            with self._making:
                engine = self._made = self._made or make_engine(self._options, self._deadline)
        return engine

    def run(self, act: Callable[[Session], Result]) -> Result:
        """Run the act; and again from its start, where that is sure to do no harm."""
        from sqlalchemy.exc import SQLAlchemyError

        tries = 0
        reconnected = False
        with self._deadline.running():
            while True:
                session: Session | None = None
                try:
                    with self._turn(), self._engine.connect() as connection:
                        session = Session(connection, self._deadline)
                        try:
                            return act(session)
                        except BaseException as error:
                            # Interrupted, by a time limit for example: a reply may still come,
                            # and the next act would take it for its own.
                            interruption = _interruption(error)
                            if interruption is None:
                                raise
                            connection.invalidate()
                            try:
                                raise interruption
                            finally:
                                del interruption  # its frames would keep it, and it them
                except SQLAlchemyError as error:
                    tries += 1
                    if self._deadline.passed():
                        self._fail(error)
                    elif _is_stale(error, session) and not reconnected:
                        reconnected = True
                    else:
                        self._make_way(error, tries)

    def pause(self, tries: int) -> None:
        """Let the others get on, while there is time left."""
        if self._deadline.passed():
            raise StoreUnavailable(
                f"The lock store {self._options.shown_url} is too busy: others changed the same "
                f"key all the time for {self._options.timeout_s:g} s.",
                store=self._options.shown_url,
            )
        time.sleep(min(self._deadline.remaining(), random.uniform(0, 0.001 * min(tries, 10))))

    def create_tables(self) -> None:
        """Create what is missing; others may do so at the same moment."""
        self.run(lambda session: self._create(session._connection))

    def close(self) -> None:
        self._engine.dispose()

    def forget_connections(self) -> None:
        """In a forked child: leave the parent's connections alone.

        A whole new engine, since a thread of the parent's may have been in the middle of setting
        the old one up; made by the first act, since most children never come to one.
        """
        if self._made is not None:
            _parents_engines.append(self._made)
        self._made = None
        self._begin()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """As many at once as the pool holds: its own wait knows nothing of the deadline."""
        turn, turns = object(), self._turns
        try:
            with self._mutex:
                if not self._changed.wait_for(self._has_room, self._deadline.remaining()):
                    raise StoreUnavailable(
                        f"All {self._options.pool_size} connections to the lock store "
                        f"{self._options.shown_url} are in use.",
                        store=self._options.shown_url,
                    )
                turns.add(turn)
            yield
        finally:
            # Whether it was added or not, and without a lock to wait for: wherever a signal
            # interrupts this, no turn is lost.
            turns.discard(turn)
            with self._mutex:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._turns) < self._options.pool_size

    def _make_way(self, error: SQLAlchemyError, tries: int) -> None:
        """Do what lets the act succeed next time, or raise."""
        cause = getattr(error, "orig", None)
        if is_busy(cause) or is_create_race(cause):
            self.pause(tries)
        elif is_missing_table(cause) and self._options.create_table:
            self._create_missing_table(tries)
        else:
            self._fail(error)

    def _create_missing_table(self, tries: int) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._turn(), self._engine.connect() as connection:
                self._create(connection)
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None)
            if not (is_busy(cause) or is_create_race(cause)) or self._deadline.passed():
                self._fail(error)
        if tries > 1:
            self.pause(tries)

    def _create(self, connection: Connection) -> None:
        for statement in self._ddl:
            connection.exec_driver_sql(statement)

    def _fail(self, error: SQLAlchemyError) -> NoReturn:
        raise StoreUnavailable(
            explain(error, self._options), store=self._options.shown_url
        ) from error


def _interruption(error: BaseException) -> BaseException | None:
    """What is neither the database's nor this store's: raised by a signal's handler, say.

    SQLAlchemy wraps an exception that comes while it prepares a statement, whatever it is.
    """
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

    if isinstance(error, StatementError) and not isinstance(error, DBAPIError):
        return error.orig or error
    return None if isinstance(error, (SQLAlchemyError, StoreUnavailable)) else error


def _is_stale(error: Any, session: Session | None) -> bool:
    """A pooled connection whose server has gone since: nothing was done on it.

    Only an act's first statement may be sent again. It is one that reads, or an
    acquire, which knows its own row by the revision. A connection that breaks
    later leaves it open what happened, and the caller must know that.
    """
    return (
        session is not None
        and session.answered == 0
        and bool(getattr(error, "connection_invalidated", False))
    )


#: Every database of this process, and in a child the engines of its parent: a child must neither
#: use nor close those connections, and what is garbage would be closed.
_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_parents_engines: list[Engine] = []


def _forget_in_child() -> None:
    for database in _databases:
        database.forget_connections()


os.register_at_fork(after_in_child=_forget_in_child)

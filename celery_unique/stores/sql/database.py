"""One database: runs acts on pooled connections, with retries, within the time-out.

``Database.run`` is the entrance. Errors of the driver leave it as ``StoreUnavailable``.
"""

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
    """A connection for one act, and the number of statements that were answered on it."""

    def __init__(self, connection: Connection, deadline: Deadline) -> None:
        self._connection = connection
        self._deadline = deadline
        self.answered = 0

    def execute(self, statement: TextClause, values: dict[str, Any]) -> CursorResult[Any]:
        result = self._connection.execute(statement, values)
        self.answered += 1
        return result

    @property
    def has_insert_returning(self) -> bool:
        """Whether INSERT .. RETURNING is supported: known once there is a connection."""
        return self._connection.dialect.insert_returning

    def next_act(self) -> None:
        """Begin a new act on the same connection, with a new time-out."""
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
        self._turns: set[object] = set()  # of threads that have a connection

    @property
    def _engine(self) -> Engine:
        engine = self._made
        if engine is None:  # in a forked child
            with self._making:
                engine = self._made = self._made or make_engine(self._options, self._deadline)
        return engine

    def run(self, act: Callable[[Session], Result]) -> Result:
        """Run the act, and again from its start where nothing was done."""
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
                            # Interrupted, by a time limit for example: the next act would take
                            # a reply that still arrives for its own.
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
                        self._prepare_retry(error, tries)

    def pause(self, tries: int) -> None:
        """Wait for other processes, while there is time left."""
        if self._deadline.passed():
            raise StoreUnavailable(
                f"The lock store {self._options.shown_url} is too busy: other processes changed "
                f"the same key without a pause for {self._options.timeout_s:g} s.",
                store=self._options.shown_url,
            )
        time.sleep(min(self._deadline.remaining(), random.uniform(0, 0.001 * min(tries, 10))))

    def create_tables(self) -> None:
        """Create the tables that are missing; other processes may do so at the same time."""
        self.run(lambda session: self._create(session._connection))

    def close(self) -> None:
        self._engine.dispose()

    def forget_connections(self) -> None:
        """In a forked child: use none of the parent's connections.

        A new engine, since a thread of the parent may have been setting the old one up; made by
        the first act, since most children run none.
        """
        if self._made is not None:
            _parents_engines.append(self._made)
        self._made = None
        self._begin()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Limit connections to ``pool_size``, and wait for one no longer than the deadline."""
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
            # Whether it was added or not, and without a lock: no turn is lost wherever a signal
            # interrupts this.
            turns.discard(turn)
            with self._mutex:
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._turns) < self._options.pool_size

    def _prepare_retry(self, error: SQLAlchemyError, tries: int) -> None:
        """Wait, or create the tables; raise if neither can help."""
        if _is_transient(error):
            self.pause(tries)
        elif is_missing_table(getattr(error, "orig", None)) and self._options.create_table:
            self._create_missing_table(tries)
        else:
            self._fail(error)

    def _create_missing_table(self, tries: int) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._turn(), self._engine.connect() as connection:
                self._create(connection)
        except SQLAlchemyError as error:
            if not _is_transient(error) or self._deadline.passed():
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
    """An exception of neither the database nor this store, such as a signal handler's.

    SQLAlchemy wraps any exception that is raised while it prepares a statement.
    """
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

    if isinstance(error, StatementError) and not isinstance(error, DBAPIError):
        return error.orig or error
    return None if isinstance(error, (SQLAlchemyError, StoreUnavailable)) else error


def _is_transient(error: SQLAlchemyError) -> bool:
    cause = getattr(error, "orig", None)
    return is_busy(cause) or is_create_race(cause)


def _is_stale(error: Any, session: Session | None) -> bool:
    """Whether the connection was lost while it was idle in the pool: nothing was done on it.

    Only the first statement of an act may be sent again. It is one that reads, or an acquire,
    which recognizes its own row by the revision. After a later one the outcome is unknown, and
    the caller must be notified.
    """
    return (
        session is not None
        and session.answered == 0
        and bool(getattr(error, "connection_invalidated", False))
    )


#: Every database of this process, and in a child the engines of its parent: a child must neither
#: use nor close those connections, and garbage collection would close them.
_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_parents_engines: list[Engine] = []


def _forget_in_child() -> None:
    for database in _databases:
        database.forget_connections()


os.register_at_fork(after_in_child=_forget_in_child)

"""SQLAlchemy engines whose every wait ends with the deadline of the act."""

from __future__ import annotations

import logging
import math
import os
import select
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from celery_unique.exceptions import ConfigurationError

from .url import INSTALL, SETTING, Options, check_driver_options, with_flags, wrong

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)


Reply = TypeVar("Reply")

BETWEEN_ACTS_S = 0.25


class Deadline(threading.local):
    """When the act of this thread must be over."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        self.restart()
        try:
            yield
        finally:
            self._at = None

    def restart(self) -> None:
        self._at = time.monotonic() + self._timeout_s

    def remaining(self) -> float:
        """Seconds that are left; between acts, when a pool tidies up, a moment."""
        return BETWEEN_ACTS_S if self._at is None else max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        return self._at is not None and self._at <= time.monotonic()


def call_within(seconds: float, call: Callable[[], Reply], late: Callable[[Reply], Any]) -> Reply:
    """Call in a thread of its own; TimeoutError when it takes longer than that.

    For what cannot be told how long it may take: resolving a name, libpq's
    connect. A result that comes too late is given to ``late``.
    """
    attempt = _Attempt(call, late)
    thread = threading.Thread(target=attempt.run, name="celery_unique connect", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no new threads while the interpreter shuts down
        return call()
    if not attempt.over.wait(seconds) and attempt.give_up():
        raise TimeoutError(f"no connection within {seconds:.3g} s")
    if attempt.error is not None:
        raise attempt.error
    return attempt.result  # type: ignore[no-any-return]


class _Attempt:
    def __init__(self, call: Callable[[], Any], late: Callable[[Any], Any]) -> None:
        self._call = call
        self._late = late
        self._mutex = threading.Lock()
        self._given_up = False
        self.over = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            self.error = error
        with self._mutex:
            self.over.set()
            too_late = self._given_up
        if too_late and self.error is None:
            self._late(self.result)

    def give_up(self) -> bool:
        with self._mutex:
            self._given_up = not self.over.is_set()
            return self._given_up


def prepare_pymysql(engine: Engine, options: Options, deadline: Deadline) -> None:
    from sqlalchemy import event

    connection_class, found_rows = _bounded_mysql_connection(deadline)

    def connect(*args: Any, client_flag: int = 0, **given: Any) -> Any:
        # Rows are to be counted only when they are changed: else an INSERT that found its row
        # could not be told from one that inserted it.
        flags = client_flag & ~found_rows
        return connection_class(*args, client_flag=flags, **with_flags(given))

    connect_within(engine, deadline, connect)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            for statement in _mysql_session_settings(
                options.timeout_s, connection.get_server_info()
            ):
                cursor.execute(statement)


def _mysql_session_settings(timeout_s: float, server: str) -> tuple[str, ...]:
    settings: dict[str, str | float] = {
        # The hour that comes twice when summer time ends would move the clock back.
        "time_zone": "'+00:00'",
        # What does not fit into a column is an error, not cut off.
        "sql_mode": "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        # Nobody goes on waiting for a row when the caller has given up.
        "innodb_lock_wait_timeout": max(1, math.ceil(timeout_s)),
    }
    if "MariaDB" in server:  # MySQL can be told neither
        # The server must not go on with what the caller has given up ...
        settings["max_statement_time"] = timeout_s
        # ... nor keep a row for a process that was stopped in a transaction.
        settings["idle_transaction_timeout"] = max(1, math.ceil(timeout_s))
    return (
        # A compare-and-set that lost must see what it lost to.
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SET SESSION " + ", ".join(f"{name} = {value}" for name, value in settings.items()),
    )


def _bounded_mysql_connection(deadline: Deadline) -> tuple[Any, int]:
    """PyMySQL's connection, whose waits for the server end with the act's deadline."""
    from pymysql.connections import Connection
    from pymysql.constants import CLIENT, SERVER_STATUS

    class BoundedConnection(Connection):
        # PyMySQL reads these before every wait. What it was given itself is not used.
        @property
        def _read_timeout(self) -> float:
            return max(deadline.remaining(), 0.001)

        @_read_timeout.setter
        def _read_timeout(self, value: float | None) -> None:
            pass

        _write_timeout = _read_timeout

        def rollback(self) -> None:
            """Only where there is a transaction: a pool asks for it after every act, and that
            would be one more round trip."""
            if self.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
                super().rollback()

    return BoundedConnection, CLIENT.FOUND_ROWS


#: How long SQLite itself waits for another process's write lock. It sleeps without letting a
#: gevent hub go on, so it waits briefly and the store asks again until its time-out.
BUSY_MS = 20


def make_engine(options: Options, deadline: Deadline) -> Engine:
    """An engine whose every statement commits by itself. It connects when it is used."""
    from sqlalchemy import create_engine

    from .pool import IdleConnections

    backend = options.url.get_backend_name()
    if backend == "sqlite":
        _check_sqlite_version()
    try:
        check_driver_options(options)
        engine = create_engine(
            options.url,
            isolation_level="AUTOCOMMIT",
            poolclass=IdleConnections,
            pool_size=options.pool_size,
            hide_parameters=True,  # errors are logged, and a key is made from arguments
            connect_args=_CONNECT_ARGUMENTS[backend](options),
        )
    except ImportError as error:
        raise ConfigurationError(
            f"{SETTING}: the lock store {options.shown_url} needs a driver: {INSTALL}",
            setting=SETTING,
        ) from error
    if backend == "sqlite":
        _prepare_sqlite(engine, options.synchronous)
    elif backend == "mysql":
        prepare_pymysql(engine, options, deadline)
    else:
        _prepare_psycopg(engine, deadline)
    return engine


def _check_sqlite_version() -> None:
    import sqlite3

    if sqlite3.sqlite_version_info < (3, 35):
        raise ConfigurationError(
            f"{SETTING}: the SQL lock store needs SQLite 3.35 or newer, and this Python has "
            f"{sqlite3.sqlite_version}. Use another database, or a newer Python.",
            setting=SETTING,
        )


def _prepare_sqlite(engine: Engine, synchronous: str) -> None:
    from sqlalchemy import event
    from sqlalchemy.exc import DisconnectionError

    path = engine.url.database or ""
    replaced: set[tuple[int, int]] = set()

    @event.listens_for(engine, "checkout")
    def check_file(_connection: Any, record: Any, _proxy: Any) -> None:
        """A deleted file lives on for those who have it open, and other processes make a new one:
        each would admit its own tasks."""
        opened = record.info["file"]
        if _identity(path) == opened:
            return
        if opened not in replaced:
            replaced.add(opened)
            logger.warning(
                "The lock store's file %s was deleted or replaced while it was in use. Its locks "
                "are gone, as if they had lapsed: a call may be admitted beside a task that still "
                "waits or runs. Stop all workers before a file of locks is deleted.",
                path,
            )
        raise DisconnectionError("the file was deleted or replaced")

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        # Asked first: switching takes the whole file, and it stays switched.
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        record.info["file"] = _identity(path)


def _sqlite_options(_options: Options) -> dict[str, Any]:
    import sqlite3

    class ClosingConnection(sqlite3.Connection):
        """Closes its cursors with it. An interrupted one would keep the file locked for everybody,
        as long as something refers to it, a traceback for example."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
            super().__init__(*args, **options)

        def cursor(self, *args: Any, **options: Any) -> Any:
            cursor = super().cursor(*args, **options)
            self._cursors.add(cursor)
            return cursor

        def close(self) -> None:
            for cursor in self._cursors:
                cursor.close()
            super().close()

    return {"factory": ClosingConnection}


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116  it is asked for by every act
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _prepare_psycopg(engine: Engine, deadline: Deadline) -> None:
    connection_class = _bounded_connection(engine.dialect.loaded_dbapi, deadline)
    connect_within(engine, deadline, connection_class.connect)


def _bounded_connection(psycopg: Any, deadline: Deadline) -> Any:
    """psycopg's connection, whose waits for the server end with the act's deadline.

    The server's ``statement_timeout`` does not help against a server that is
    gone: without this a caller would wait until TCP notices.
    """

    class BoundedConnection(psycopg.Connection):
        def wait(self, generator: Any, *_how: Any, **_options: Any) -> Any:
            """Drive psycopg's generator: it yields what to wait for, and is sent what came."""
            poll = select.poll()
            end_at = time.monotonic() + deadline.remaining()
            try:
                wanted = next(generator)
                while True:
                    poll.register(self.pgconn.socket, _POLL_FOR[wanted])
                    events = poll.poll(max(0, math.ceil((end_at - time.monotonic()) * 1000)))
                    if not events:
                        raise psycopg.OperationalError("the server did not answer in time")
                    wanted = generator.send(_ready(events))
            except StopIteration as end:
                return end.value
            except BaseException:
                # Interrupted, or too late: an answer that still comes would be
                # taken for that of the next statement.
                if self.pgconn.transaction_status == _ACTIVE:
                    self.pgconn.finish()
                raise

    return BoundedConnection


#: libpq's number for a connection that waits for the end of a statement.
_ACTIVE = 1

#: psycopg's numbers for reading and writing are those of the selectors module.
_POLL_FOR = {
    selectors.EVENT_READ: select.POLLIN,
    selectors.EVENT_WRITE: select.POLLOUT,
    selectors.EVENT_READ | selectors.EVENT_WRITE: select.POLLIN | select.POLLOUT,
}


def _ready(events: list[tuple[int, int]]) -> int:
    """Errors and hang-ups count as both, so that libpq looks and finds out."""
    happened = events[0][1]
    return bool(happened & ~select.POLLOUT) * selectors.EVENT_READ + (
        bool(happened & ~select.POLLIN) * selectors.EVENT_WRITE
    )


def _psycopg_options(options: Options) -> dict[str, Any]:
    """Arguments of psycopg.connect(); what the URL gives itself wins."""
    chosen: dict[str, Any] = {
        # libpq counts whole seconds and at least two: the deadline above is the real one.
        "connect_timeout": max(2, math.ceil(options.timeout_s)),
        "application_name": "celery_unique",
        # A connection that rests in the pool must not be forgotten by a firewall on the way.
        "keepalives_idle": 60,
    }
    chosen = {name: value for name, value in chosen.items() if name not in options.url.query}
    if options.through_pooler:
        # Behind a transaction pooler the next statement may run in another session.
        chosen["prepare_threshold"] = None
    else:
        chosen["options"] = _session_settings(options)
    return chosen


def _session_settings(options: Options) -> str:
    milliseconds = math.ceil(options.timeout_s * 1000)
    settings = {
        # The server must not go on with what the caller has given up ...
        "statement_timeout": milliseconds,
        # ... nor keep a row for a process that was stopped in a transaction ...
        "idle_in_transaction_session_timeout": milliseconds,
        # ... and a compare-and-set that lost must see what it lost to.
        "default_transaction_isolation": r"read\ committed",
    }
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    given = options.url.query.get("options", "")
    return f"{ours} {given if isinstance(given, str) else ' '.join(given)}".strip()


#: What ``connect`` is given beside the URL.
_CONNECT_ARGUMENTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "postgresql": _psycopg_options,
    "mysql": lambda options: {},
    "sqlite": _sqlite_options,
}


def connect_within(engine: Engine, deadline: Deadline, connect: Callable[..., Any]) -> None:
    """Let the engine make its connections by ``connect``, within the time of the act."""
    from sqlalchemy import event

    @event.listens_for(engine, "do_connect")
    def connect_in_time(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        try:
            return call_within(
                deadline.remaining(),
                lambda: connect(*args, **options),
                late=lambda connection: connection.close(),
            )
        except TimeoutError as error:
            raise engine.dialect.loaded_dbapi.OperationalError(str(error)) from None
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            # Not an answer of the server's. Its text is not shown: it may tell a password.
            raise wrong(
                f"its driver cannot connect with what it says ({type(error).__name__}). Write it "
                "as HOST:PORT/DATABASE, and after the ? only what is needed"
            ) from None

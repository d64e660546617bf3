"""How each driver is set up: sessions, waiting for locks, and a deadline for every wait."""

from __future__ import annotations

import logging
import math
import os
import select
import selectors
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_unique.exceptions import ConfigurationError

from .connecting import connect_within
from .deadline import Deadline
from .mysql_driver import prepare_pymysql
from .options import INSTALL, Options, own_options
from .psycopg_options import check_psycopg
from .pymysql_options import check_pymysql, pymysql_flags
from .url_check import SETTING

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)

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
        _check_driver_options(options)
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


def _check_driver_options(options: Options) -> None:
    backend = options.url.get_backend_name()
    dialect_class: Any = options.url.get_dialect()
    dialect = dialect_class(dbapi=dialect_class.import_dbapi())
    if backend == "mysql":
        check_pymysql(dialect, options, own_options(backend))
    elif backend == "postgresql":
        check_psycopg(dialect, options, own_options(backend))


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
    "mysql": lambda options: dict(pymysql_flags(options.url)),
    "sqlite": _sqlite_options,
}

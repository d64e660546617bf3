"""SQLAlchemy engines whose every wait ends with the deadline of the act.

``make_engine`` is the entrance. Below it are the set-up of SQLite, PostgreSQL and MariaDB
connections, and the deadline that bounds connecting and every reply of a server.
"""

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
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from celery_unique.exceptions import ConfigurationError

from .url import INSTALL, SETTING, Options, check_driver_options, with_flags, wrong

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")


def make_engine(options: Options, deadline: Deadline) -> Engine:
    """An engine whose every statement commits by itself. It connects on first use."""
    from sqlalchemy import create_engine

    from .pool import IdleConnections

    backend = options.url.get_backend_name()
    arguments = {"sqlite": _sqlite_arguments, "postgresql": _psycopg_arguments}.get(backend)
    try:
        check_driver_options(options)
        engine = create_engine(
            options.url,
            isolation_level="AUTOCOMMIT",
            poolclass=IdleConnections,
            pool_size=options.pool_size,
            hide_parameters=True,  # errors are logged, and a key is made from arguments
            connect_args=arguments(options) if arguments else {},
        )
    except ImportError as error:
        raise ConfigurationError(
            f"{SETTING}: the lock store {options.shown_url} needs a driver: {INSTALL}",
            setting=SETTING,
        ) from error
    if backend == "sqlite":
        _prepare_sqlite(engine, options.synchronous)
    elif backend == "mysql":
        _prepare_pymysql(engine, options, deadline)
    else:
        _prepare_psycopg(engine, deadline)
    return engine


# -- SQLite --------------------------------------------------------------------------------------

#: How long SQLite itself waits for the write lock of another process. It sleeps without yielding
#: to a gevent hub, so it waits briefly and the store retries until its time-out.
BUSY_MS = 20


def _sqlite_arguments(_options: Options) -> dict[str, Any]:
    import sqlite3

    if sqlite3.sqlite_version_info < (3, 35):
        raise wrong(
            "the SQL lock store needs SQLite 3.35 or newer, and this Python has "
            f"{sqlite3.sqlite_version}. Use another database, or a newer Python"
        )

    class ClosingConnection(sqlite3.Connection):
        """Closes its cursors with it. An interrupted one would keep the file locked for all
        processes as long as something refers to it, a traceback for example."""

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


def _prepare_sqlite(engine: Engine, synchronous: str) -> None:
    from sqlalchemy import event
    from sqlalchemy.exc import DisconnectionError

    path = engine.url.database or ""
    replaced: set[tuple[int, int]] = set()

    @event.listens_for(engine, "checkout")
    def check_file(_connection: Any, record: Any, _proxy: Any) -> None:
        """Detect a deleted file. It stays usable where it is open, while other processes create a
        new one: both would admit tasks."""
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
        # Read first: to switch it locks the whole file, and the mode is persistent.
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        record.info["file"] = _identity(path)


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116  called by every act
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


# -- PostgreSQL ----------------------------------------------------------------------------------

#: libpq's number for a connection that waits for the end of a statement.
_ACTIVE = 1

#: psycopg's numbers for reading and writing are those of the selectors module.
_POLL_FOR = {
    selectors.EVENT_READ: select.POLLIN,
    selectors.EVENT_WRITE: select.POLLOUT,
    selectors.EVENT_READ | selectors.EVENT_WRITE: select.POLLIN | select.POLLOUT,
}


def _psycopg_arguments(options: Options) -> dict[str, Any]:
    """Arguments of psycopg.connect(). Options in the URL take precedence."""
    defaults: dict[str, Any] = {
        # libpq counts whole seconds and at least two: the deadline is the effective limit.
        "connect_timeout": max(2, math.ceil(options.timeout_s)),
        "application_name": "celery_unique",
        # A firewall must not drop a connection that is idle in the pool.
        "keepalives_idle": 60,
    }
    chosen = {name: value for name, value in defaults.items() if name not in options.url.query}
    if options.through_pooler:
        # Behind a transaction pooler the next statement may run in another session.
        return {**chosen, "prepare_threshold": None}
    milliseconds = math.ceil(options.timeout_s * 1000)
    settings = {
        # The server must not continue with what the caller has given up ...
        "statement_timeout": milliseconds,
        # ... nor keep a row for a process that was stopped in a transaction ...
        "idle_in_transaction_session_timeout": milliseconds,
        # ... and a compare-and-set that lost must see the row that won.
        "default_transaction_isolation": r"read\ committed",
    }
    given = options.url.query.get("options", ())
    ours = (f"-c {name}={value}" for name, value in settings.items())
    return {**chosen, "options": " ".join((*ours, *([given] if isinstance(given, str) else given)))}


def _prepare_psycopg(engine: Engine, deadline: Deadline) -> None:
    """Bound psycopg's waits for the server by the deadline.

    The server's ``statement_timeout`` does not help if the server is gone: without this a caller
    would wait until TCP notices.
    """
    psycopg: Any = engine.dialect.loaded_dbapi

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
                    wanted = generator.send(_ready(events[0][1]))
            except StopIteration as end:
                return end.value
            except BaseException:
                # Interrupted, or too late: the next statement would take a reply that still
                # arrives for its own.
                if self.pgconn.transaction_status == _ACTIVE:
                    self.pgconn.finish()
                raise

    _connect_within(engine, deadline, BoundedConnection.connect)


def _ready(happened: int) -> int:
    """Errors and hang-ups count as both, so that libpq reads and detects them."""
    return bool(happened & ~select.POLLOUT) * selectors.EVENT_READ + (
        bool(happened & ~select.POLLIN) * selectors.EVENT_WRITE
    )


# -- MariaDB and MySQL ---------------------------------------------------------------------------


def _prepare_pymysql(engine: Engine, options: Options, deadline: Deadline) -> None:
    from pymysql.connections import Connection
    from pymysql.constants import CLIENT, SERVER_STATUS
    from sqlalchemy import event

    class BoundedConnection(Connection):
        """PyMySQL's connection, whose waits for the server end with the deadline."""

        # PyMySQL reads these before every wait. Its own arguments are not used.
        @property
        def _read_timeout(self) -> float:
            return max(deadline.remaining(), 0.001)

        @_read_timeout.setter
        def _read_timeout(self, value: float | None) -> None:
            pass

        _write_timeout = _read_timeout

        def rollback(self) -> None:
            """Only within a transaction: the pool calls it after every act, and without one it is
            a round trip without effect."""
            if self.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
                super().rollback()

    def connect(*args: Any, client_flag: int = 0, **given: Any) -> Any:
        # Count changed rows, not found ones: else an INSERT that found its row could not be
        # distinguished from one that inserted it.
        flags = client_flag & ~CLIENT.FOUND_ROWS
        return BoundedConnection(*args, client_flag=flags, **with_flags(given))

    _connect_within(engine, deadline, connect)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        is_mariadb = "MariaDB" in connection.get_server_info()
        with connection.cursor() as cursor:
            # A compare-and-set that lost must see the row that won.
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(_mysql_settings(options.timeout_s, is_mariadb))


def _mysql_settings(timeout_s: float, is_mariadb: bool) -> str:
    settings: dict[str, str | float] = {
        # The hour that comes twice when summer time ends would move the clock back.
        "time_zone": "'+00:00'",
        # A value that does not fit into its column is an error, and not truncated.
        "sql_mode": "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        # A session must not wait for a row after the caller has given up.
        "innodb_lock_wait_timeout": max(1, math.ceil(timeout_s)),
    }
    if is_mariadb:  # MySQL has neither
        # The server must not continue with what the caller has given up ...
        settings["max_statement_time"] = timeout_s
        # ... nor keep a row for a process that was stopped in a transaction.
        settings["idle_transaction_timeout"] = max(1, math.ceil(timeout_s))
    return "SET SESSION " + ", ".join(f"{name} = {value}" for name, value in settings.items())


# -- deadlines -----------------------------------------------------------------------------------

#: What is left between acts, when the pool cleans up.
BETWEEN_ACTS_S = 0.25


class Deadline(threading.local):
    """End of the time-out of the act that this thread runs."""

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
        """Seconds that are left."""
        return BETWEEN_ACTS_S if self._at is None else max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        return self._at is not None and self._at <= time.monotonic()


def _connect_within(engine: Engine, deadline: Deadline, connect: Callable[..., Any]) -> None:
    """Let the engine connect by ``connect``, within the time-out of the act."""
    from sqlalchemy import event

    @event.listens_for(engine, "do_connect")
    def connect_in_time(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        try:
            return _call_within(
                deadline.remaining(),
                lambda: connect(*args, **options),
                late=lambda connection: connection.close(),
            )
        except TimeoutError as error:
            raise engine.dialect.loaded_dbapi.OperationalError(str(error)) from None
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            # Not a reply of the server. Without its text, which may contain the password.
            raise wrong(
                f"its driver cannot connect with it ({type(error).__name__}). Write it as "
                "HOST:PORT/DATABASE, and after the ? only what is needed"
            ) from None


def _call_within(seconds: float, call: Callable[[], Reply], late: Callable[[Reply], Any]) -> Reply:
    """Call in a thread of its own; TimeoutError when it takes longer.

    For calls without a time-out: name resolution, libpq's connect. ``late`` receives a result that
    comes after the time-out.
    """
    future: Future[Reply] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                late(result)

    try:
        threading.Thread(target=run, name="celery_unique connect", daemon=True).start()
    except RuntimeError:  # no new threads while the interpreter shuts down
        return call()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.cancel():
            raise TimeoutError(f"no connection within {seconds:.3g} s") from None
        return future.result()  # it came meanwhile, or is a time-out of the call itself
